"""What control and app ask of the place where jobs run, whichever it is: Kubernetes, or a store in this process.

Documents are those of the Kubernetes API, as mappings. Every call raises `ApiError` where it is refused or nobody answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cost_aware_operator.api import API_VERSION, FIELD_OWNER, KIND
from cost_aware_operator.api.job import JobKey, JobReference


class ApiError(Exception):
    """The API server refused or could not be reached. `status` is the HTTP code, 0 without an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


class ConflictError(ApiError):
    """Somebody else wrote the object first (409)."""


@dataclass(frozen=True)
class StoredData:
    """A ConfigMap's data with the version it was read at, for a write that fails if somebody wrote in between."""

    data: Mapping[str, str]
    """The data."""
    resource_version: str
    """The version that it was read at."""
    owner_uids: frozenset[str]
    """Uids of its owners."""


def owner_uids(document: Mapping[str, Any]) -> frozenset[str]:
    """The uids of an object's owners."""
    return frozenset(r["uid"] for r in document["metadata"].get("ownerReferences") or ())


def status_document(job: JobReference, status: Mapping[str, Any]) -> dict[str, Any]:
    """What is applied to write a status."""
    # the version makes the write fail rather than land on a changed manifest or a new job of the same name
    metadata = {"name": job.key.name, "namespace": job.key.namespace, "resourceVersion": job.resource_version}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}


def event_document(
    job: JobReference, reason: str, message: str, *, warning: bool, at: str, name: str
) -> dict[str, Any]:
    """An event about a job; `at` is a time of the API."""
    about = {"apiVersion": API_VERSION, "kind": KIND, "name": job.key.name, "namespace": job.key.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": job.key.namespace},
        "involvedObject": {**about, "uid": job.uid},
        "reason": reason,
        "message": message[:1024],
        "type": "Warning" if warning else "Normal",
        "source": {"component": FIELD_OWNER},
        "reportingComponent": FIELD_OWNER,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


class Cluster(Protocol):
    """All calls that the operator makes to the place where jobs run."""

    async def training_job(self, key: JobKey) -> dict[str, Any] | None:
        """The CostAwareTrainingJob's document."""

    async def training_jobs(self, namespaces: Sequence[str]) -> list[dict[str, Any]]:
        """All CostAwareTrainingJobs of some namespaces, or of all."""

    async def child_job(self, key: JobKey) -> dict[str, Any] | None:
        """The Indexed Job's document."""

    async def pods(self, namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Pods by labels."""

    async def claim_exists(self, namespace: str, name: str) -> bool:
        """Whether a PersistentVolumeClaim exists."""

    async def node(self, name: str) -> dict[str, Any] | None:
        """A node's document; None where it is gone or may not be read."""

    async def nodes(self, instance_types: Sequence[str]) -> list[dict[str, Any]] | None:
        """Up to 500 nodes, of some instance types or of all; None where they may not be listed."""

    async def pods_on(self, node: str) -> list[dict[str, Any]] | None:
        """Pods of all namespaces that take something of a node; None where they may not be listed."""

    async def config_map(self, namespace: str, name: str) -> StoredData | None:
        """A ConfigMap's data."""

    async def config_maps(self, namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """ConfigMaps by labels."""

    async def service_owners(self, key: JobKey) -> frozenset[str] | None:
        """The owners' uids of the Service of a job's name; None where there is no such Service."""

    async def apply(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply; the fields written are ours, whoever had them."""

    async def save_config_map(self, document: Mapping[str, Any], resource_version: str | None) -> str:
        """Creates or replaces a ConfigMap, but only over the version that was read.

        Returns:
            The new version.

        Raises:
            ConflictError: somebody wrote it in between, another leader for example.
        """

    async def set_job(
        self, key: JobKey, *, suspend: bool, active_deadline_seconds: int | None, completions: int | None
    ) -> None:
        """Sets what of a Job may change while it runs, and nothing else. An Indexed Job's pods may grow and shrink at its end.

        That suspension was asked for, or its end, is written with it: others may suspend the Job too.
        """

    async def write_status(self, job: JobReference, status: Mapping[str, Any]) -> None:
        """The whole status, by server-side apply on the subresource: what is left out is removed.

        Raises:
            ConflictError: the job is not the one that was read any more; its status would be about something else.
        """

    async def delete(self, kind: str, key: JobKey, uid: str) -> None:
        """Deletes an object with its dependents, if it is still the one that was meant."""

    async def evict(self, namespace: str, name: str, uid: str) -> None:
        """Has a pod end gracefully, if it is still the one that was meant. A budget of disruptions may forbid it for now.

        Raises:
            ApiError: it could not be asked for; 403 without permission.
        """

    async def post_event(
        self, job: JobReference, reason: str, message: str, *, warning: bool, at: str, name: str
    ) -> None:
        """A Kubernetes event about a job; posting the same name twice is harmless."""

    async def create_secret(self, document: Mapping[str, Any]) -> bool:
        """Makes a Secret; False where one of its name is there already, whoever's it is. Nothing of it is read."""

    async def own_secret(self, namespace: str, name: str, create_as: Mapping[str, str]) -> Mapping[str, str]:
        """The data (base64) of a Secret of the operator's own namespace, made as `create_as` where it is missing."""

    async def release_lease(self, namespace: str, name: str, holder: str) -> None:
        """Gives a Lease up, if it is still held: the next leader need not wait until it expires."""
