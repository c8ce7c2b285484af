"""The adjuster in a reconcile: what it is told of a job, and what its verdict changes in the record. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.adjuster import DynamicParallelismAdjuster
from cost_aware_operator.adjusting.changes import Kind, described, plan_key, under_way
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.situation import Action, AdjustSettings, Situation, Verdict
from cost_aware_operator.control.policy.accounting import budget_left_usd
from cost_aware_operator.control.policy.stragglers import free_nodes, slow_node_of, spare_nodes
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import Considered, Pace, RunRecord
from cost_aware_operator.ledger.blocks import Baseline
from cost_aware_operator.planning.plan import Plan
from cost_aware_trainer.contract import LaunchStage

START_SECONDS = 300.0
"""From the order of a change to its first step; a change that takes longer has failed."""
ROOM_SECONDS = 60.0
"""For pods that are made anew without a slow node to find another; all of them are paid for, and wait."""


def adjusted(reading: Reading, record: RunRecord, plan: Plan) -> tuple[RunRecord, Verdict | None]:
    """The record of a run that trains, with what came of the last change and a new one if that is due; and why or why not."""
    facts = reading.facts
    record = _resumed(reading, record)
    situation = situation_of(reading, record, plan)
    if situation is None:
        return record, None
    record = _paced(record, situation)
    verdict = DynamicParallelismAdjuster().verdict(situation, _recent(facts, record, situation))
    if verdict.plan is not None and verdict.action in (Action.CHANGE, Action.ROLL_BACK):
        base = record.model_copy(update={"baseline": record.baseline or _baseline(facts, record, situation)})
        return begun(base, situation, verdict), verdict
    record = _with(record, history_of(record).judged(situation))
    if verdict.searched:
        considered = Considered(
            attempt=record.attempt,
            generation=facts.job.generation,
            at=facts.now,
            reason=verdict.reason,
            message=verdict.message,
        )
        record = record.model_copy(update={"considered": considered})
    return record, verdict


def begun(record: RunRecord, situation: Situation, verdict: Verdict) -> RunRecord:
    """The record with a change that a verdict orders.

    Raises:
        ValueError: the verdict orders nothing.
    """
    history = history_of(record).begun(situation, verdict, record.attempt + 1)
    return _with(record, history).model_copy(
        update={"plan": replace(history.changes[-1].target, explanation=verdict.message)}
    )


def _paced(record: RunRecord, situation: Situation) -> RunRecord:
    window = situation.window
    if window is None or window.seconds < situation.settings.window_seconds:
        return record
    return record.model_copy(update={"pace": Pace(plan=plan_key(situation.plan), window=window)})


def _baseline(facts: Facts, record: RunRecord, situation: Situation) -> Baseline | None:
    """The submitted plan as it is measured, before the first change."""
    config = facts.job.spec.trainer.config
    if situation.window is None or config is None:
        return None
    return Baseline(
        plan=described(situation.plan),
        nodes=situation.plan.nodes,
        step_seconds=situation.window.wall_step_seconds,
        step=config.steps - situation.remaining_steps,
        accrued_usd=record.ledger.accrued_usd,
        pod_seconds=record.ledger.pod_seconds,
    )


def _recent(facts: Facts, record: RunRecord, situation: Situation) -> Verdict | None:
    """The last search's answer, as long as a window has not passed: what is measured changes slowly, and a search takes time."""
    last = record.considered
    if last is None or (last.attempt, last.generation) != (record.attempt, facts.job.generation):
        return None
    if (facts.now - last.at).total_seconds() >= situation.settings.window_seconds:
        return None
    return Verdict(Action.HOLD, last.reason, last.message)


def situation_of(reading: Reading, record: RunRecord, plan: Plan) -> Situation | None:
    """The situation that the adjuster judges; None for a program whose steps are not known."""
    facts = reading.facts
    lead = max((s for s in reading.samples if s.total_steps > 0), key=lambda s: s.step, default=None)
    if facts.job.spec.trainer.config is None or lead is None:
        return None
    return Situation(
        now=facts.now,
        settings=settings_of(facts),
        plan=plan,
        space=reading.space,
        window=reading.window,
        remaining_steps=lead.total_steps - lead.step,
        hourly_usd=reading.hourly_usd or None,
        changes=record.changes,
        barred=frozenset(record.barred),
        deadline_left_seconds=deadline_left(facts, record),
        budget_left_usd=budget_left_usd(reading, record),
        slow=slow_node_of(reading, plan),
        spare_nodes=spare_nodes(facts, plan),
        free_nodes=free_nodes(facts, plan),
    )


def deadline_left(facts: Facts, record: RunRecord) -> float | None:
    """Seconds until the run shall be done; None without a deadline."""
    seconds, started = facts.job.spec.deadline_seconds, record.started_at
    return None if seconds is None or started is None else seconds - (facts.now - started).total_seconds()


def settings_of(facts: Facts) -> AdjustSettings:
    """The adjuster's settings in the manifest."""
    given = facts.job.spec.efficiency
    window, cooldown = float(given.window_seconds), float(given.cooldown_seconds)
    return AdjustSettings(given.policy, given.threshold, window, cooldown, given.minimum_savings_usd)


def _resumed(reading: Reading, record: RunRecord) -> RunRecord:
    """The record with the first step noted under a change that was ordered."""
    last = record.changes[-1] if record.changes else None
    if last is None or record.attempt < last.attempt:
        return record
    stepped = [s for s in reading.samples_of(record.attempt) if s.steps > 0]
    if not stepped:
        return record
    # ranks do not wait for each other in all of them: the longest is what the run has waited for
    stages = {s.value: max(one.stage_seconds.get(s, 0.0) for one in stepped) for s in LaunchStage}
    told = {stage: round(seconds, 3) for stage, seconds in stages.items() if seconds > 0}
    return _with(record, history_of(record).resumed(reading.facts.now, told))


def complete(reading: Reading, record: RunRecord) -> RunRecord:
    """The record of a run that is done, with what came of its newest change, for which no order may have been given yet."""
    last = under_way(record.changes)
    if last is not None and record.attempt < last.attempt:
        return failed_change(record, "the run was complete before it") or record
    return _with(record, history_of(record).complete(reading.facts.now, reading.hourly_usd or None))


def failed_change(record: RunRecord, why: str) -> RunRecord | None:
    """The record that goes back to the plan before a change that did not start; None if none is under way."""
    back = history_of(record).failed(why)
    return None if back is None else _with(record, back[0]).model_copy(update={"plan": back[1]})


def history_of(record: RunRecord) -> History:
    """The record's changes as a value."""
    return History(record.changes, record.barred)


def _with(record: RunRecord, history: History) -> RunRecord:
    if (history.changes, history.barred) == (record.changes, record.barred):
        return record
    return record.model_copy(update={"changes": history.changes, "barred": history.barred})


def why_given_up(facts: Facts, record: RunRecord) -> str:
    """Why a change that was ordered does not come about; empty while it may."""
    last = under_way(record.changes)
    if last is None:
        return ""
    if (facts.now - last.at).total_seconds() > START_SECONDS:
        return f"no step within {START_SECONDS:.0f} s"
    waiting = [
        p
        for p in facts.pods
        if last.kind is Kind.MOVE and p.node is None and (facts.now - p.created_at).total_seconds() > ROOM_SECONDS
    ]
    return f"pod {waiting[0].name} found no node within {ROOM_SECONDS:.0f} s: {waiting[0].problem}" if waiting else ""
