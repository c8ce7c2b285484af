"""What other pods take of a node is what the scheduler says they take, and a node that is full is not gone to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from tests.support.factories.adjusting import PIPELINE
from tests.support.factories.facts import decide, facts, job, pod
from tests.support.factories.gathering import Api, Clock, Source, gatherer
from tests.support.factories.stragglers import FIRST, GIVEN, NODES, trained

from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import ConditionType
from cost_aware_operator.control.reading.gather import MOST_LOOKED_AT
from cost_aware_operator.control.reading.memory import Memory
from cost_aware_operator.control.reading.nodes import NODE_SECONDS, CachedNodes
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.workload.placement import could_take
from cost_aware_operator.workload.usage import PodUse, pod_use, taken_by_others
from cost_aware_operator.workload.views import NodeView, pod_view

MINE, OTHERS = JobKey("team", "gpt"), JobKey("team", "other")


def container(policy: str | None = None, **requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}, **({"restartPolicy": policy} if policy else {})}


def document(*containers: dict[str, Any], labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "team", "labels": labels or {}}
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


@pytest.mark.parametrize(
    ("given", "cpus"),
    [
        (document(container(cpu="250m"), container(cpu="1")), 1.25),
        (document(container(cpu="1"), initContainers=[container(cpu="3"), container(cpu="2")]), 3),
        (document(container(cpu="1"), initContainers=[container("Always", cpu="2")]), 3),
        (document(container(cpu="1"), initContainers=[container("Always", cpu="1"), container(cpu="2")]), 3),
        (document(container(cpu="1"), initContainers=[container(cpu="2"), container("Always", cpu="1")]), 2),
        (document(container(cpu="1"), overhead={"cpu": "100m"}), 1.1),
        (document(container(cpu="500000u"), container(cpu="250000000n")), 0.75),
        (document({}), 0),
    ],
    ids=[
        "sum",
        "init",
        "sidecar",
        "init-beside-sidecar",
        "sidecar-after-init",
        "overhead",
        "micro-and-nano",
        "nothing-asked",
    ],
)
def test_a_pod_takes_what_the_scheduler_adds_up(given: dict[str, Any], cpus: float) -> None:
    use = pod_use(given)
    assert use.amounts.get("cpu", 0.0) == pytest.approx(cpus)
    assert use.amounts["pods"] == 1


def test_the_job_s_own_pods_and_those_that_would_give_way_take_nothing() -> None:
    of_mine = pod_use(document(container(cpu="1"), labels={"costaware.dev/job": "gpt"}))
    assert of_mine.job == MINE
    small, large = (
        PodUse({"cpu": 1.0}, priority=5),
        PodUse({"cpu": 2.0, "nvidia.com/gpu": 8.0}, priority=10, job=OTHERS),
    )
    uses = (of_mine, small, large)
    assert taken_by_others(uses, MINE, 0) == {"cpu": 3.0, "nvidia.com/gpu": 8.0}
    assert taken_by_others(uses, MINE, 6) == {"cpu": 2.0, "nvidia.com/gpu": 8.0}
    assert taken_by_others(uses, MINE, 11) == {}


FOUR = {"cpu": "4", "memory": "16Gi", "pods": "3"}


@pytest.mark.parametrize(
    ("taken", "takes"),
    [
        (None, True),
        ({"cpu": 3.0}, True),
        ({"cpu": 3.1}, False),
        ({"memory": 15.5 * 2**30}, False),
        ({"pods": 3.0}, False),
        ({"ephemeral-storage": 1e12}, True),
    ],
)
def test_a_node_takes_a_pod_only_beside_what_is_there(taken: dict[str, float] | None, takes: bool) -> None:
    node = NodeView("n", "p3.2xlarge", None, False, allocatable=FOUR, taken=taken)
    plan = decide(facts()).plan
    assert plan is not None
    wanted = {"requests": {"cpu": "1", "memory": "1Gi"}}
    assert bool(could_take([node], job(), replace(plan, instance_types=()), wanted)) is takes


def test_a_slow_node_is_not_left_for_one_that_others_have_filled() -> None:
    full = replace(NODES["node-2"], allocatable=FOUR, taken={"cpu": 3.5})
    decision = decide(trained(FIRST, cluster_nodes=(NODES["node-0"], NODES["node-1"], full)))
    assert decision.record.changes == ()
    said = find(decision.status.conditions, ConditionType.STRAGGLING)
    assert said is not None
    assert said.reason == "NoSpareNode"
    free = replace(full, taken={"cpu": 2.5})
    assert decide(trained(FIRST, cluster_nodes=(NODES["node-0"], NODES["node-1"], free))).record.changes


class Crowded(Api):
    """Every node has one pod of somebody else's."""

    forbidden = False

    async def nodes(self, _: Any) -> list[dict[str, Any]]:
        return [{"metadata": {"name": f"n{i}"}} for i in range(MOST_LOOKED_AT + 8)]

    async def pods_on(self, node: str) -> list[dict[str, Any]] | None:
        self.asked.append(node)
        return None if self.forbidden else [document(container(cpu="3"))]


async def test_other_pods_are_asked_for_once_a_minute_and_of_so_many_nodes_only() -> None:
    api, clock = Crowded(), Clock()
    given = gatherer(Source(), clock, api)
    cordoned = NodeView("mine", None, None, False, unschedulable=True)
    status = replace(GIVEN, status=decide(facts(GIVEN)).status)
    for _ in range(2):
        found = await given.cluster_nodes(status, RunRecord(plan=PIPELINE), Memory("u"), [cordoned])
        assert found is not None
        assert sum(node.taken == {"cpu": 3.0, "pods": 1.0} for node in found) == MOST_LOOKED_AT
    assert len(api.asked) == MOST_LOOKED_AT
    clock.seconds += NODE_SECONDS + 1
    await given.cluster_nodes(status, RunRecord(plan=PIPELINE), Memory("u"), [cordoned])
    assert len(api.asked) == 2 * MOST_LOOKED_AT


async def test_where_other_pods_may_not_be_listed_nodes_count_as_they_are() -> None:
    api = Crowded()
    api.forbidden = True
    assert await CachedNodes(cast("Any", api), Clock()).uses("n0") is None
    given = gatherer(Source(), Clock(), api)
    cordoned = NodeView("mine", None, None, False, unschedulable=True)
    status = replace(GIVEN, status=decide(facts(GIVEN)).status)
    found = await given.cluster_nodes(status, RunRecord(plan=PIPELINE), Memory("u"), [cordoned])
    assert found is not None
    assert {node.taken for node in found} == {None}


def test_a_pod_s_priority_is_read() -> None:
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    metadata = {"name": "p", "uid": "u", "creationTimestamp": "2026-01-01T12:00:00Z", "annotations": index}
    view = pod_view({"metadata": metadata, "spec": {"priority": 7}})
    assert view is not None
    assert view.priority == 7
    assert pod(0).priority == 0
