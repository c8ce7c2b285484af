"""A node that is slow: who is named, when it is left, how, and that it is never gone back to."""

from __future__ import annotations

import statistics
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.adjusting import change, situation, window
from tests.support.factories.adjusting import verdict as verdict_of
from tests.support.factories.facts import START, agent, child, decide, job, pod
from tests.support.factories.simulated import ACT, OFF, submitted
from tests.support.factories.stragglers import FIRST, GIVEN, NODES, PLAN, named, scrapes, step, trained

from cost_aware_operator.adjusting.changes import ChangeOutcome, Kind, move_key
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.simulate import SLOW_NODE, World, simulate
from cost_aware_operator.adjusting.situation import Action, SlowNode, Verdict
from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.spec import AdjustPolicy, Objective
from cost_aware_operator.api.status import ConditionType, StagesStatus
from cost_aware_operator.observing.stragglers import median_without, stragglers
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.job import indexed_job, template_hash
from cost_aware_operator.workload.placement import could_take
from cost_aware_operator.workload.secret import TokenSecret
from cost_aware_operator.workload.views import NodeView, Taint
from cost_aware_trainer.contract import AgentPhase, LaunchStage


def test_a_rank_that_takes_longer_than_its_peers_is_named_with_its_slowdown() -> None:
    (slow,) = stragglers(scrapes([[0.4, 0.9, 0.4, 0.41]] * 4), 4)
    assert slow.rank == 1
    assert slow.slowdown == pytest.approx(0.9 / 0.4, rel=0.01)


