"""What the operator's installation adds to every job's pods."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

DEFAULT_IMAGE = "cost-aware-trainer:latest"


class PodDefaults(BaseModel):
    """The pod defaults of the Helm values (`trainer.podDefaults`); a job's own template is merged over them."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    image: Annotated[str, AfterValidator(lambda image: image or DEFAULT_IMAGE)] = DEFAULT_IMAGE
    image_pull_policy: str | None = None
    env: tuple[dict[str, Any], ...] = ()
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()
    resources: dict[str, Any] | None = None
