"""The resource as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.api.status import JobStatus

ANNOTATION_AGAIN = "costaware.dev/train-again"
"""Set to "true" on a job that shall do what an earlier one of its name has done."""


@dataclass(frozen=True, order=True)
class JobKey:
    """A job's identity in the work queue."""

    namespace: str
    """Its namespace."""
    name: str
    """Its name."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class JobReference:
    """One version of one job: what a write about it needs to know, whether or not its manifest could be read."""

    key: JobKey
    """The job."""
    uid: str
    """Its uid."""
    resource_version: str
    """The version that was read."""

    @classmethod
    def to(cls, document: Mapping[str, Any]) -> JobReference:
        """A reference to what the API server answered."""
        metadata = document["metadata"]
        return cls(
            JobKey(metadata["namespace"], metadata["name"]), metadata["uid"], metadata.get("resourceVersion", "")
        )


@dataclass(frozen=True)
class TrainingJob:
    """A CostAwareTrainingJob as it was read from the API server."""

    key: JobKey
    """Its identity."""
    uid: str
    """Its uid."""
    resource_version: str
    """The version that was read."""
    generation: int
    """Number of its manifest's versions."""
    created_at: datetime
    """When it was made."""
    spec: JobSpec
    """Its manifest."""
    status: JobStatus
    """What the last reconcile wrote."""
    trains_again: bool = False
    """Whether its owner has said that what an earlier job did shall be done, and paid, again."""

    @property
    def reference(self) -> JobReference:
        """The job as writes name it."""
        return JobReference(self.key, self.uid, self.resource_version)

    @classmethod
    def parse(cls, document: dict[str, Any]) -> TrainingJob:
        """Reads the API server's document.

        Raises:
            pydantic.ValidationError: spec or status does not fit this version's models.
        """
        metadata = document["metadata"]
        return cls(
            key=JobKey(metadata["namespace"], metadata["name"]),
            uid=metadata["uid"],
            resource_version=metadata.get("resourceVersion", ""),
            generation=metadata.get("generation", 0),
            created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
            spec=JobSpec.model_validate(document["spec"]),
            status=JobStatus.model_validate(document.get("status") or {}),
            trains_again=(metadata.get("annotations") or {}).get(ANNOTATION_AGAIN) == "true",
        )
