# The trainer as the development cluster runs it: our source alone. PyTorch comes from the claim `torch`, mounted at
# /opt/torch. The image with PyTorch in it is trainer_image/Dockerfile. `cluster images` prepares the context.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app:/opt/torch
COPY src/ /app/
RUN python3 -m compileall -q /app
USER 65532:65532
WORKDIR /app
ENTRYPOINT ["python3", "-m", "cost_aware_trainer.agent"]
