"""The operator is killed while it changes a run; the run ends under one plan, with every sample trained once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from devtools.cluster import LAST_WORKER, Space, manifest, script
from tests.support.cluster.pod_lives import PodLives
from tests.support.cluster.truth import assert_books_close, assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(900)]

SPEC: dict[str, Any] = {
    "trainer": {"config": {"steps": 400}},
    "model": {"layers": 4, "hidden": 128, "heads": 4, "kvHeads": 2, "ffn": 344, "sequenceLength": 128, "vocabulary": 256},
    "batch": {"global": 8},
    "nodes": {"min": 1, "max": 2, "instanceTypes": ["p3.2xlarge"]},
    "parallelism": {"data": 2, "tensor": 1, "pipeline": 1},
    "efficiency": {"policy": "Act", "threshold": 0.9, "windowSeconds": 10, "cooldownSeconds": 20},
}  # fmt: skip


@pytest.fixture
def slow_link() -> Iterator[None]:
    script("shape", "20mbit")
    yield
    script("shape", "off")


State = tuple[dict[str, Any], list[dict[str, Any]]]
"""A job's status and its pods."""


def reached(space: Space, job: str, stage: str, is_there: Callable[[State], bool]) -> dict[str, Any]:
    """Waits until a change of the run is at a stage, or beyond it."""

    def look(status: dict[str, Any]) -> bool:
        assert status.get("state") not in ("Succeeded", "Failed"), f"{job} ended before {stage}: {status}"
        return bool(status.get("adjustments")) and is_there((status, space.pods(job)))

    return space.wait(job, look, 240, stage)


STAGES: dict[str, Callable[[State], bool]] = {
    "ordered": lambda s: True,
    "a pod is let go": lambda s: len(s[1]) < 2 or any("deletionTimestamp" in pod["metadata"] for pod in s[1]),
    "ranks start": lambda s: s[0]["attempt"] >= 2,
    "the new plan is checked": lambda s: s[0]["adjustments"][0]["outcome"] != "InProgress",
    "the new plan is judged": lambda s: s[0]["adjustments"][0]["outcome"] not in ("InProgress", "Checking"),
}
"""What can be seen of a change, in the order in which it comes; each stays true once it is."""


# the operator is away for half of the time, and the last stage comes after a window
RESIZED = {**SPEC, "trainer": {"config": {"steps": 800}}}
REBALANCED = {**SPEC, "nodes": {**SPEC["nodes"], "min": 2}, "trainer": {"config": {"steps": 300}}}
"""No pod may go: it goes on under other degrees in the same processes."""


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        pytest.param("Resize", RESIZED, id="resize"),
        pytest.param("Rebalance", REBALANCED, id="rebalance", marks=pytest.mark.exhaustive),
    ],
)
def test_an_operator_that_dies_at_every_stage_of_a_change_leaves_one_plan(
    space: Space, slow_link: None, kind: str, spec: dict[str, Any]
) -> None:
    job, seen = kind.lower(), []
    stages = {stage: there for stage, there in STAGES.items() if kind == "Resize" or stage != "a pod is let go"}
    with PodLives(space, job) as lives:
        space.submit(manifest(job, **spec))
        for stage, is_there in stages.items():
            status = reached(space, job, stage, is_there)
            seen.append((stage, status["adjustments"][-1]["outcome"], status["progress"]["step"]))
            space.cluster.kill_operator()
        status = space.wait_finished(job, 420)
        time.sleep(1)
    print(seen)
    ends_under_one_plan(space, job, status, spec)
    assert [c["kind"] for c in status["adjustments"]] == [kind], "one change, whoever began it"
    assert_books_close(status, lives)


def test_a_control_plane_that_is_away_during_a_change_is_waited_for(space: Space, slow_link: None) -> None:
    job = "alone"
    with PodLives(space, job) as lives:
        space.submit(manifest(job, **SPEC))
        reached(space, job, "a change", STAGES["ordered"])
        script("control-plane", "off")
        try:
            time.sleep(90)
        finally:
            script("control-plane", "on")
        space.cluster.wait_for_operator()
        status = space.wait_finished(job, 420)
        time.sleep(1)
    ends_under_one_plan(space, job, status)
    assert_books_close(status, lives)


@pytest.fixture
def slow_worker() -> Iterator[None]:
    script("slow", LAST_WORKER, "0.2")
    yield
    script("slow", LAST_WORKER, "off")


