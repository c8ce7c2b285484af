"""The calls of the command line, answered by a Kubernetes API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from cost_aware_operator.api import GROUP, KIND, PLURAL, VERSION
from cost_aware_operator.api.job import JobKey
from cost_aware_operator.engines.kubernetes.client import MERGE, KubernetesCluster
from cost_aware_operator.engines.user import USER


class KubernetesUser(KubernetesCluster):
    """See `UserCluster`."""

    async def jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """All CostAwareTrainingJobs of a namespace, or of all."""
        return await self.training_jobs([namespace] if namespace else [])

    async def job(self, key: JobKey) -> dict[str, Any] | None:
        """A CostAwareTrainingJob; None where there is none."""
        return await self.training_job(key)

    async def submit(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a job; raises ConflictError where there is one of this name."""
        return await self._call("POST", _jobs(document["metadata"]["namespace"]), document, fieldManager=USER)

    async def set_suspended(self, key: JobKey, *, suspended: bool) -> None:
        """Writes `spec.suspend`."""
        body = {"spec": {"suspend": suspended}}
        await self._call("PATCH", f"{_jobs(key.namespace)}/{quote(key.name)}", body, MERGE, fieldManager=USER)

    async def remove(self, key: JobKey) -> None:
        """Deletes a job."""
        await self._call("DELETE", f"{_jobs(key.namespace)}/{quote(key.name)}", {"propagationPolicy": "Background"})

    async def events(self, key: JobKey) -> list[dict[str, Any]]:
        """Events about a job, the oldest first."""
        about = f"involvedObject.kind={KIND},involvedObject.name={key.name}"
        path = f"api/v1/namespaces/{quote(key.namespace)}/events"
        found = (await self._call("GET", path, fieldSelector=about)).get("items", [])
        return sorted(found, key=lambda event: event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])


def _jobs(namespace: str) -> str:
    return f"apis/{GROUP}/{VERSION}/namespaces/{quote(namespace)}/{PLURAL}"
