"""kopf's watches, which only put keys into the queue. No handler of kopf's keeps state, finalizers or annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from cost_aware_operator.api import GROUP, LABEL_JOB, PLURAL, VERSION
from cost_aware_operator.api.job import JobKey
from cost_aware_operator.control.loop.queue import KeyedQueue
from cost_aware_operator.control.reading.memory import Memories
from cost_aware_operator.sources.clock import Clock
from cost_aware_operator.workload.views import pod_view

Version = tuple[str, int, bool]


def version_of(meta: Mapping[str, Any]) -> Version:
    """The part of a job's metadata whose change needs a reconcile: its generation, and whether it is being deleted."""
    return meta["uid"], meta.get("generation", 0), meta.get("deletionTimestamp") is not None


def kopf_settings() -> kopf.OperatorSettings:
    """Kopf's settings: every stream ends and is renewed, is filtered at the server, and posts no events of its own."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = 270
    settings.watching.client_timeout = 300
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    for resource in ("pods", "jobs.batch"):
        # only our children: everything else in the cluster stays at the server
        settings.watching.label_selectors[resource] = LABEL_JOB
    return settings


def registry(
    queue: KeyedQueue[JobKey], memories: Memories, clock: Clock, seen: dict[JobKey, Version]
) -> kopf.OperatorRegistry:
    """The handlers. `seen` is kept up to date with the version of each job that the watch delivered."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**arguments: Any) -> Any:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def training_job(type: str | None, meta: Any, **_: Any) -> None:  # noqa: A002  kopf's name
        key = JobKey(meta["namespace"], meta["name"])
        # our own status writes come back as events, and must not cause the next reconcile
        what = version_of(meta)
        if type == "DELETED":
            seen.pop(key, None)
        elif seen.get(key) == what and type is not None:
            return
        else:
            seen[key] = what
        await queue.add(key)

    @kopf.on.event("", "v1", "pods", labels={LABEL_JOB: kopf.PRESENT}, registry=handlers)
    async def pod(type: str | None, body: Any, meta: Any, **_: Any) -> None:  # noqa: A002
        key = JobKey(meta["namespace"], meta["labels"][LABEL_JOB])
        if type == "DELETED" and (view := pod_view(body)) is not None:
            memories.depart(key, view, clock.now())
        await queue.add(key)

    @kopf.on.event("batch", "v1", "jobs", labels={LABEL_JOB: kopf.PRESENT}, registry=handlers)
    async def child(meta: Any, **_: Any) -> None:
        await queue.add(JobKey(meta["namespace"], meta["labels"][LABEL_JOB]))

    return handlers
