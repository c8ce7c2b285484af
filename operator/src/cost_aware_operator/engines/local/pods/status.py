"""The status of a pod as a kubelet writes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cost_aware_operator.engines.local.pods.environment import HOST_ADDRESS
from cost_aware_operator.engines.local.pods.launch import ProcessEnd
from cost_aware_trainer.contract import MAX_TERMINATION_BYTES

MESSAGE_LINES = 80
"""Lines of a log that a message may have."""
LOG_MESSAGE_BYTES = 2048
"""Bytes of them."""


def time_text(seconds: float) -> str:
    """A time of the API."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def waiting_status(pod: Mapping[str, Any], reason: str, message: str, now_seconds: float) -> dict[str, Any]:
    """A pod that does not run yet."""
    waiting = {"reason": reason, "message": message[:MAX_TERMINATION_BYTES]}
    return _status(pod, "Pending", {"waiting": waiting}, now_seconds, ready="ContainersNotReady")


def running_status(pod: Mapping[str, Any], address: str, started_at: float, now_seconds: float) -> dict[str, Any]:
    """A pod whose process runs."""
    ips = {"podIP": address, "podIPs": [{"ip": address}], "hostIP": HOST_ADDRESS}
    return _status(pod, "Running", {"running": {"startedAt": time_text(started_at)}}, now_seconds) | ips


def ended_status(
    pod: Mapping[str, Any], address: str, end: ProcessEnd, message: str, now_seconds: float
) -> dict[str, Any]:
    """A pod whose process has ended."""
    is_well = end.exit_code == 0
    terminated: dict[str, Any] = {
        "exitCode": end.exit_code,
        "reason": end.reason or ("Completed" if is_well else "Error"),
        "finishedAt": time_text(end.finished_at),
    }
    if end.started_at is not None:
        terminated["startedAt"] = time_text(end.started_at)
    if message:
        terminated["message"] = message
    phase, ready = ("Succeeded", "PodCompleted") if is_well else ("Failed", "PodFailed")
    status = _status(pod, phase, {"terminated": terminated}, now_seconds, ready=ready)
    return status | {"podIP": address, "podIPs": [{"ip": address}], "hostIP": HOST_ADDRESS}


def disrupted(conditions: list[dict[str, Any]], reason: str, message: str, now_seconds: float) -> list[dict[str, Any]]:
    """Conditions of a pod that is ended by something other than itself."""
    return _with(conditions, "DisruptionTarget", "True", now_seconds, reason=reason, message=message)


def end_message(end: ProcessEnd, termination: str, log: str) -> str:
    """What a pod says of its end: its own last words, or the last lines of the log of one that failed."""
    if termination:
        return termination[:MAX_TERMINATION_BYTES]
    if end.exit_code == 0 or end.message:
        return end.message
    lines = log.splitlines(keepends=True)[-MESSAGE_LINES:]
    return "".join(lines).encode()[-LOG_MESSAGE_BYTES:].decode(errors="ignore")


def _status(
    pod: Mapping[str, Any], phase: str, state: Mapping[str, Any], now_seconds: float, ready: str = ""
) -> dict[str, Any]:
    """What all have in common; `ready` is the reason of a pod that is not."""
    before = pod.get("status") or {}
    container = pod["spec"]["containers"][0]
    is_ready = not ready
    conditions = list(before.get("conditions") or [])
    for kind, holds in (("Initialized", True), ("ContainersReady", is_ready), ("Ready", is_ready)):
        more = {} if holds else {"reason": ready}
        conditions = _with(conditions, kind, "True" if holds else "False", now_seconds, **more)
    told = {
        "name": container.get("name", ""),
        "image": container.get("image", ""),
        "imageID": "",
        "ready": is_ready,
        "started": "running" in state,
        "restartCount": 0,
        "state": dict(state),
    }
    started = before.get("startTime") or time_text(now_seconds)
    return {"phase": phase, "startTime": started, "conditions": conditions, "containerStatuses": [told]}


def _with(
    conditions: list[dict[str, Any]], kind: str, holds: str, now_seconds: float, **more: str
) -> list[dict[str, Any]]:
    """Conditions with one more or changed; its time is that of its last change."""
    old = next((one for one in conditions if one["type"] == kind), None)
    since = old["lastTransitionTime"] if old and old["status"] == holds and "lastTransitionTime" in old else None
    new = {"type": kind, "status": holds, "lastTransitionTime": since or time_text(now_seconds), **more}
    return [new if one is old else one for one in conditions] if old else [*conditions, new]
