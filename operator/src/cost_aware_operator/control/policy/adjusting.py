"""The adjuster in a reconcile: what it is told of a job, and what its verdict changes in the record. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.adjuster import DynamicParallelismAdjuster
from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.changes import Change, ChangeOutcome, Kind, described, plan_key
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.situation import Action, AdjustSettings, Situation, Verdict, Window
from cost_aware_operator.control.policy.accounting import budget_left_usd, current_samples, paid_hourly_usd
from cost_aware_operator.control.policy.stragglers import free_nodes, slow_node_of, spare_nodes
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.run_record import Considered, Pace, RunRecord
from cost_aware_operator.ledger.blocks import Baseline
from cost_aware_operator.observing.samples import observe
from cost_aware_operator.planning.plan import Plan, PlanInput, adjusting_space
from cost_aware_trainer.contract import LaunchStage, Phase

START_SECONDS = 300.0
"""From the order of a change to its first step; a change that takes longer has failed."""
ROOM_SECONDS = 60.0
"""For pods that are made anew without a slow node to find another; all of them are paid for, and wait."""
MODELLED = (
    Phase.COMPUTE, Phase.OPTIMIZER, Phase.COMMUNICATION, Phase.TENSOR_COMMUNICATION, Phase.PIPELINE_COMMUNICATION,
    Phase.PIPELINE_BUBBLE, Phase.STRAGGLER_WAIT,
)  # fmt: skip
"""What the cost models predict of a step; checkpoints, evaluation and waiting for data go on under every plan."""


def adjusted(facts: Facts, plan: Plan) -> tuple[RunRecord, Verdict | None]:
    """The record after looking at a run that trains: what came of the last change, and whether to begin another."""
    record = _checked(facts)
    facts = replace(facts, record=record)
    situation = situation_of(facts, plan)
    if situation is None:
        return record, None
    record = _paced(record, situation)
    verdict = DynamicParallelismAdjuster().verdict(situation, _recent(facts, situation))
    if verdict.plan is not None and verdict.action in (Action.CHANGE, Action.ROLL_BACK):
        base = record.model_copy(update={"baseline": record.baseline or _baseline(facts, situation)})
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


def _baseline(facts: Facts, situation: Situation) -> Baseline | None:
    """The submitted plan as it is measured, before the first change."""
    config = facts.job.spec.trainer.config
    if situation.window is None or config is None:
        return None
    return Baseline(
        plan=described(situation.plan),
        nodes=situation.plan.nodes,
        step_seconds=situation.window.wall_step_seconds,
        step=config.steps - situation.remaining_steps,
        accrued_usd=facts.record.ledger.accrued_usd,
        pod_seconds=facts.record.ledger.pod_seconds,
    )


def _recent(facts: Facts, situation: Situation) -> Verdict | None:
    """The last search's answer, as long as a window has not passed: what is measured changes slowly, and a search takes time."""
    last = facts.record.considered
    if last is None or (last.attempt, last.generation) != (facts.record.attempt, facts.job.generation):
        return None
    if (facts.now - last.at).total_seconds() >= situation.settings.window_seconds:
        return None
    return Verdict(Action.HOLD, last.reason, last.message)


def situation_of(facts: Facts, plan: Plan) -> Situation | None:
    """What the adjuster looks at; None for a program whose steps are not known."""
    spec, record = facts.job.spec, facts.record
    lead = max((s for s in current_samples(facts) if s.total_steps > 0), key=lambda s: s.step, default=None)
    if spec.trainer.config is None or lead is None:
        return None
    return Situation(
        now=facts.now,
        settings=settings_of(facts),
        plan=plan,
        space=adjusting_space(PlanInput(spec, facts.prices, facts.defaults.resources)),
        window=window_of(facts),
        remaining_steps=lead.total_steps - lead.step,
        hourly_usd=paid_hourly_usd(facts),
        changes=record.changes,
        barred=frozenset(record.barred),
        deadline_left_seconds=deadline_left(facts),
        budget_left_usd=budget_left_usd(facts),
        slow=slow_node_of(facts, plan),
        spare_nodes=spare_nodes(facts, plan),
        free_nodes=free_nodes(facts, plan),
    )


