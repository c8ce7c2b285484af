"""The Secret with the agents' token. Pure."""

from __future__ import annotations

from typing import Any

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.workload.names import child_metadata, secret_name


def secret(job: TrainingJob, token: str) -> dict[str, Any]:
    """The agents' token, so that only the operator can give orders."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(job, secret_name(job.key.name)),
        "type": "Opaque",
        "stringData": {"token": token},
    }
