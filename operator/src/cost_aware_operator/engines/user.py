"""What the command line asks of the place where jobs run, in a person's name and not in the operator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from cost_aware_operator.api.job import JobKey

USER = "catj"
"""Manager of the fields that the command line writes."""


class UserCluster(Protocol):
    """Calls of the command line. Documents are those of the Kubernetes API. Every call raises `ApiError` where it is refused."""

    async def jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """All CostAwareTrainingJobs of a namespace, or of all."""

    async def job(self, key: JobKey) -> dict[str, Any] | None:
        """A CostAwareTrainingJob; None where there is none."""

    async def submit(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a job.

        Raises:
            ConflictError: there is one of this name.
        """

    async def set_suspended(self, key: JobKey, *, suspended: bool) -> None:
        """Writes `spec.suspend`."""

    async def remove(self, key: JobKey) -> None:
        """Deletes a job."""

    async def events(self, key: JobKey) -> list[dict[str, Any]]:
        """Events about a job, the oldest first."""