def deadline_left(facts: Facts) -> float | None:
    """Seconds until the run shall be done; None without a deadline."""
    seconds, started = facts.job.spec.deadline_seconds, facts.record.started_at
    return None if seconds is None or started is None else seconds - (facts.now - started).total_seconds()


def settings_of(facts: Facts) -> AdjustSettings:
    """What the manifest says of adjusting."""
    given = facts.job.spec.efficiency
    window, cooldown = float(given.window_seconds), float(given.cooldown_seconds)
    return AdjustSettings(given.policy, given.threshold, window, cooldown, given.minimum_savings_usd)


def window_of(facts: Facts) -> Window | None:
    """What the newest attempt's ranks did over the scrapes that are kept."""
    seen = observe(facts.scrapes)
    if seen is None or seen.attempt != facts.record.attempt or seen.steps_per_second <= 0 or not seen.rank_step_seconds:
        return None
    if facts.order is not None and seen.ranks < facts.order.nodes * facts.order.ranks_per_node:
        # what the others say of a run in which one is silent, or lies, is no ground for a decision
        return None
    parts = seen.rank_step_seconds
    modelled = sum(parts.get(phase, 0.0) for phase in MODELLED)
    working = parts.get(Phase.COMPUTE, 0.0) + parts.get(Phase.OPTIMIZER, 0.0)
    if working <= 0:
        return None
    measured = Measured(modelled, working, seen.network_bytes_per_second)
    return Window(seen.seconds, seen.steps, seen.efficiency, 1 / seen.steps_per_second, measured)


def _checked(facts: Facts) -> RunRecord:
    """Notes the first step under a change that was ordered."""
    record = facts.record
    last = record.changes[-1] if record.changes else None
    if last is None or record.attempt < last.attempt:
        return record
    stepped = [s for s in current_samples(facts) if s.attempt == record.attempt and s.steps > 0]
    if not stepped:
        return record
    # ranks do not wait for each other in all of them: the longest is what the run has waited for
    stages = {s.value: max(one.stage_seconds.get(s, 0.0) for one in stepped) for s in LaunchStage}
    told = {stage: round(seconds, 3) for stage, seconds in stages.items() if seconds > 0}
    return _with(record, history_of(record).resumed(facts.now, told))


def complete(facts: Facts) -> RunRecord:
    """The record of a run that is done, with what came of its newest change, for which no order may have been given yet."""
    last = under_way(facts.record)
    if last is not None and facts.record.attempt < last.attempt:
        return failed_change(facts, "the run was complete before it") or facts.record
    return _with(facts.record, history_of(facts.record).complete(facts.now, paid_hourly_usd(facts)))


def failed_change(facts: Facts, why: str) -> RunRecord | None:
    """The record that goes back to the plan before a change that did not start; None if none is under way."""
    back = history_of(facts.record).failed(why)
    return None if back is None else _with(facts.record, back[0]).model_copy(update={"plan": back[1]})


def history_of(record: RunRecord) -> History:
    """The record's changes as a value."""
    return History(record.changes, record.barred)


def _with(record: RunRecord, history: History) -> RunRecord:
    if (history.changes, history.barred) == (record.changes, record.barred):
        return record
    return record.model_copy(update={"changes": history.changes, "barred": history.barred})


def under_way(record: RunRecord) -> Change | None:
    """The change that was ordered and under which no step is done yet."""
    last = record.changes[-1] if record.changes else None
    return last if last is not None and last.outcome is ChangeOutcome.IN_PROGRESS else None


def why_given_up(facts: Facts) -> str:
    """Why a change that was ordered does not come about; empty while it may."""
    last = under_way(facts.record)
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