@pytest.mark.parametrize(
    ("what", "works", "stage"),
    [
        ("a little slower", [[0.4, 0.5, 0.4, 0.4]] * 4, 4),
        ("a burst in one half", [[0.2, 0.2], [0.2, 0.2], [0.2, 0.9], [0.2, 0.9]], 2),
        ("other stages have other layers", [[0.3, 0.3, 0.8, 0.8]] * 4, 2),
        ("nothing to compare with", [[0.3, 0.9]] * 4, 1),
        ("within the spread of all", [[0.3, 0.6, 0.45, 0.8]] * 4, 4),
    ],
)
def test_nobody_is_named_for(what: str, works: list[list[float]], stage: int) -> None:
    assert named(works, stage) == [], what


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others_is_that_of_the_others(values: list[float], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    order = sorted(values)
    assert median_without(order, place) == pytest.approx(statistics.median(order[:place] + order[place + 1 :]))


def test_among_two_the_slower_is_named_and_both_ranks_of_a_slow_node() -> None:
    assert named([[0.4, 0.6]] * 4, 2) == [1]
    assert named([[0.4, 0.4, 0.8, 0.8]] * 4, 4) == [2, 3]


def slowed(factor: float = 2.0, efficiency: float = 0.6, **over: Any) -> Any:
    """A run on four nodes of which one takes `factor` times as long."""
    seen = window(PLAN, efficiency)
    usual = seen.measured.working_seconds
    more = (factor - 1) * usual
    measured = replace(seen.measured, step_seconds=seen.measured.step_seconds + more, working_seconds=factor * usual)
    seen = replace(seen, measured=measured, wall_step_seconds=seen.wall_step_seconds + more)
    slow = SlowNode("bad", ("gpt-1",), (1,), factor * usual, usual, usual)
    values = {"plan": PLAN, "window": seen, "slow": slow, "spare_nodes": 1, "hourly_usd": 4 * 3.06}
    return situation(**(values | over))


def verdict(**over: Any) -> Verdict:
    return verdict_of(**vars(slowed(**over)))


def test_a_slow_node_is_left_for_another_with_the_numbers() -> None:
    found = verdict(efficiency=0.9)
    assert (found.action, found.reason) == (Action.CHANGE, "Move"), "the dollars decide, not the threshold"
    assert found.plan is not None
    assert (found.plan.nodes, found.plan.excluded_nodes) == (4, ("bad",))
    assert "node bad is slow: rank 1 there computes" in found.message
    assert "2.00 times" in found.message
    assert "for the change" in found.message
    given = slowed()
    assert given.window is not None
    expected = (given.window.wall_step_seconds - given.slow.peers_seconds) * 4 * 3.06 / 3600
    assert found.predicted_step_usd == pytest.approx(expected, rel=1e-6)


def test_recommend_says_so_only() -> None:
    settings_ = replace(slowed().settings, policy=AdjustPolicy.RECOMMEND)
    assert verdict(settings=settings_).action is Action.RECOMMEND


def test_without_another_node_it_goes_on_with_fewer_where_that_is_cheaper() -> None:
    assert verdict(factor=6.0, spare_nodes=0, efficiency=0.9).action is Action.HOLD
    found = verdict(factor=6.0, spare_nodes=0)
    assert found.action is Action.CHANGE
    assert found.plan is not None
    assert found.plan.nodes < 4
    assert found.plan.excluded_nodes == ("bad",)


def test_with_time_as_objective_a_slow_node_is_not_left_for_longer_steps() -> None:
    space = slowed().space
    fast = replace(space, objective=Objective.TIME)
    gentle = verdict(factor=1.5, spare_nodes=0, space=fast)
    assert gentle.action is Action.HOLD
    assert verdict(factor=1.5, spare_nodes=0, space=space).action is Action.CHANGE


KEPT: list[tuple[str, dict[str, Any], str]] = [
    ("the run nearly done", {"remaining_steps": 3}, "NotWorthIt"),
    ("just changed", {"changes": (change(at=START + timedelta(minutes=58)),)}, "CoolingDown"),
    ("it was tried", {"barred": frozenset({move_key("bad")})}, "MoveBarred"),
    ("no other node, and too few steps left", {"spare_nodes": 0, "remaining_steps": 3}, "NoSpareNode"),
]


@pytest.mark.parametrize(("over", "reason"), [k[1:] for k in KEPT], ids=[k[0].replace(" ", "-") for k in KEPT])
def test_a_slow_node_is_kept_and_it_is_said_why(over: dict[str, Any], reason: str) -> None:
    found = verdict(efficiency=0.95, **over)
    assert found.action is Action.HOLD
    assert found.of_slow_node is not None
    assert found.of_slow_node.reason == reason
    assert "node bad is slow" in found.of_slow_node.message


def test_a_move_that_did_not_start_goes_back_and_is_not_tried_again() -> None:
    given = slowed()
    found = verdict()
    begun = History().begun(given, found, 2)
    assert begun.changes[-1].kind is Kind.MOVE
    failed = begun.failed("no node")
    assert failed is not None
    history, plan = failed
    assert plan.excluded_nodes == ()
    assert verdict(barred=frozenset(history.barred), changes=()).of_slow_node.reason == "MoveBarred"  # type: ignore[union-attr]


def test_a_node_that_was_left_is_not_gone_back_to_even_if_the_next_is_no_better() -> None:
    last = change(kind=Kind.MOVE, origin=PLAN, target=replace(PLAN, excluded_nodes=("bad",)), before_step_usd=1e-9,
                  outcome=ChangeOutcome.CHECKING, at=START)  # fmt: skip
    assert verdict(slow=None, changes=(last,)).action is not Action.ROLL_BACK


@settings(max_examples=15)
@given(
    degrees=st.sampled_from([(2, 1, 1, 2), (4, 1, 1, 4), (2, 1, 2, 4), (2, 2, 1, 4)]),
    straggler=st.floats(1.0, 6.0),
    spare=st.integers(0, 2),
    noise=st.floats(0, 0.03),
    seed=st.integers(0, 1000),
)
def test_a_slow_node_is_left_once_at_most_and_it_never_costs_much_more_than_staying(
    degrees: tuple[int, int, int, int], straggler: float, spare: int, noise: float, seed: int
) -> None:
    plan, space = submitted(degrees)
    space = replace(space, work=replace(space.work, steps=1000))
    world = World(noise=noise, straggler=straggler, spare_nodes=spare)
    static, acting = (simulate(space, plan, policy, world, seed) for policy in (OFF, ACT))
    left = [
        c for c in acting.changes if SLOW_NODE in c.target.excluded_nodes and SLOW_NODE not in c.origin.excluded_nodes
    ]
    assert len(left) <= 1
    if left and not any(c.is_rollback for c in acting.changes):
        assert SLOW_NODE in acting.plan.excluded_nodes
    switching = sum(
        (world.downtime_seconds[c.kind] + 2 * ACT.window_seconds) * max(c.origin.nodes, c.target.nodes) * 3.06 / 3600
        for c in acting.changes
    )
    assert acting.usd <= static.usd * (1 + 2 * noise) + switching


def test_a_node_three_times_too_slow_is_left_and_most_of_the_waste_saved() -> None:
    plan, space = submitted((2, 1, 1, 2))
    space = replace(space, work=replace(space.work, steps=300), bounds=replace(space.bounds, nodes_min=2))
    world = World(straggler=3.0, spare_nodes=1)
    static, acting = simulate(space, plan, OFF, world), simulate(space, plan, ACT, world)
    assert [c.kind for c in acting.changes][:1] == [Kind.MOVE]
    assert acting.usd < 0.6 * static.usd
    none = simulate(space, plan, ACT, replace(world, spare_nodes=0))
    assert Kind.MOVE not in [c.kind for c in none.changes]


def test_status_condition_and_event_name_rank_pod_and_node() -> None:
    decision = decide(trained(FIRST))
    (slow,) = decision.status.stragglers
    assert (slow.rank, slow.pod, slow.node, slow.slowdown) == (1, "gpt-1-a", "node-1", 2.0)
    condition = find(decision.status.conditions, ConditionType.STRAGGLING)
    assert condition is not None
    assert condition.reason == "Move"
    assert "rank 1 (pod gpt-1-a, node node-1) takes 2.00 times its peers' time" in condition.message
    assert any(e.warning and e.reason == "Move" and "node-1" in e.message for e in decision.events)


def test_without_a_free_node_nothing_is_done_and_it_is_said() -> None:
    decision = decide(trained(FIRST, cluster_nodes=tuple(NODES.values())[:2]))
    assert decision.record.changes == ()
    condition = find(decision.status.conditions, ConditionType.STRAGGLING)
    assert condition is not None
    assert condition.reason == "NoSpareNode"
    assert "no other node could take the pod" in condition.message


def test_pods_save_and_end_before_new_ones_are_made_and_each_stage_may_be_repeated() -> None:
    given = trained(FIRST)
    decision = decide(given)
    assert decision.record.changes[-1].kind is Kind.MOVE
    assert decision.want_pods, "the change is written down before anything is done"
    for _ in range(2):
        given, decision = step(given, decision)
        assert (decision.want_pods, decision.replace_child) == (False, False)
    assert given.child is not None
    given, decision = step(given, decision, child=replace(given.child, suspended=True), pods=(), agents={}, samples={})
    assert decision.replace_child
    given, decision = step(given, decision, child=None)
    assert decision.want_pods
    assert decision.plan is not None
    assert decision.plan.excluded_nodes == ("node-1",)
    document = indexed_job(GIVEN, decision.plan, PodDefaults(), TokenSecret("catj-uid-suffix", 1), suspend=False)
    affinity = document["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]
    assert term["matchExpressions"][0]["values"] == ["p3.2xlarge"]
    made = replace(child(GIVEN), template_hash=template_hash(GIVEN, decision.plan))
    pods = (pod(0, "new-0"), pod(1, "new-1", node="node-2"))
    agents = {f"new-{i}": agent(i, AgentPhase.WAITING, 0) for i in range(2)}
    given, decision = step(given, decision, child=made, pods=pods, agents=agents)
    assert decision.record.attempt == 2
    assert set(decision.tell) == {"new-0", "new-1"}
    assert decision.record.fruitless == 0
    seen = scrapes([[0.4, 0.4]] * 2, 2)
    running = {f"new-{i}": agent(i, AgentPhase.RUNNING, 2) for i in range(2)}
    stages = [{LaunchStage.RELAUNCH: 2.0, LaunchStage.LOAD: 0.25}, {LaunchStage.RELAUNCH: 3.0}]
    samples = {f"new-{i}": (replace(seen[-1].ranks[i], stage_seconds=stages[i]),) for i in range(2)}
    given, decision = step(given, decision, agents=running, samples=samples, scrapes=seen)
    assert decision.record.changes[-1].downtime_seconds is not None
    assert decision.status.adjustments[-1].stages == StagesStatus(relaunch=3.0, load=0.25)
    assert decision.status.stragglers == ()
    assert decision.status.adjustments[-1].kind == "Move"


def test_a_job_keeps_its_pods_until_it_is_suspended_and_peers_that_are_lost_meanwhile_are_no_failure() -> None:
    given = trained(FIRST)
    decision = decide(given)
    assert decision.pods is None
    lost = {**given.agents, "pod-1": agent(1, AgentPhase.FAILED, message="connection closed by peer")}
    pods = (replace(given.pods[0], deleting=True), given.pods[1])
    given, decision = step(given, decision, pods=pods, agents=lost)
    assert decision.record.changes[-1].outcome is ChangeOutcome.IN_PROGRESS
    assert not decision.want_pods


def test_pods_that_find_no_node_make_the_run_go_back() -> None:
    given = trained(FIRST)
    decision = decide(given)
    plan = decision.record.plan
    assert plan is not None
    made = replace(child(GIVEN), template_hash=template_hash(GIVEN, plan))
    waiting = pod(
        1,
        "new-1",
        node=None,
        running=False,
        started_at=None,
        phase="Pending",
        problem="Unschedulable: 0/3 nodes",
        created_at=given.now,
    )
    given, decision = step(given, decision, child=made, pods=(pod(0, "new-0"), waiting), agents={}, samples={})
    assert decision.want_pods
    given = replace(given, now=given.now + timedelta(seconds=70))
    given, decision = step(given, decision)
    assert decision.record.changes[-1].outcome is ChangeOutcome.FAILED
    assert "Unschedulable" in decision.record.changes[-1].reason
    assert decision.record.plan is not None
    assert decision.record.plan.excluded_nodes == ()
    assert move_key("node-1") in decision.record.barred


def test_the_template_s_hash_is_the_old_one_where_no_node_is_left() -> None:
    assert template_hash(GIVEN, PLAN) == template_hash(GIVEN, replace(PLAN, excluded_nodes=()))
    assert template_hash(GIVEN, PLAN) != template_hash(GIVEN, replace(PLAN, excluded_nodes=("x",)))


GPU = Taint("nvidia.com/gpu", "present", "NoSchedule")
PLACES: list[tuple[str, dict[str, Any], bool]] = [
    ("free", {}, True),
    ("not-ready", {"ready": False}, False),
    ("cordoned", {"unschedulable": True}, False),
    ("of-another-type", {"instance_type": "p3.8xlarge"}, False),
    ("tainted", {"taints": (GPU,)}, False),
    ("tainted-softly", {"taints": (replace(GPU, effect="PreferNoSchedule"),)}, True),
    ("too-small", {"allocatable": {"cpu": "500m"}}, False),
    ("large-enough", {"allocatable": {"cpu": "4"}}, True),
    ("left-before", {"name": "left"}, False),
]


@pytest.mark.parametrize(("over", "takes"), [p[1:] for p in PLACES], ids=[p[0] for p in PLACES])
def test_a_node_could_take_a_pod_as_the_scheduler_sees_it(over: dict[str, Any], takes: bool) -> None:
    node = NodeView(**({"name": "n", "instance_type": "p3.2xlarge", "zone": None, "spot": False} | over))
    plan = replace(PLAN, excluded_nodes=("left",))
    assert bool(could_take([node], GIVEN, plan, {"requests": {"cpu": "1"}})) is takes


@pytest.mark.parametrize(
    ("toleration", "takes"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "value": "absent"}, False),
        ({"operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_tolerations_are_read_as_kubernetes_reads_them(toleration: dict[str, str], takes: bool) -> None:
    node = NodeView("n", "p3.2xlarge", None, False, taints=(GPU,))
    assert bool(could_take([node], job(template={"tolerations": [toleration]}), PLAN, {})) is takes