MOVE_STAGES: dict[str, Callable[[State], bool]] = {
    "ordered": lambda s: True,
    "pods save": lambda s: s[0]["attempt"] >= 2 or not s[1] or any("deletionTimestamp" in p["metadata"] for p in s[1]),
    "pods are made anew": lambda s: (
        s[0]["attempt"] >= 2 or (len(s[1]) == 1 and "deletionTimestamp" not in s[1][0]["metadata"])
    ),
    "ranks start": lambda s: s[0]["attempt"] >= 2,
}
"""Of a slow node's being left; each stays true once it is."""


LEFT = {**SPEC, "trainer": {"config": {"steps": 600}}}
"""So many that leaving is worth several times its cost on a faster machine too."""


@pytest.mark.exhaustive
def test_an_operator_that_dies_at_every_stage_of_leaving_a_node_leaves_one_plan(
    space: Space, slow_worker: None
) -> None:
    job = "leaving"
    with PodLives(space, job) as lives:
        space.submit(manifest(job, **LEFT))
        for stage, is_there in MOVE_STAGES.items():
            reached(space, job, stage, is_there)
            space.cluster.kill_operator()
        status = space.wait_finished(job, 600)
        time.sleep(1)
    ends_under_one_plan(space, job, status, LEFT)
    assert [c["kind"] for c in status["adjustments"]].count("Move") == 1
    assert all(pod["spec"]["nodeName"] != LAST_WORKER for pod in space.pods(job))
    assert_books_close(status, lives)


EBB: dict[str, Any] = {
    **SPEC,
    "trainer": {"config": {"steps": 700}},
    "objective": "Time",
    # nothing but the loss of a node is a reason to change
    "efficiency": {**SPEC["efficiency"], "threshold": 0.05},
}
TAINT = "cloud.google.com/impending-node-termination"


@pytest.fixture
def taken_away(space: Space) -> Iterator[Callable[[], None]]:
    """Takes the last worker away when called."""

    def take() -> None:
        space.cluster.run("taint", "node", LAST_WORKER, f"{TAINT}=soon:NoSchedule")

    yield take
    space.cluster.run("taint", "node", LAST_WORKER, f"{TAINT}-", check=False)


EBB_STAGES: dict[str, Callable[[State], bool]] = {
    "a node is waited for": lambda s: any(c["reason"] == "WaitingForNodes" for c in s[0].get("conditions", [])),
    "ordered": lambda s: bool(s[0].get("adjustments")),
    "ranks start": lambda s: bool(s[0].get("adjustments")) and s[0]["adjustments"][0]["outcome"] != "InProgress",
}
"""Of going on with the nodes that are left."""


@pytest.mark.exhaustive
def test_an_operator_that_dies_at_every_stage_of_a_shrink_leaves_one_plan(
    space: Space, taken_away: Callable[[], None]
) -> None:
    job, seen = "ebbing", []
    with PodLives(space, job) as lives:
        space.submit(manifest(job, **EBB))
        space.wait_step(job, 60, 240)
        taken_away()
        for stage, is_there in EBB_STAGES.items():
            status = space.wait(job, lambda s, there=is_there: there((s, [])), 240, stage)
            seen.append((stage, [c["outcome"] for c in status.get("adjustments", [])], status["progress"]["step"]))
            space.cluster.kill_operator()
        status = space.wait_finished(job, 600)
        time.sleep(1)
    print(seen)
    ends_under_one_plan(space, job, status, EBB)
    assert [c["kind"] for c in status["adjustments"]] == ["Shrink"], "one change, whoever began it"
    assert all(pod["spec"]["nodeName"] != LAST_WORKER for pod in space.pods(job))
    assert_books_close(status, lives)


def ends_under_one_plan(space: Space, job: str, status: dict[str, Any], spec: dict[str, Any] = SPEC) -> None:
    """The run is done, under the plan that the last change left it with, and every sample was trained once."""
    assert status["state"] == "Succeeded", status
    changes = status["adjustments"]
    assert all(change["outcome"] != "InProgress" for change in changes), changes
    assert status["plan"]["degrees"] == changes[-1]["to"].split()[0], "the plan is that of the last change"
    assert len(space.pods(job)) == status["plan"]["nodes"]
    assert_exactly_once(space, job, manifest(job, **spec)["spec"], status)
