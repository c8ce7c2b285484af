"""The Job controller: one pod an index, counted once, replaced when it failed, and an end that is told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_aware_operator.engines.local.jobs import completed_indexes, indexes_text, sync_jobs
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.views import child_job_view, pod_view

START = datetime(2026, 1, 1, tzinfo=UTC)
JOB = ObjectKey("Job", "team", "gpt")
IGNORE = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]}


class Controlled:
    """A store with one Job, and whoever runs its pods."""

    def __init__(self, **spec: Any) -> None:
        self.seconds, uids, letters = 0.0, count(1), count(10000)
        self.random = lambda: str(next(letters))
        self.store = ObjectStore(self.now, lambda: f"uid-{next(uids)}")
        container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        template = {"metadata": {"labels": {"a": "b"}}, "spec": {"restartPolicy": "Never", "containers": [container]}}
        fixed = {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 3,
            "template": template,
        }
        policies = {"podReplacementPolicy": "Failed", "podFailurePolicy": IGNORE}
        metadata = {"name": "gpt", "namespace": "team"}
        self.store.create({"kind": "Job", "metadata": metadata, "spec": {**fixed, **policies, **spec}}, "one")

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def synced(self, *, advance: float = 0.0) -> datetime | None:
        self.seconds += advance
        for _ in range(20):
            version = self.store.version
            done = sync_jobs(self.store, self.now(), self.random)
            assert done.refused == ()
            if self.store.version == version:
                return done.again_at
        raise AssertionError("it never comes to rest")

    def pods(self) -> list[dict[str, Any]]:
        return list(self.store.list("Pod"))

    def alive(self) -> list[int]:
        phases = (((pod.get("status") or {}).get("phase"), pod) for pod in self.pods())
        return sorted(index_of(pod) for phase, pod in phases if phase not in ("Succeeded", "Failed"))

    def runs(self) -> None:
        for pod in self.pods():
            if "nodeName" not in pod["spec"]:
                self.store.patch(ObjectKey.of(pod), {"spec": {"nodeName": f"n-{index_of(pod)}"}}, "scheduler")

    def ends(self, index: int, phase: str, *conditions: str) -> None:
        for pod in self.pods():
            if index_of(pod) == index and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                told = [{"type": kind, "status": "True"} for kind in conditions]
                at = self.now().strftime("%Y-%m-%dT%H:%M:%SZ")
                state = {"name": "c", "state": {"terminated": {"exitCode": 1, "finishedAt": at}}}
                status = {"phase": phase, "conditions": told, "containerStatuses": [state]}
                self.store.patch(ObjectKey.of(pod), {"status": status}, "kubelet", only_status=True)
                if "deletionTimestamp" in pod["metadata"]:
                    sync_jobs(self.store, self.now(), self.random)
                    self.store.delete(ObjectKey.of(pod), grace_seconds=0)

    def set(self, **spec: Any) -> None:
        self.store.patch(JOB, {"spec": spec}, "one")

    def job(self) -> dict[str, Any]:
        found = self.store.get(JOB)
        assert found is not None
        return found

    def status(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.job()["status"].get(name) for name in names)

    def conditions(self) -> dict[str, str]:
        return {one["type"]: one["reason"] for one in self.job()["status"]["conditions"] if one["status"] == "True"}


def index_of(pod: dict[str, Any]) -> int:
    view = pod_view(pod)
    assert view is not None
    return view.index


def test_pods_are_made_as_kubernetes_makes_them() -> None:
    world = Controlled()
    assert world.synced() is None
    first, second = world.pods()
    assert first["metadata"]["name"] == "gpt-0-10000"
    assert second["spec"]["hostname"] == "gpt-1"
    assert second["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "1"
    assert second["metadata"]["labels"]["a"] == "b"
    assert second["spec"]["containers"][0]["resources"]["requests"] == {"nvidia.com/gpu": "1"}
    view = pod_view(second)
    assert view is not None
    assert (view.index, view.owner_uid) == (1, world.job()["metadata"]["uid"])
    assert world.status("active", "startTime") == (2, "2026-01-01T00:00:00Z")


def test_a_suspended_job_has_no_pods_and_begins_anew_when_it_is_resumed() -> None:
    world = Controlled(suspend=True)
    world.synced()
    assert (world.pods(), world.conditions()) == ([], {"Suspended": "JobSuspended"})
    world.set(suspend=False)
    world.synced(advance=5)
    assert (world.alive(), world.conditions()) == ([0, 1], {})
    assert world.status("startTime") == ("2026-01-01T00:00:05Z",)
    world.runs()
    world.set(suspend=True)
    world.synced()
    assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods())
    assert world.status("active", "terminating", "startTime") == (0, 2, None)


def test_a_pod_is_replaced_only_when_the_one_before_has_ended() -> None:
    world = Controlled()
    world.synced()
    world.runs()
    world.store.delete(ObjectKey.of(world.pods()[0]))
    world.synced()
    assert world.alive() == [0, 1]
    world.ends(0, "Failed", "DisruptionTarget")
    world.synced()
    assert world.alive() == [0, 1]
    assert world.status("failed") == (0,), "a pod that was taken away is not counted"


def test_failed_pods_are_counted_once_wait_longer_each_time_and_end_the_job_at_its_limit() -> None:
    world = Controlled(completions=1, parallelism=1)
    world.synced()
    for failed, wait_seconds in ((1, 1), (2, 2), (3, 4)):
        world.ends(0, "Failed")
        assert world.synced() == world.now() + timedelta(seconds=wait_seconds)
        assert (world.alive(), world.status("failed")) == ([], (failed,))
        world.synced(advance=wait_seconds)
        assert world.alive() == [0]
    world.ends(0, "Failed")
    world.synced()
    assert child_job_view(world.job()).failure == (
        "BackoffLimitExceeded",
        "Job has reached the specified backoff limit",
    )
    assert world.alive() == []


def test_a_failed_pod_that_goes_stays_in_the_count() -> None:
    world = Controlled()
    world.synced()
    world.ends(0, "Failed")
    world.synced()
    failed = next(pod for pod in world.pods() if pod.get("status", {}).get("phase") == "Failed")
    world.store.delete(ObjectKey.of(failed))
    world.synced()
    assert world.status("failed") == (1,)


def test_of_an_index_that_fails_for_ever_few_pods_are_kept() -> None:
    world = Controlled(completions=1, parallelism=1, backoffLimit=1000)
    for _ in range(12):
        world.synced(advance=20)
        world.ends(0, "Failed")
    world.synced()
    assert (len(world.pods()), world.status("failed")) == (5, (12,))


def test_a_job_is_complete_when_each_index_has_succeeded_and_stays_so() -> None:
    world = Controlled()
    world.synced()
    world.ends(1, "Succeeded")
    world.synced()
    assert (world.alive(), world.status("completedIndexes")) == ([0], ("1",))
    world.ends(0, "Succeeded")
    world.synced()
    assert child_job_view(world.job()).complete
    for pod in world.pods():
        world.store.delete(ObjectKey.of(pod))
    world.synced(advance=99)
    assert world.status("succeeded", "completionTime") == (2, "2026-01-01T00:00:00Z")
    assert world.pods() == []


def test_a_deadline_is_told_beforehand_and_ends_the_job_once_its_pods_have() -> None:
    world = Controlled(activeDeadlineSeconds=60)
    assert world.synced() == START + timedelta(seconds=60)
    world.runs()
    world.synced(advance=60)
    assert child_job_view(world.job()).failure is None
    for index in (0, 1):
        world.ends(index, "Failed")
    world.synced()
    assert child_job_view(world.job()).failure == ("DeadlineExceeded", "Job was active longer than specified deadline")
    assert world.pods() == []


def test_a_job_grows_and_shrinks_at_its_end() -> None:
    world = Controlled()
    world.synced()
    world.set(completions=4, parallelism=4)
    world.synced()
    assert world.alive() == [0, 1, 2, 3]
    world.set(completions=1, parallelism=1)
    world.synced()
    assert world.alive() == [0]


def test_pods_of_nobody_and_of_other_jobs_are_left_alone() -> None:
    world = Controlled()
    metadata = {
        "name": "gpt-9-abcde",
        "namespace": "team",
        "annotations": {"batch.kubernetes.io/job-completion-index": "9"},
    }
    world.store.create({"kind": "Pod", "metadata": metadata, "spec": {}}, "somebody")
    world.synced()
    assert world.alive() == [0, 1, 9]


@pytest.mark.parametrize(("indexes", "text"), [((), ""), ((0,), "0"), ((0, 2, 3, 4), "0,2-4")])
def test_indexes_are_written_and_read(indexes: tuple[int, ...], text: str) -> None:
    assert indexes_text(indexes) == text
    assert completed_indexes(text) == frozenset(indexes)


STEPS = st.sampled_from(("run", "fail", "succeed", "disrupt", "delete", "suspend", "resume", "grow", "shrink", "wait"))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 2)), max_size=15))
def test_whatever_happens_no_index_is_alive_twice_and_the_controller_comes_to_rest(
    steps: list[tuple[str, int]],
) -> None:
    world = Controlled()
    world.synced()
    for step, index in steps:
        match step:
            case "run":
                world.runs()
            case "fail" | "succeed":
                world.ends(index, "Failed" if step == "fail" else "Succeeded")
            case "disrupt":
                world.ends(index, "Failed", "DisruptionTarget")
            case "delete" if world.pods():
                world.store.delete(ObjectKey.of(world.pods()[index % len(world.pods())]))
            case "suspend" | "resume":
                world.set(suspend=step == "suspend")
            case "grow" | "shrink":
                number = 3 if step == "grow" else 1
                world.set(completions=number, parallelism=number)
        world.synced(advance=30 if step == "wait" else 0)
        assert len(world.alive()) == len(set(world.alive()))
