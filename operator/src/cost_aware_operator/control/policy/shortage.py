"""Nodes that are gone, in a reconcile: which pods wait for one, what that costs, and the record of going on without. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.capacity import Shortage, without_nodes
from cost_aware_operator.adjusting.changes import plan_key, under_way
from cost_aware_operator.adjusting.situation import Action, Situation, Verdict, Window
from cost_aware_operator.control.policy.adjusting import begun, deadline_left, settings_of
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan


def shortage_of(reading: Reading, record: RunRecord, plan: Plan) -> Shortage | None:
    """Pods of a run that has trained and cannot go on, as the scheduler has no node for them; None where there are none."""
    facts = reading.facts
    if record.attempt == 0 or facts.job.spec.trainer.config is None or under_way(record.changes) is not None:
        return None
    alive = [p for p in facts.pods if p.ended_at is None and not p.deleting and p.index < plan.nodes]
    waiting = sorted((p for p in alive if p.node is None), key=lambda p: p.index)
    if not waiting:
        return None
    held = tuple(p for p in alive if p.node is not None)
    return Shortage(
        pods=tuple(p.name for p in waiting),
        seconds=max((facts.now - p.created_at).total_seconds() for p in waiting),
        held=len(held),
        hourly_usd=reading.hourly_usd_of(held) if held else None,
    )


def gone_on_without(reading: Reading, record: RunRecord, plan: Plan) -> tuple[RunRecord, Verdict | None]:
    """The record of a run that lacks nodes, with a change to fewer where that is due, and why or why not."""
    facts = reading.facts
    short, config, window = shortage_of(reading, record, plan), facts.job.spec.trainer.config, _usual(record, plan)
    if short is None or config is None or window is None:
        return record, None
    situation = Situation(
        now=facts.now,
        settings=settings_of(facts),
        plan=plan,
        space=reading.space,
        window=window,
        remaining_steps=max(0, config.steps - record.newest_checkpoint),
        # of the plan when it is whole
        hourly_usd=short.hourly_usd / short.held * plan.nodes if short.hourly_usd and short.held else None,
        changes=record.changes,
        barred=frozenset(record.barred),
        deadline_left_seconds=deadline_left(facts, record),
    )
    verdict = without_nodes(situation, short)
    return (begun(record, situation, verdict) if verdict.action is Action.CHANGE else record), verdict


def _usual(record: RunRecord, plan: Plan) -> Window | None:
    """What the ranks did under this plan while they could, else what was predicted. No seconds long: nothing is judged by it."""
    pace = record.pace
    if pace is not None and pace.plan == plan_key(plan):
        return replace(pace.window, seconds=0.0)
    if plan.predicted is None:
        return None
    seconds, efficiency = plan.predicted.step_seconds, plan.predicted.efficiency
    return Window(0.0, 0.0, efficiency, seconds, Measured(seconds, seconds * efficiency))
