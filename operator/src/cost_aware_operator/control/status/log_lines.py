"""What an on-call person reads of a job: a line for each attempt, plan, change, refusal and end, and none for a reconcile. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_aware_operator.adjusting.changes import Change, described_from
from cost_aware_operator.api.status import ConditionType
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.control.status.events import Event
from cost_aware_operator.planning.plan import Plan

UNLOGGED = (ConditionType.RUNNING, ConditionType.EFFICIENT)
"""Conditions whose events are not logged: attempts tell the first, decisions of the adjuster the second."""


@dataclass(frozen=True)
class LogLine:
    """One line of the log."""

    message: str
    """What happened, in a sentence."""
    warning: bool = False
    """Whether somebody should look at it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Figures by name, units in the names."""


def log_lines(before: RunRecord, decision: Decision, events: tuple[Event, ...]) -> Iterator[LogLine]:
    """The lines of one reconcile: what the record did not say before, and the events that are news."""
    record = decision.record
    if record.attempt > before.attempt and decision.plan is not None:
        yield _attempt(record, decision.plan, decision.message)
    if record.planned_for != before.planned_for and record.plan is not None:
        yield LogLine(f"planned: {record.plan.explanation}", fields=_figures(record.plan))
    known = {(c.attempt, c.at): c for c in before.changes}
    for change in record.changes:
        old = known.get((change.attempt, change.at))
        if old is None or old.outcome is not change.outcome:
            yield _change(change)
    for event in events:
        if event.condition not in UNLOGGED:
            yield LogLine(event.message, event.warning, {"reason": event.reason})


def _attempt(record: RunRecord, plan: Plan, why: str) -> LogLine:
    text = f"attempt {record.attempt} begins as {plan.data}x{plan.tensor}x{plan.pipeline} on {plan.nodes} nodes: {why}"
    return LogLine(text, fields={"attempt": record.attempt, "from_step": record.newest_checkpoint, **_figures(plan)})


def _figures(plan: Plan) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "data": plan.data,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "nodes": plan.nodes,
        "hourly_usd": plan.hourly_usd,
    }
    if plan.predicted is not None:
        figures |= {"predicted_step_seconds": plan.predicted.step_seconds, "predicted_usd": plan.predicted.total_usd}
    return figures


def _change(change: Change) -> LogLine:
    text = (
        f"change {change.kind} from {described_from(change.origin, change.target)} to "
        f"{described_from(change.target, change.origin)}: {change.outcome}: {change.reason}"
    )
    figures = {
        "attempt": change.attempt,
        "kind": change.kind.value,
        "outcome": change.outcome.value,
        "before_step_usd": change.before_step_usd,
        "predicted_step_usd": change.predicted_step_usd,
        "realised_step_usd": change.realised_step_usd,
        "predicted_savings_usd": change.predicted_savings_usd,
        "realised_savings_usd": change.realised_savings_usd,
        "downtime_seconds": change.downtime_seconds,
    }
    return LogLine(text, fields={name: value for name, value in figures.items() if value is not None})
