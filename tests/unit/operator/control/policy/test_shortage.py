"""Nodes that are taken away: how long a run waits for others, with how few it goes on, and when it goes back."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.adjusting import change, planned, situation, window
from tests.support.factories.adjusting import verdict as verdict_of
from tests.support.factories.facts import BOOK, START, agent, child, decide, facts, job, merged, pod
from tests.support.factories.simulated import ACT, OFF, submitted
from tests.support.factories.stragglers import NODES, scrapes, step

from cost_aware_operator.adjusting.capacity import LEAST_WAIT_SECONDS, Shortage, without_nodes
from cost_aware_operator.adjusting.changes import Change, ChangeOutcome, Kind, plan_key
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.simulate import Absence, World, gone, simulate
from cost_aware_operator.adjusting.situation import Action, Verdict
from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.spec import AdjustPolicy, Objective
from cost_aware_operator.api.status import ConditionType
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.policy.running import SHORT_SECONDS
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.run_record import Pace, RunRecord
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_operator.workload.order import run_order
from cost_aware_trainer.contract import AgentPhase

USD = 3.06
WIDE, _ = planned(
    parallelism={"data": 4, "tensor": 1, "pipeline": 1}, nodes={"min": 4, "max": 4, "instanceTypes": ["p3.2xlarge"]}
)


def short(seconds: float, **over: Any) -> Shortage:
    values: dict[str, Any] = {"pods": ("gpt-3",), "seconds": seconds, "held": 3, "hourly_usd": 3 * USD}
    return Shortage(**(values | over))


def lost(seconds: float, shortage: dict[str, Any] | None = None, **over: Any) -> Verdict:
    """Of four nodes one is gone for so long."""
    values = {"plan": WIDE, "window": window(WIDE, 0.9, seconds=0.0), "hourly_usd": 4 * USD}
    return without_nodes(situation(**(values | over)), short(seconds, **(shortage or {})))


def test_it_waits_until_the_wait_has_cost_as_much_as_going_on_with_fewer() -> None:
    before = (change(kind=Kind.SHRINK, downtime_seconds=300.0),)
    due = lost(1e6, changes=before)
    assert due.plan is not None
    # three nodes are paid for while it waits, those of the new plan while it starts
    seconds = 300.0 * due.plan.nodes / 3
    held = lost(0.99 * seconds, changes=before)
    assert (held.action, held.reason) == (Action.HOLD, "WaitingForNodes")
    found = lost(1.01 * seconds, changes=before)
    assert (found.action, found.reason, found.kind) == (Action.CHANGE, "Shrink", Kind.SHRINK)
    assert found.plan is not None
    assert found.plan.nodes <= 3
    assert "gpt-3 found no node for" in found.message


def test_this_job_s_own_downtime_of_shrinking_is_what_counts_once_it_is_known() -> None:
    quick, slow = (change(kind=Kind.SHRINK, downtime_seconds=seconds) for seconds in (1.0, 6000.0))
    assert lost(LEAST_WAIT_SECONDS, changes=(quick,)).action is Action.CHANGE
    assert lost(LEAST_WAIT_SECONDS - 1, changes=(quick,)).action is Action.HOLD, "a scheduler takes moments"
    assert lost(100.0, changes=(slow,)).action is Action.HOLD
    assert lost(100.0, changes=(replace(slow, kind=Kind.RESIZE),)).action is Action.HOLD, "pods that come and go alike"
    assert lost(100.0, changes=(replace(slow, kind=Kind.REBALANCE),)).action is Action.CHANGE


KEPT: list[tuple[str, dict[str, Any], str]] = [
    ("policy off", {"settings": replace(ACT, policy=AdjustPolicy.OFF)}, "PolicyOff"),
    ("an unknown model", {"space": None}, "ModelUnknown"),
    ("nothing is paid for", {"shortage": {"held": 0, "hourly_usd": None}}, "WaitingForNodes"),
    ("no price", {"shortage": {"hourly_usd": None}}, "PriceUnknown"),
]


@pytest.mark.parametrize(("over", "reason"), [k[1:] for k in KEPT], ids=[k[0].replace(" ", "-") for k in KEPT])
def test_it_waits_on_and_says_why(over: dict[str, Any], reason: str) -> None:
    found = lost(1e6, **over)
    assert (found.action, found.reason) == (Action.HOLD, reason)
    assert "found no node" in found.message


def test_bounds_and_barred_plans_hold() -> None:
    space = situation().space
    assert space is not None
    bound = replace(space, bounds=replace(space.bounds, nodes_min=4))
    assert lost(1e6, space=bound).reason == "NoCandidate"
    best = lost(1e6).plan
    assert best is not None
    other = lost(1e6, barred=frozenset({plan_key(best)})).plan
    assert other is not None
    assert plan_key(other) != plan_key(best)


def test_recommend_says_so_only() -> None:
    assert lost(1e6, settings=replace(ACT, policy=AdjustPolicy.RECOMMEND)).action is Action.RECOMMEND


SMALL = lost(1e6).plan
assert SMALL is not None


def shrunk(dearer: float, **over: Any) -> Change:
    """A change to fewer nodes, where a step is so many times as dear now as it was."""
    now = window(SMALL, 0.9).wall_step_seconds * SMALL.nodes * USD / 3600
    values: dict[str, Any] = {"kind": Kind.SHRINK, "origin": WIDE, "target": SMALL, "before_step_usd": now / dearer}
    return change(**(values | over))


def later(*changes: Change, **over: Any) -> Verdict:
    values = {"plan": SMALL, "window": window(SMALL, 0.9), "changes": changes, "spare_nodes": 4 - SMALL.nodes}
    return verdict_of(**(values | {"hourly_usd": SMALL.nodes * USD} | over))


def test_it_goes_back_when_there_are_nodes_again_and_that_pays() -> None:
    found = later(shrunk(1.5))
    assert (found.action, found.reason) == (Action.CHANGE, "Resize"), "whatever the efficiency"
    assert found.plan is not None
    assert plan_key(found.plan) == plan_key(WIDE)
    assert "there are nodes for 4x1x1 on 4 nodes" in found.message
    assert later(shrunk(1.5), space=bounded(max_hourly_usd=4 * USD)).action is Action.CHANGE
    excluded = later(shrunk(1.5), plan=replace(SMALL, excluded_nodes=("bad",))).plan
    assert excluded is not None
    assert excluded.excluded_nodes == ("bad",)


def bounded(**over: Any) -> Any:
    space = situation().space
    assert space is not None
    return replace(space, bounds=replace(space.bounds, **over))


STAYS: list[tuple[str, Verdict]] = [
    ("fewer nodes are allowed now", later(shrunk(1.5), space=bounded(nodes_max=3))),
    ("fewer dollars an hour are allowed now", later(shrunk(1.5), space=bounded(max_hourly_usd=3.9 * USD))),
    ("too few nodes", later(shrunk(1.5), spare_nodes=4 - SMALL.nodes - 1)),
    ("nodes may not be listed", later(shrunk(1.5), spare_nodes=None)),
    ("no dearer now", later(shrunk(1.01))),
    ("nearly done", later(shrunk(1.5), remaining_steps=1)),
    ("just changed", later(shrunk(1.5, at=START + timedelta(minutes=58)))),
    ("it was tried", later(shrunk(1.5), barred=frozenset({plan_key(WIDE)}))),
    ("made smaller since on purpose", later(shrunk(1.5), change(kind=Kind.RESIZE, origin=WIDE, target=SMALL))),
    ("it did not come about", later(shrunk(1.5, outcome=ChangeOutcome.FAILED))),
]


@pytest.mark.parametrize("found", [s[1] for s in STAYS], ids=[s[0].replace(" ", "-") for s in STAYS])
def test_it_does_not_go_back(found: Verdict) -> None:
    assert found.action is Action.HOLD


def test_with_time_as_objective_it_goes_back_for_time_and_is_judged_by_it() -> None:
    space = situation().space
    assert space is not None
    fast = replace(space, objective=Objective.TIME)
    # as dear a step on more nodes is a shorter one
    back = later(shrunk(1.0), space=fast)
    assert back.action is Action.CHANGE
    assert "sooner" in back.message
    wide = window(WIDE, 0.9)
    usd = wide.wall_step_seconds * 4 * USD / 3600
    grown = change(kind=Kind.RESIZE, origin=SMALL, target=WIDE, outcome=ChangeOutcome.CHECKING)
    dearer = replace(grown, before_step_usd=usd / 1.5)
    held = verdict_of(plan=WIDE, window=wide, space=fast, changes=(dearer,), hourly_usd=4 * USD)
    assert held.action is not Action.ROLL_BACK
    cost = verdict_of(plan=WIDE, window=wide, changes=(dearer,), hourly_usd=4 * USD)
    assert cost.action is Action.ROLL_BACK
    slower = replace(grown, before_step_usd=usd / 5)
    assert verdict_of(plan=WIDE, window=wide, space=fast, changes=(slower,), hourly_usd=4 * USD).action is (
        Action.ROLL_BACK
    )


def test_a_change_that_was_still_being_checked_is_superseded() -> None:
    checking = change(outcome=ChangeOutcome.CHECKING)
    history = History((checking,)).begun(situation(window=window(WIDE, 0.9, seconds=0.0)), lost(1e6), 3)
    assert history.changes[0].outcome is ChangeOutcome.SUPERSEDED


GIVEN = job(nodes={"min": 1, "max": 2, "instanceTypes": ["p3.2xlarge"]}, parallelism={"data": 2},
            efficiency={"windowSeconds": 20, "cooldownSeconds": 0}, trainer={"config": {"steps": 100_000}},
            template={"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}})  # fmt: skip
WAITING = {"node": None, "running": False, "started_at": None, "phase": "Pending", "ip": None}
FIRST = RunRecord(attempt=1, attempt_at=START, members={0: "pod-0", 1: "pod-1"}, started_at=START)


def left_alone(seconds: float, record: RunRecord = FIRST) -> Facts:
    """The node under pod 1 is gone, and its replacement has waited for so long; rank 0 has lost its peer."""
    plan = make_plan(PlanInput(GIVEN.spec, BOOK))
    assert isinstance(plan, Plan)
    seen = scrapes([[0.4, 0.4]] * 4)
    pace = Pace(plan=plan_key(plan), window=window(WIDE, 0.9))
    waits = pod(1, "new-1", problem="Unschedulable: 0/2 nodes are available", **WAITING)
    return facts(
        GIVEN, seconds, child=child(GIVEN, completions=2), pods=(pod(0), waits), scrapes=seen,
        record=record.model_copy(update={"pace": pace}), order=run_order(GIVEN, plan, 1),
        agents={"pod-0": agent(0, AgentPhase.FAILED, message="connection closed by peer")},
        nodes=NODES, cluster_nodes=tuple(NODES.values())[:1],
    )  # fmt: skip


def adjusting(decision: Decision) -> tuple[str, str]:
    found = find(decision.status.conditions, ConditionType.ADJUSTING)
    assert found is not None
    return found.status.value, found.reason


def test_a_run_without_a_node_goes_on_with_fewer_pods_and_counts_as_interrupted_once() -> None:
    given = left_alone(30.0)
    decision = decide(given)
    assert adjusting(decision) == ("False", "WaitingForNodes")
    assert decision.requeue_seconds == SHORT_SECONDS, "each look is a search"
    assert decision.pods == 2
    given, decision = step(left_alone(200.0), decision)
    assert adjusting(decision) == ("True", "Shrink")
    assert decision.urgent, "written down before anything is done"
    for _ in range(2):
        given, decision = step(given, decision)
        assert (decision.pods, decision.want_pods) == (1, True), "the waiting pod is given up"
        assert decision.record.changes[-1].outcome is ChangeOutcome.IN_PROGRESS, "its peer's failure is the old plan's"
        given = replace(given, pods=given.pods[:1])
    assert decision.record.attempt == 2
    assert decision.tell == ("pod-0",)
    assert decision.order is not None
    assert (decision.order.nodes, decision.order.drain_seconds) == (1, 0.0), "there is nothing to drain"
    assert (decision.record.interruptions, decision.record.fruitless) == (1, 0)
    seen = scrapes([[0.9]] * 2, 2)
    runs = {"pod-0": agent(0, AgentPhase.RUNNING, 2)}
    given, decision = step(given, decision, agents=runs, samples={"pod-0": seen[-1].ranks}, scrapes=seen)
    assert decision.record.changes[-1].downtime_seconds is not None
    assert decision.status.adjustments[-1].kind == "Shrink"
    # and when another node can take a pod, two pods are wanted again while the one trains on
    record = decision.record
    dear = replace(record.changes[-1], before_step_usd=1e-6)
    record = record.model_copy(update={"changes": (dear,)})
    given = replace(given, record=record, cluster_nodes=tuple(NODES.values())[:2])
    given, decision = step(given, decide(given))
    assert adjusting(decision) == ("True", "Resize")
    assert decision.pods == 2


def test_a_smaller_plan_that_does_not_start_is_given_up_and_barred() -> None:
    slow = job(**merged(GIVEN.spec.to_document(), {"efficiency": {"cooldownSeconds": 900}}))
    begun = replace(left_alone(200.0), job=slow)
    given, decision = step(begun, decide(begun))
    given = replace(given, now=given.now + timedelta(seconds=400))
    decision = decide(replace(given, record=decision.record))
    assert adjusting(decision) == ("False", "CoolingDown"), "it does not go from one plan that fails to the next"
    last = decision.record.changes[-1]
    assert last.outcome is ChangeOutcome.FAILED
    assert plan_key(last.target) in decision.record.barred
    assert decision.record.plan is not None
    assert decision.record.plan.nodes == 2


@pytest.mark.parametrize(
    "over",
    [
        {"record": RunRecord()},
        {"pods": (pod(0), pod(1, "new-1", running=False, phase="Pending", ip=None))},
        {"pods": (pod(0), pod(1, "new-1", deleting=True, **WAITING))},
    ],
    ids=["never-trained", "the-pod-has-a-node", "the-pod-is-going"],
)
def test_other_missing_pods_are_no_lack_of_nodes(over: dict[str, Any]) -> None:
    decision = decide(replace(left_alone(1e5), **over))
    assert decision.record.changes == ()


@settings(max_examples=15)
@given(
    degrees=st.sampled_from([(2, 1, 1, 2), (4, 1, 1, 4), (8, 1, 1, 8)]),
    absences=st.lists(st.tuples(st.integers(1, 8), st.floats(0, 4000), st.floats(10, 4000)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_spot_nodes_that_come_and_go_never_make_it_flap_nor_much_dearer_than_waiting(
    degrees: tuple[int, int, int, int], absences: list[tuple[int, float, float]], seed: int
) -> None:
    plan, space = submitted(degrees)
    space = replace(space, work=replace(space.work, steps=2000))
    trace = [Absence(nodes, begin, begin + length) for nodes, begin, length in absences]
    world = World(noise=0.0, gone=lambda seconds: gone(trace, seconds))
    static, acting = (simulate(space, plan, policy, world, seed) for policy in (OFF, ACT))
    for before, after in pairwise(acting.changes):
        waited = (after.at - before.at).total_seconds()
        assert after.kind is Kind.SHRINK or after.is_rollback or waited >= ACT.cooldown_seconds
    shrinks = sum(c.kind is Kind.SHRINK for c in acting.changes)
    assert shrinks <= sum(a.nodes for a in trace)
    switching = sum(
        (world.downtime_seconds[c.kind] + 2 * ACT.window_seconds) * max(c.origin.nodes, c.target.nodes) * USD / 3600
        for c in acting.changes
    )
    # what it meets that the static run has escaped, as it ends later or holds other nodes
    met = sum((world.restart_seconds + 120) * plan.nodes * USD / 3600 for _ in trace)
    assert acting.usd <= static.usd + switching + met


def test_an_hour_without_a_node_is_trained_through_and_the_node_is_taken_back() -> None:
    plan, space = submitted((2, 1, 1, 2))
    space = replace(
        space,
        work=replace(space.work, steps=20_000),
        objective=Objective.TIME,
        bounds=replace(space.bounds, nodes_max=2),
    )
    world = World(noise=0.0, gone=lambda seconds: gone([Absence(1, 600, 4200)], seconds))
    static, acting = simulate(space, plan, OFF, world), simulate(space, plan, ACT, world)
    assert [c.kind for c in acting.changes] == [Kind.SHRINK, Kind.RESIZE]
    assert acting.plan.nodes == 2
    assert acting.seconds < static.seconds - 1000
    assert acting.usd < static.usd
