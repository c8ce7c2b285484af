"""Going on on nodes of another instance type: only where they are free, and where much less is promised than here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.adjusting import SPEC, change, planned, situation, window
from tests.support.factories.adjusting import verdict as verdict_of
from tests.support.factories.facts import BOOK, START, agent, child, decide, facts, job, merged, pod
from tests.support.factories.simulated import ACT
from tests.support.factories.stragglers import scrapes

from cost_aware_operator.adjusting.adjuster import OtherPlan, worth_changing
from cost_aware_operator.adjusting.changes import Change, ChangeOutcome, Kind, plan_key
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.simulate import World, simulate
from cost_aware_operator.adjusting.situation import Action, Verdict, measured_of
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan, PlanInput, adjusting_space, make_plan, planning_key
from cost_aware_operator.workload.job import template_hash
from cost_aware_operator.workload.order import run_order
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase

HERE, OTHER = "p3.2xlarge", "g5.xlarge"
USD = 3.06
PLAN, _ = planned(
    parallelism={"data": 2, "tensor": 1, "pipeline": 1}, nodes={"min": 2, "max": 2, "instanceTypes": [HERE]}
)
ELSEWHERE = replace(PLAN, instance_types=(OTHER,))
BOTH = adjusting_space(PlanInput(job(**merged(SPEC, {"nodes": {"instanceTypes": [HERE, OTHER]}})).spec, BOOK))
assert BOTH is not None


def priced(usd: float) -> Any:
    """Both types, the other at so many dollars an hour."""
    assert BOTH is not None
    offers = tuple(replace(o, hourly_usd=usd) if o.name == OTHER else o for o in BOTH.offers)
    return replace(BOTH, offers=offers)


def verdict(usd: float = 1.006, free: int = 8, **over: Any) -> Verdict:
    values = {"plan": PLAN, "space": priced(usd), "free_nodes": {OTHER: free}, "hourly_usd": 2 * USD}
    return verdict_of(**(values | {"window": window(PLAN, 0.5)} | over))


def test_a_much_cheaper_type_is_moved_to_and_named_with_the_numbers() -> None:
    found = verdict()
    assert (found.action, found.reason) == (Action.CHANGE, "Move")
    assert found.plan is not None
    assert (found.plan.instance_types, found.plan.ranks_per_node) == ((OTHER,), 1)
    assert found.plan.hourly_usd == 1.006 * found.plan.nodes
    assert "of g5.xlarge saves" in found.message


def test_spot_nodes_of_another_type_are_found_by_their_type() -> None:
    spot = priced(1.006)
    spot = replace(spot, offers=tuple(replace(o, name=f"{o.name} spot", spot=True) for o in spot.offers))
    found = verdict(space=spot, plan=replace(PLAN, spot=True)).plan
    assert found is not None
    assert (found.instance_types, found.spot) == ((OTHER,), True)


def test_types_without_enough_free_nodes_are_not_thought_of() -> None:
    for free in (0, 1):
        found = verdict(free=free, space=replace(priced(1.006), bounds=replace(priced(1.0).bounds, nodes_min=2)))
        assert found.plan is None or found.plan.instance_types == (HERE,)
    assert verdict(free_nodes={}).plan == verdict(free=0).plan


def test_another_type_must_promise_a_fifth_where_the_same_type_must_promise_a_twentieth() -> None:
    one, _ = planned(
        parallelism={"data": 1, "tensor": 1, "pipeline": 1}, nodes={"min": 1, "max": 1, "instanceTypes": [HERE]}
    )
    here = {"plan": one, "window": window(one, 0.5), "hourly_usd": USD}
    assert verdict(usd=0.85 * USD, **here).action is Action.HOLD
    found = verdict(usd=0.7 * USD, **here)
    assert found.plan is not None
    assert found.plan.instance_types == (OTHER,)


def test_a_sound_promise_of_the_same_type_is_not_hidden_by_a_greater_one_of_another_that_is_not() -> None:
    given = situation(plan=PLAN, window=window(PLAN, 0.5), hourly_usd=2 * USD)
    measured = measured_of(given)
    assert measured is not None
    now = measured.step_usd
    same = OtherPlan(replace(PLAN, micro_batch=1), 1.0, 0.9 * now, 0.0, 10.0, margin=0.05)
    other = OtherPlan(ELSEWHERE, 1.0, 0.85 * now, 0.0, 15.0, margin=0.2)
    assert worth_changing(measured, [other, same]).plan == same.plan
    assert worth_changing(measured, [other]).reason == "PromiseTooSmall"
    assert worth_changing(measured, [replace(other, step_usd=0.75 * now), same]).plan == ELSEWHERE


def moved(dearer: float, **over: Any) -> Change:
    """A move to the other type, where a step is so many times as dear now."""
    now = window(PLAN, 0.9).wall_step_seconds * 2 * 1.006 / 3600
    values: dict[str, Any] = {"kind": Kind.MOVE, "origin": PLAN, "target": ELSEWHERE, "outcome": ChangeOutcome.CHECKING}
    return change(**(values | {"before_step_usd": now / dearer, "before_node_usd": USD} | over))


def after(dearer: float, free: int = 2) -> Verdict:
    there = {"plan": ELSEWHERE, "hourly_usd": 2 * 1.006, "free_nodes": {HERE: free}}
    return verdict_of(window=window(PLAN, 0.9), space=BOTH, changes=(moved(dearer),), **there)


def test_a_move_that_broke_its_promise_is_taken_back_if_the_old_nodes_are_still_free() -> None:
    back = after(1.5)
    assert back.action is Action.ROLL_BACK
    assert back.plan is not None
    assert back.plan.instance_types == (HERE,)
    assert after(1.5, free=1).action is not Action.ROLL_BACK
    # the new nodes' price says nothing of what the old ones cost
    assert after(0.9).action is not Action.ROLL_BACK


def test_a_move_that_did_not_start_bars_that_plan() -> None:
    begun = History().begun(situation(plan=PLAN, window=window(PLAN, 0.5)), verdict(), 2)
    assert begun.changes[-1].kind is Kind.MOVE
    failed = begun.failed("no node")
    assert failed is not None
    history, plan = failed
    assert plan.instance_types == (HERE,)
    assert history.barred == (plan_key(begun.changes[-1].target),)


def test_free_nodes_of_the_other_type_are_seen_and_the_job_is_made_anew_for_them() -> None:
    spec: dict[str, Any] = {
        "nodes": {"min": 1, "max": 1, "instanceTypes": [HERE, OTHER]}, "efficiency": {"windowSeconds": 20, "cooldownSeconds": 0},
        "trainer": {"config": {"steps": 100_000}}, "template": {"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}},
    }  # fmt: skip
    both = job(**spec)
    begun = make_plan(PlanInput(job(**merged(spec, {"nodes": {"instanceTypes": [HERE]}})).spec, BOOK))
    assert isinstance(begun, Plan)
    nodes = {"node-0": NodeView("node-0", HERE, None, False), "node-1": NodeView("node-1", OTHER, None, False)}
    seen = scrapes([[0.5]] * 4)
    record = RunRecord(
        attempt=1, attempt_at=START, members={0: "pod-0"}, started_at=START, plan=begun, planned_for=planning_key(both.spec)
    )  # fmt: skip
    given = facts(
        both, 60.0, child=replace(child(both), template_hash=template_hash(both, begun)), pods=(pod(0),), record=record,
        nodes=nodes, cluster_nodes=tuple(nodes.values()), scrapes=seen, samples={"pod-0": seen[-1].ranks},
        agents={"pod-0": agent(0, AgentPhase.RUNNING)}, order=run_order(both, begun, 1),
    )  # fmt: skip
    decision = decide(given)
    assert [c.kind for c in decision.record.changes] == [Kind.MOVE]
    assert decision.record.plan is not None
    assert decision.record.plan.instance_types == (OTHER,)
    assert template_hash(both, decision.record.plan) != template_hash(both, begun)
    without = decide(replace(given, cluster_nodes=(nodes["node-0"],))).record.changes
    assert Kind.MOVE not in [c.kind for c in without]


@settings(max_examples=6)
@given(usd=st.floats(0.3, 6), other_compute=st.floats(0.2, 3), noise=st.floats(0, 0.03), seed=st.integers(0, 1000))
def test_other_types_never_cost_much_more_than_staying_whatever_they_turn_out_to_be(
    usd: float, other_compute: float, noise: float, seed: int
) -> None:
    space = priced(usd)
    space = replace(space, work=replace(space.work, steps=500))
    world = World(noise=noise, other_nodes=8, other_compute=other_compute)
    act = replace(ACT, threshold=1.0, window_seconds=400.0)
    off = replace(act, policy=AdjustPolicy.OFF)
    static, acting = (simulate(space, PLAN, policy, world, seed) for policy in (off, act))
    most = max(usd, USD)
    switching = sum(
        (world.downtime_seconds[c.kind] + 2 * 400.0) * max(c.origin.nodes, c.target.nodes) * most / 3600
        for c in acting.changes
    )
    # a wrong promise is measured for a window, and waits for the cooldown at most
    wrong = sum(c.is_rollback for c in acting.changes) * 800 * 8 * most / 3600
    assert acting.usd <= static.usd * (1 + 2 * noise) + switching + wrong
