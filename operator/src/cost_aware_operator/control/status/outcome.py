"""What a user is told of a reconcile: the status to write, and the events for what has changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.api.conditions import merged
from cost_aware_operator.api.status import JobState, JobStatus
from cost_aware_operator.control.policy.decision import Decision, Outcome
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.status.conditions import condition_rows
from cost_aware_operator.control.status.events import Event, events_of
from cost_aware_operator.control.status.fields import (
    adjustment_status,
    checkpoint_status,
    cost_status,
    efficiency_status,
    goodput_status,
    measured_status,
    plan_status,
    progress_status,
    straggler_status,
)
from cost_aware_operator.control.status.message import message_of

_STATES = {
    Outcome.REJECTED: JobState.REJECTED,
    Outcome.STARTING: JobState.STARTING,
    Outcome.LAUNCHING: JobState.STARTING,
    Outcome.RUNNING: JobState.RUNNING,
    Outcome.RESTARTING: JobState.RESTARTING,
    Outcome.SUSPENDED: JobState.SUSPENDED,
    Outcome.BUDGET_EXHAUSTED: JobState.SUSPENDED,
    Outcome.FINISHING: JobState.RUNNING,
    Outcome.SUCCEEDED: JobState.SUCCEEDED,
    Outcome.FAILED: JobState.FAILED,
}


@dataclass(frozen=True)
class Told:
    """What to write of a reconcile."""

    status: JobStatus
    """The whole status."""
    events: tuple[Event, ...]
    """Events to post after the status is written, one for each condition that has changed."""


def told(reading: Reading, decision: Decision) -> Told:
    """Status and events of a decision."""
    facts, record, plan = reading.facts, decision.record, decision.plan
    old = facts.job.status
    progress = progress_status(reading, decision)
    conditions = merged(old.conditions, condition_rows(reading, decision), facts.job.generation, facts.now)
    status = JobStatus(
        state=_state(decision),
        message=message_of(reading, decision)[:1024],
        observed_generation=facts.job.generation,
        attempt=max(record.attempt, old.attempt),
        start_time=record.started_at,
        completion_time=record.ended_at,
        plan=plan_status(plan, measured_status(reading, decision, plan)) if plan is not None else old.plan,
        adjustments=tuple(map(adjustment_status, record.changes)),
        progress=progress,
        efficiency=efficiency_status(reading, plan) or old.efficiency,
        stragglers=straggler_status(reading) if decision.outcome is Outcome.RUNNING else old.stragglers,
        checkpoint=checkpoint_status(decision),
        goodput=goodput_status(record),
        cost=cost_status(reading, record, progress),
        conditions=conditions,
    )
    return Told(status, events_of(old.conditions, conditions))


def _state(decision: Decision) -> JobState:
    if decision.outcome is Outcome.LAUNCHING and decision.record.attempt > 1:
        return JobState.RESTARTING
    return _STATES[decision.outcome]
