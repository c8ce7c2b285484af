"""The Job controller: makes and removes the pods of Indexed Jobs, and writes their status. The planning is pure.

What is left out of Kubernetes': jobs without indexes, limits by index, success policies, and pods that belong to no Job. A pod that
failed is made again after 1 s, and after twice as long each time that its index fails, up to 16 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.views import INDEX_ANNOTATION

WRITER = "job-controller"
ENDED = ("Succeeded", "Failed")
ENDED_KEPT = 5
"""Failed pods of one index that are kept."""
COUNTED = "countedTerminatedPods"
"""The field of a Job's status with the uids of failed pods that are in its count and still there."""
_GENERATED_LENGTH = 58
"""Most characters of a pod's name before its random end."""


@dataclass(frozen=True)
class JobWrites:
    """What the controller wants written for one Job."""

    create: tuple[dict[str, Any], ...] = ()
    """Pods to make."""
    delete: tuple[tuple[ObjectKey, str], ...] = ()
    """Pods to delete, with their uids."""
    status: Mapping[str, Any] | None = None
    """The Job's whole status; None where it stays."""
    again_at: datetime | None = None
    """When to look again though nothing has changed; None for never."""


@dataclass(frozen=True)
class JobsSynced:
    """What came of one look at all Jobs."""

    again_at: datetime | None
    """When to look again though nothing has changed; None for never."""
    refused: tuple[str, ...]
    """Writes that the store refused, for the log. They are tried again with the next look."""


def plan_job(
    job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], now: datetime, random_text: Callable[[], str]
) -> JobWrites:
    """What to write for a Job, from all pods of its namespace. `random_text` gives five small letters or digits."""
    if job["metadata"].get("deletionTimestamp"):
        return JobWrites()
    return _Planning(job, _own(job, pods), now, random_text).writes()


def sync_jobs(store: ObjectStore, now: datetime, random_text: Callable[[], str]) -> JobsSynced:
    """Looks at all Jobs and writes what they need. Harmless to repeat."""
    again: list[datetime] = []
    refused: list[str] = []
    for job in store.list("Job"):
        key = ObjectKey.of(job)
        writes = plan_job(job, store.list("Pod", key.namespace), now, random_text)
        if writes.again_at is not None:
            again.append(writes.again_at)
        try:
            # the status first: a failed pod is counted before it may go
            if writes.status is not None:
                gone = dict.fromkeys((job.get("status") or {}).keys() - writes.status.keys())
                store.patch(key, {"status": {**writes.status, **gone}}, WRITER, only_status=True)
            for pod, uid in writes.delete:
                store.delete(pod, uid)
            for document in writes.create:
                store.create(document, WRITER)
        except ApiError as error:
            refused.append(f"{key}: {error}")
    return JobsSynced(min(again, default=None), tuple(refused))


