"""Nodes that are gone, in a reconcile: which pods wait for one, what that costs, and the record of going on without. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.capacity import Shortage, without_nodes
from cost_aware_operator.adjusting.changes import plan_key
from cost_aware_operator.adjusting.situation import Action, Situation, Verdict, Window
from cost_aware_operator.control.policy.accounting import price_of
from cost_aware_operator.control.policy.adjusting import begun, deadline_left, settings_of, under_way
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan, PlanInput, adjusting_space


def shortage_of(facts: Facts, plan: Plan) -> Shortage | None:
    """Pods of a run that has trained and cannot go on, as the scheduler has no node for them; None where there are none."""
    if facts.record.attempt == 0 or facts.job.spec.trainer.config is None or under_way(facts.record) is not None:
        return None
    alive = [p for p in facts.pods if p.ended_at is None and not p.deleting and p.index < plan.nodes]
    waiting = sorted((p for p in alive if p.node is None), key=lambda p: p.index)
    if not waiting:
        return None
    prices = [price_of(facts, p) for p in alive if p.node is not None]
    known = [p.hourly_usd for p in prices if p is not None]
    return Shortage(
        pods=tuple(p.name for p in waiting),
        seconds=max((facts.now - p.created_at).total_seconds() for p in waiting),
        held=len(prices),
        hourly_usd=sum(known) if known and len(known) == len(prices) else None,
    )


def gone_on_without(facts: Facts, plan: Plan) -> tuple[RunRecord, Verdict | None]:
    """The record of a run that lacks nodes, with a change to fewer where that is due, and why or why not."""
    short, config, window = shortage_of(facts, plan), facts.job.spec.trainer.config, _usual(facts, plan)
    if short is None or config is None or window is None:
        return facts.record, None
    situation = Situation(
        now=facts.now,
        settings=settings_of(facts),
        plan=plan,
        space=adjusting_space(PlanInput(facts.job.spec, facts.prices, facts.defaults.resources)),
        window=window,
        remaining_steps=max(0, config.steps - facts.record.newest_checkpoint),
        # of the plan when it is whole
        hourly_usd=short.hourly_usd / short.held * plan.nodes if short.hourly_usd and short.held else None,
        changes=facts.record.changes,
        barred=frozenset(facts.record.barred),
        deadline_left_seconds=deadline_left(facts),
    )
    verdict = without_nodes(situation, short)
    return (begun(facts.record, situation, verdict) if verdict.action is Action.CHANGE else facts.record), verdict


def _usual(facts: Facts, plan: Plan) -> Window | None:
    """What the ranks did under this plan while they could, else what was predicted. No seconds long: nothing is judged by it."""
    pace = facts.record.pace
    if pace is not None and pace.plan == plan_key(plan):
        return replace(pace.window, seconds=0.0)
    if plan.predicted is None:
        return None
    seconds, efficiency = plan.predicted.step_seconds, plan.predicted.efficiency
    return Window(0.0, 0.0, efficiency, seconds, Measured(seconds, seconds * efficiency))
