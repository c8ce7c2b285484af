"""The calls of the command line, answered by a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_aware_operator.api import KIND
from cost_aware_operator.api.job import JobKey
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.engines.user import USER


class LocalUser:
    """See `UserCluster`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """All CostAwareTrainingJobs of a namespace, or of all."""
        return list(self._store.list(KIND, namespace or ""))

    async def job(self, key: JobKey) -> dict[str, Any] | None:
        """A CostAwareTrainingJob; None where there is none."""
        return self._store.get(_key(key))

    async def submit(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a job; raises ConflictError where there is one of this name."""
        return self._store.create(document, USER)

    async def set_suspended(self, key: JobKey, *, suspended: bool) -> None:
        """Writes `spec.suspend`."""
        self._store.patch(_key(key), {"spec": {"suspend": suspended}}, USER)

    async def remove(self, key: JobKey) -> None:
        """Deletes a job."""
        found = self._store.get(_key(key))
        if found is None:
            raise ApiError(404, f"{key} is not there")
        self._store.delete(_key(key), found["metadata"]["uid"])

    async def events(self, key: JobKey) -> list[dict[str, Any]]:
        """Events about a job, the oldest first."""
        found = self._store.list("Event", key.namespace)
        about = (e for e in found if (e["involvedObject"]["kind"], e["involvedObject"]["name"]) == (KIND, key.name))
        return sorted(about, key=lambda event: str(event["lastTimestamp"]))


def _key(key: JobKey) -> ObjectKey:
    return ObjectKey(KIND, key.namespace, key.name)