def completed_indexes(text: str) -> frozenset[int]:
    """The indexes in a status's `completedIndexes`, such as `0,2-4`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def indexes_text(indexes: Iterable[int]) -> str:
    """Indexes as a status has them: `0,2-4`."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class _Planning:
    """One look at one Job."""

    def __init__(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], now: datetime, random_text: Callable[[], str]
    ) -> None:
        self._job, self._spec, self._now, self._random = job, job["spec"], now, random_text
        self._status: Mapping[str, Any] = job.get("status") or {}
        self._conditions = [dict(one) for one in self._status.get("conditions") or []]
        self._completions = int(self._spec.get("completions") or 1)
        self._alive = [pod for pod in pods if _phase(pod) not in ENDED]
        self._failed = [pod for pod in pods if _phase(pod) == "Failed"]
        self._going = {p["metadata"]["uid"] for p in self._alive if p["metadata"].get("deletionTimestamp")}
        succeeded = {_index(pod) for pod in pods if _phase(pod) == "Succeeded"}
        kept = completed_indexes(self._status.get("completedIndexes") or "") | succeeded
        self._completed = frozenset(index for index in kept if index < self._completions)
        self._again: list[datetime] = []
        self._counts = self._counted()

    def writes(self) -> JobWrites:
        started = self._started()
        if not self._ended():
            self._judge(started)
        stopped = self._ended() or self._has("FailureTarget") or bool(self._spec.get("suspend"))
        unwanted = self._alive if stopped else self._surplus()
        delete = [pod for pod in unwanted if pod["metadata"]["uid"] not in self._going]
        create = () if stopped else self._missing(unwanted)
        self._conclude()
        status = self._written(started)
        pruned = [*delete, *self._pruned()]
        return JobWrites(
            create=create,
            delete=tuple((ObjectKey.of(pod), pod["metadata"]["uid"]) for pod in pruned),
            status=None if status == self._status else status,
            again_at=min(self._again, default=None) if not stopped else None,
        )

    def _started(self) -> str | None:
        """When the Job began, for its status; writes that it was suspended or resumed."""
        before = self._status.get("startTime")
        if self._ended():
            return before
        if self._spec.get("suspend"):
            self._set("Suspended", "True", "JobSuspended", "Job suspended")
            return None
        if self._has("Suspended"):
            self._set("Suspended", "False", "JobResumed", "Job resumed")
            return _text(self._now)
        return before or _text(self._now)

    def _judge(self, started: str | None) -> None:
        """Marks a Job that has failed too often or lasted too long."""
        failed = self._counts["failed"]
        if failed > int(self._spec.get("backoffLimit", 6)):
            self._fail("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        limit_seconds = self._spec.get("activeDeadlineSeconds")
        if started is None or limit_seconds is None or len(self._completed) == self._completions:
            return
        until = datetime.fromisoformat(started) + timedelta(seconds=limit_seconds)
        if self._now >= until:
            self._fail("DeadlineExceeded", "Job was active longer than specified deadline")
        else:
            self._again.append(until)

    def _fail(self, reason: str, message: str) -> None:
        if not self._has("FailureTarget"):
            self._set("FailureTarget", "True", reason, message)

    def _conclude(self) -> None:
        """Ends the Job once none of its pods is alive."""
        if self._ended() or self._alive:
            return
        for condition in list(self._conditions):
            if condition["type"] == "FailureTarget" and condition["status"] == "True":
                self._set("Failed", "True", condition["reason"], condition["message"])
                return
        if len(self._completed) == self._completions:
            self._set("Complete", "True", "CompletionsReached", "Reached expected number of succeeded pods")

    def _surplus(self) -> list[Mapping[str, Any]]:
        """Pods of indexes that are too many, done already, or alive twice."""
        kept: set[int] = set()
        surplus: list[Mapping[str, Any]] = []
        # one that is going holds its index: two of one index are never alive by this controller's will
        by_age = sorted(self._alive, key=lambda p: (p["metadata"]["uid"] not in self._going, _age(p)))
        for pod in sorted(by_age, key=_index):
            index = _index(pod)
            wanted = index < self._completions and index not in self._completed and index not in kept
            if wanted and len(kept) < self._parallelism():
                kept.add(index)
            else:
                surplus.append(pod)
        return surplus

    def _missing(self, unwanted: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Pods for indexes of which none is alive, the lowest first."""
        held = {_index(pod) for pod in self._alive}
        room = self._parallelism() - len(self._alive)
        made: list[dict[str, Any]] = []
        for index in range(self._completions):
            if len(made) >= room:
                break
            if index in held or index in self._completed:
                continue
            waits_until = self._not_before(index)
            if waits_until is not None and self._now < waits_until:
                self._again.append(waits_until)
                room -= 1
            else:
                made.append(_pod(self._job, index, self._random()))
        return tuple(made)

    def _not_before(self, index: int) -> datetime | None:
        """When an index that has failed may be made again; at once where its pods were taken away."""
        ends = [_end(pod) for pod in self._failed if _index(pod) == index and not _is_disrupted(pod)]
        if not ends:
            return None
        return max(ends) + timedelta(seconds=2 ** (min(len(ends), ENDED_KEPT) - 1))

    def _pruned(self) -> list[Mapping[str, Any]]:
        """Failed pods that are counted already and more than are kept of their index."""
        kept: dict[int, int] = {}
        found: list[Mapping[str, Any]] = []
        for pod in sorted(self._failed, key=_age, reverse=True):
            kept[_index(pod)] = kept.get(_index(pod), 0) + 1
            if kept[_index(pod)] > ENDED_KEPT:
                found.append(pod)
        return found

    def _parallelism(self) -> int:
        return int(self._spec.get("parallelism", 1))

    def _counted(self) -> dict[str, Any]:
        before = set(self._status.get(COUNTED) or ())
        there = {p["metadata"]["uid"] for p in self._failed if not self._is_ignored(p)}
        return {"failed": int(self._status.get("failed") or 0) + len(there - before), COUNTED: sorted(there)}

    def _is_ignored(self, pod: Mapping[str, Any]) -> bool:
        """Whether the Job's policy says not to count a failure: the first rule that fits decides."""
        for rule in (self._spec.get("podFailurePolicy") or {}).get("rules") or []:
            for wanted in rule.get("onPodConditions") or []:
                if any(
                    c["type"] == wanted["type"] and c["status"] == wanted.get("status", "True")
                    for c in _conditions(pod)
                ):
                    return bool(rule["action"] == "Ignore")
        return False

    def _written(self, started: str | None) -> dict[str, Any]:
        active = [pod for pod in self._alive if pod["metadata"]["uid"] not in self._going]
        ready = [p for p in active if any(c["type"] == "Ready" and c["status"] == "True" for c in _conditions(p))]
        status: dict[str, Any] = {
            "active": len(active),
            "ready": len(ready),
            "terminating": len(self._going),
            "succeeded": len(self._completed),
            "completedIndexes": indexes_text(self._completed),
            **self._counts,
            "conditions": self._conditions,
        }
        if started is not None:
            status["startTime"] = started
        if self._has("Complete"):
            status["completionTime"] = self._status.get("completionTime") or _text(self._now)
        return status

    def _has(self, kind: str) -> bool:
        return any(one["type"] == kind and one["status"] == "True" for one in self._conditions)

    def _ended(self) -> bool:
        return self._has("Complete") or self._has("Failed")

    def _set(self, kind: str, status: str, reason: str, message: str) -> None:
        for one in self._conditions:
            if one["type"] == kind and one["status"] == status:
                return
        at = _text(self._now)
        made = {"type": kind, "status": status, "reason": reason, "message": message}
        rest = [one for one in self._conditions if one["type"] != kind]
        self._conditions = [*rest, {**made, "lastProbeTime": at, "lastTransitionTime": at}]


def _own(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    uid = job["metadata"]["uid"]
    return [
        pod
        for pod in pods
        if any(r["uid"] == uid and r.get("controller") for r in pod["metadata"].get("ownerReferences") or ())
        and (pod["metadata"].get("annotations") or {}).get(INDEX_ANNOTATION, "").isdecimal()
    ]


def _pod(job: Mapping[str, Any], index: int, random_text: str) -> dict[str, Any]:
    metadata, template = job["metadata"], deepcopy(job["spec"]["template"])
    name, uid, given = metadata["name"], metadata["uid"], template.get("metadata") or {}
    end = f"-{index}-"
    generated = f"{name[: _GENERATED_LENGTH - len(end)]}{end}"
    own = {
        INDEX_ANNOTATION: str(index),
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        "controller-uid": uid,
        "job-name": name,
    }
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    spec = {**template["spec"], "hostname": generated.rstrip("-")}
    spec["containers"] = [_container(one) for one in spec["containers"]]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": generated + random_text,
            "generateName": generated,
            "namespace": metadata["namespace"],
            "labels": {**(given.get("labels") or {}), **own},
            "annotations": {**(given.get("annotations") or {}), INDEX_ANNOTATION: str(index)},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": spec,
    }


def _container(given: Mapping[str, Any]) -> dict[str, Any]:
    """A container with its index in the environment, and with its limits as requests where it has no others."""
    result = dict(given)
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}}
    env = [one for one in given.get("env") or [] if one["name"] != "JOB_COMPLETION_INDEX"]
    result["env"] = [*env, {"name": "JOB_COMPLETION_INDEX", "valueFrom": field}]
    resources = given.get("resources") or {}
    if resources.get("limits"):
        requests = {**resources["limits"], **(resources.get("requests") or {})}
        result["resources"] = {**resources, "requests": requests}
    return result


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def _index(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["annotations"][INDEX_ANNOTATION])


def _age(pod: Mapping[str, Any]) -> tuple[str, str]:
    return pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]


def _conditions(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((pod.get("status") or {}).get("conditions") or [])


def _is_disrupted(pod: Mapping[str, Any]) -> bool:
    return any(one["type"] == "DisruptionTarget" and one["status"] == "True" for one in _conditions(pod))


def _end(pod: Mapping[str, Any]) -> datetime:
    ends = [
        ((one.get("state") or {}).get("terminated") or {}).get("finishedAt")
        for one in (pod.get("status") or {}).get("containerStatuses") or []
    ]
    return max(datetime.fromisoformat(text or pod["metadata"]["creationTimestamp"]) for text in ends or [None])


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
