"""Nodes that announce their end: pods save and move once, before the node dies, and never for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.factories.facts import MEMBERS, RECORD, condition, decide, running
from tests.support.factories.stragglers import FIRST, step, trained

from cost_aware_operator.api.status import ConditionStatus, ConditionType
from cost_aware_operator.control.policy.disruption import ENDING_CONDITIONS, ENDING_TAINTS, notice_of
from cost_aware_operator.workload.views import NodeView, Taint, node_view

FREE = NodeView("node-9", "p3.2xlarge", None, False)


def nodes(**over: Any) -> dict[str, NodeView]:
    """Two nodes, of which the second is as told."""
    plain = NodeView("node-0", "p3.2xlarge", None, True)
    return {"node-0": plain, "node-1": replace(plain, name="node-1", **over)}


SPOT_NOTICE = nodes(taints=(Taint("aws-node-termination-handler/spot-itn", "", "NoSchedule"),))


@pytest.mark.parametrize("key", ENDING_TAINTS)
def test_every_cloud_s_taint_is_a_notice(key: str) -> None:
    assert key in notice_of(replace(FREE, taints=(Taint(key, "", "NoSchedule"),)))


@pytest.mark.parametrize("name", ENDING_CONDITIONS)
def test_a_condition_is_a_notice_while_it_is_true(name: str) -> None:
    def read(status: str) -> NodeView:
        document = {"metadata": {"name": "n"}, "status": {"conditions": [{"type": name, "status": status}]}}
        return node_view(document)

    assert name in notice_of(read("True"))
    assert notice_of(read("False")) == ""


def test_other_taints_and_a_cordon_are_none() -> None:
    assert notice_of(replace(FREE, unschedulable=True, taints=(Taint("nvidia.com/gpu", "", "NoSchedule"),))) == ""


def test_a_pod_on_a_node_that_ends_is_evicted_and_it_is_told() -> None:
    decision = decide(running(nodes=SPOT_NOTICE))
    assert decision.evict == ("pod-1",)
    assert decision.urgent, "what was done is written down first"
    assert decision.record.drained == {"node-1": "pod-1"}
    told = condition(decision, ConditionType.DISRUPTED)
    assert (told.status, told.reason) == (ConditionStatus.TRUE, "NodeEnding")
    assert "node node-1 under pod gpt-1-a is about to end (taint aws-node-termination-handler/spot-itn)" in told.message
    assert any(e.warning and e.reason == "NodeEnding" for e in decision.events)


def test_an_eviction_that_did_not_come_about_is_asked_for_again() -> None:
    first = decide(running(nodes=SPOT_NOTICE))
    again = decide(running(nodes=SPOT_NOTICE, record=first.record))
    assert again.evict == ("pod-1",)
    assert again.record.drained == first.record.drained


def test_a_pod_that_ends_is_not_evicted_again_and_neither_is_one_that_comes_back() -> None:
    first = decide(running(nodes=SPOT_NOTICE))
    given = running(nodes=SPOT_NOTICE, record=first.record)
    ending = replace(given, pods=(given.pods[0], replace(given.pods[1], deleting=True)))
    assert decide(ending).evict == ()
    back = replace(given.pods[1], uid="another")
    members = {**MEMBERS, 1: "another"}
    agents = {**given.agents, "another": given.agents["pod-1"]}
    samples = {"pod-0": given.samples["pod-0"], "another": given.samples["pod-1"]}
    returned = replace(given, pods=(given.pods[0], back), agents=agents, samples=samples,
                       record=first.record.model_copy(update={"members": members}))  # fmt: skip
    assert decide(returned).evict == ()


def test_a_cordon_moves_a_pod_only_where_another_node_could_take_it() -> None:
    cordoned = nodes(unschedulable=True)
    stays = decide(running(nodes=cordoned, cluster_nodes=tuple(cordoned.values())))
    assert stays.evict == ()
    assert "it stays as long as the node does" in condition(stays, ConditionType.DISRUPTED).message
    moved = decide(running(nodes=cordoned, cluster_nodes=(*cordoned.values(), FREE)))
    assert moved.evict == ("pod-1",)
    assert condition(moved, ConditionType.DISRUPTED).reason == "NodeCordoned"


def test_nothing_else_is_decided_as_a_pod_is_moved_and_nothing_is_moved_during_a_change() -> None:
    slow = trained(FIRST)
    ending = {**slow.nodes, "node-0": replace(slow.nodes["node-0"], taints=SPOT_NOTICE["node-1"].taints)}
    evicted = decide(replace(slow, nodes=ending))
    assert evicted.evict == ("pod-0",)
    assert evicted.record.changes == ()
    _, changing = step(slow, decide(slow), nodes=ending)
    assert changing.evict == ()


def test_when_the_notice_is_gone_it_is_told_once() -> None:
    first = decide(running(nodes=SPOT_NOTICE))
    given = running(record=RECORD)
    after = decide(replace(given, job=replace(given.job, status=first.status)))
    assert condition(after, ConditionType.DISRUPTED).reason == "NoDisruption"
    quiet = decide(replace(given, job=replace(given.job, status=after.status)))
    assert not [e for e in quiet.events if "Disrupted" in e.message]
