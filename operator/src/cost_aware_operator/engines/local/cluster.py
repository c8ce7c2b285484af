"""The Cluster of a store in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_aware_operator.api import FIELD_OWNER, KIND
from cost_aware_operator.api.job import JobKey, JobReference
from cost_aware_operator.engines.cluster import (
    ApiError,
    ConflictError,
    StoredData,
    event_document,
    owner_uids,
    status_document,
)
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.job import ANNOTATION_ASKED, asked_to_suspend

INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
MOST_NODES = 500
"""Nodes in one list."""


class LocalCluster:
    """All calls that the operator makes, answered by a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def training_job(self, key: JobKey) -> dict[str, Any] | None:
        """The CostAwareTrainingJob's document."""
        return self._store.get(ObjectKey(KIND, key.namespace, key.name))

    async def training_jobs(self, namespaces: Sequence[str]) -> list[dict[str, Any]]:
        """All CostAwareTrainingJobs of some namespaces, or of all."""
        return [item for namespace in namespaces or ("",) for item in self._store.list(KIND, namespace)]

    async def child_job(self, key: JobKey) -> dict[str, Any] | None:
        """The Indexed Job's document."""
        return self._store.get(ObjectKey("Job", key.namespace, key.name))

    async def pods(self, namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Pods by labels."""
        found = self._store.list("Pod", namespace)
        return [pod for pod in found if labels.items() <= (pod["metadata"].get("labels") or {}).items()]

    async def claim_exists(self, namespace: str, name: str) -> bool:
        """Whether a PersistentVolumeClaim exists."""
        return self._store.get(ObjectKey("PersistentVolumeClaim", namespace, name)) is not None

    async def node(self, name: str) -> dict[str, Any] | None:
        """A node's document; None where it is gone or may not be read."""
        try:
            return self._store.get(ObjectKey("Node", "", name))
        except ApiError as error:
            if error.status == 403:
                return None
            raise

    async def nodes(self, instance_types: Sequence[str]) -> list[dict[str, Any]] | None:
        """Up to 500 nodes, of some instance types or of all; None where they may not be listed."""
        try:
            found = self._store.list("Node")
        except ApiError as error:
            if error.status == 403:
                return None
            raise
        kinds = ((node, (node["metadata"].get("labels") or {}).get(INSTANCE_TYPE_LABEL)) for node in found)
        return [node for node, kind in kinds if not instance_types or kind in instance_types][:MOST_NODES]

    async def pods_on(self, node: str) -> list[dict[str, Any]] | None:
        """Pods of all namespaces that take something of a node; None where they may not be listed."""
        try:
            found = self._store.list("Pod")
        except ApiError as error:
            if error.status == 403:
                return None
            raise
        here = (pod for pod in found if (pod.get("spec") or {}).get("nodeName") == node)
        return [pod for pod in here if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]

    async def config_map(self, namespace: str, name: str) -> StoredData | None:
        """A ConfigMap's data."""
        document = self._store.get(ObjectKey("ConfigMap", namespace, name))
        if document is None:
            return None
        return StoredData(document.get("data") or {}, document["metadata"]["resourceVersion"], owner_uids(document))

    async def config_maps(self, namespace: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """ConfigMaps by labels."""
        found = self._store.list("ConfigMap", namespace)
        return [one for one in found if labels.items() <= (one["metadata"].get("labels") or {}).items()]

    async def service_owners(self, key: JobKey) -> frozenset[str] | None:
        """The owners' uids of the Service of a job's name; None where there is no such Service."""
        document = self._store.get(ObjectKey("Service", key.namespace, key.name))
        return None if document is None else owner_uids(document)

    async def apply(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply; the fields written are ours, whoever had them."""
        return self._store.apply(document, FIELD_OWNER)

    async def save_config_map(self, document: Mapping[str, Any], resource_version: str | None) -> str:
        """Creates or replaces a ConfigMap, but only over the version that was read.

        Returns:
            The new version.

        Raises:
            ConflictError: somebody wrote it in between, another leader for example.
        """
        if resource_version is None:
            written = self._store.create(document, FIELD_OWNER)
        else:
            versioned = {**document, "metadata": {**document["metadata"], "resourceVersion": resource_version}}
            written = self._store.replace(versioned, FIELD_OWNER)
        return str(written["metadata"]["resourceVersion"])

    async def set_job(
        self, key: JobKey, *, suspend: bool, active_deadline_seconds: int | None, completions: int | None
    ) -> None:
        """Sets what of a Job may change while it runs, and nothing else."""
        spec: dict[str, Any] = {"suspend": suspend, "activeDeadlineSeconds": active_deadline_seconds}
        if completions is not None:
            spec |= {"completions": completions, "parallelism": completions}
        asked = {"annotations": {ANNOTATION_ASKED: asked_to_suspend(suspend)}}
        self._store.patch(ObjectKey("Job", key.namespace, key.name), {"metadata": asked, "spec": spec}, FIELD_OWNER)

    async def write_status(self, job: JobReference, status: Mapping[str, Any]) -> None:
        """The whole status: what is left out is removed.

        Raises:
            ConflictError: the job is not the one that was read any more; its status would be about something else.
        """
        self._store.apply_status(status_document(job, status), FIELD_OWNER)

    async def delete(self, kind: str, key: JobKey, uid: str) -> None:
        """Deletes an object with its dependents, if it is still the one that was meant."""
        try:
            self._store.delete(ObjectKey(kind, key.namespace, key.name), uid)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def evict(self, namespace: str, name: str, uid: str) -> None:
        """Has a pod end gracefully, if it is still the one that was meant. A budget of disruptions may forbid it for now.

        Raises:
            ApiError: it could not be asked for; 403 without permission.
        """
        try:
            self._store.evict(ObjectKey("Pod", namespace, name), uid)
        except ApiError as error:
            if error.status not in (404, 409, 429):
                raise

    async def post_event(
        self, job: JobReference, reason: str, message: str, *, warning: bool, at: str, name: str
    ) -> None:
        """An event about a job; posting the same name twice is harmless."""
        document = event_document(job, reason, message, warning=warning, at=at, name=name)
        try:
            self._store.create(document, FIELD_OWNER)
        except ConflictError:
            return

    async def create_secret(self, document: Mapping[str, Any]) -> bool:
        """Makes a Secret; False where one of its name is there already, whoever's it is."""
        try:
            self._store.create(document, FIELD_OWNER)
        except ConflictError:
            return False
        return True

    async def own_secret(self, namespace: str, name: str, create_as: Mapping[str, str]) -> Mapping[str, str]:
        """The data (base64) of a Secret of the operator's own namespace, made as `create_as` where it is missing."""
        found = self._store.get(ObjectKey("Secret", namespace, name))
        if found is None:
            metadata = {"name": name, "namespace": namespace}
            document = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": dict(create_as)}
            found = self._store.create({**document, "type": "Opaque"}, FIELD_OWNER)
        return dict(found.get("data") or {})

    async def release_lease(self, namespace: str, name: str, holder: str) -> None:
        """Gives a Lease up, if it is still held: the next leader need not wait until it expires."""
        lease = self._store.get(ObjectKey("Lease", namespace, name))
        if lease is None or lease["spec"].get("holderIdentity") != holder:
            return
        lease["spec"] = {"leaseTransitions": lease["spec"].get("leaseTransitions", 0)}
        self._store.replace(lease, FIELD_OWNER)
