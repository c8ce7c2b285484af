"""What one reconcile wants done, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.api.status import JobStatus
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan
from cost_aware_trainer.contract import RunOrder, RunResult


@dataclass(frozen=True)
class Event:
    """A Kubernetes event to post after the status is written."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """The acts of one reconcile, in the order in which they are done.

    The record is saved before Job and pods are touched and agents are told anything, the status is written once after all acts, events
    are posted last.
    `pods` is how many the Job shall have; None leaves it as it is. With `keep_off`, something else has the name of a child, and
    nothing but the status is written.
    """

    record: RunRecord
    order: RunOrder | None
    result: RunResult | None
    status: JobStatus
    plan: Plan | None = None
    want_pods: bool = False
    pods: int | None = None
    replace_child: bool = False
    tell: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    evict: tuple[str, ...] = ()
    delete_job: bool = False
    events: tuple[Event, ...] = ()
    urgent: bool = False
    keep_off: bool = False
    requeue_seconds: float | None = None
