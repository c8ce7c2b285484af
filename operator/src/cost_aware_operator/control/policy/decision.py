"""What one reconcile wants done, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cost_aware_operator.adjusting.situation import Verdict
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan
from cost_aware_trainer.contract import RunOrder, RunResult

SUSPENDED_BY_ANOTHER = "SuspendedByAnother"
"""The reason of a run whose Job was suspended by others than its owner and its budget."""


class Outcome(StrEnum):
    """What a job is doing, as decided; the value is the reason of the condition Running."""

    REJECTED = "Rejected"
    STARTING = "Starting"
    LAUNCHING = "Launching"
    RUNNING = "Training"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    FINISHING = "Finishing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True)
class Decision:
    """The acts of one reconcile, in the order in which they are done.

    The record is saved before agents are told anything, the status is written once after all acts, events are posted last.
    """

    record: RunRecord
    """What is stored before anything is done."""
    order: RunOrder | None
    """The newest attempt's order."""
    result: RunResult | None
    """What a complete run came to."""
    outcome: Outcome
    """What the job is doing."""
    plan: Plan | None = None
    """The plan it does it by."""
    reason: str = ""
    """One CamelCase word from whoever found the outcome."""
    message: str = ""
    """A sentence from whoever found the outcome."""
    verdict: Verdict | None = None
    """What the adjuster says, if it was asked."""
    want_pods: bool = False
    """Whether the Job shall have pods; it is suspended otherwise."""
    pods: int | None = None
    """How many pods the Job shall have; None leaves it as it is."""
    replace_child: bool = False
    """Whether the Job is deleted, to be made anew."""
    tell: tuple[str, ...] = ()
    """Uids of pods whose agents are told the order."""
    release: tuple[str, ...] = ()
    """Uids of pods whose agents may end."""
    evict: tuple[str, ...] = ()
    """Uids of pods that are moved off their nodes."""
    delete_job: bool = False
    """Whether the finished job itself is deleted."""
    urgent: bool = False
    """Whether the record must be saved now."""
    keep_off: bool = False
    """Whether something else has the name of a child: then nothing but the status is written."""
    requeue_seconds: float | None = None
    """Seconds after which to look again; None waits for an event."""
