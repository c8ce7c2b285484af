"""Events of a reconcile: one for each condition whose status or reason has changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.status import Condition, ConditionStatus, ConditionType

_BAD_WHEN_TRUE = (
    ConditionType.BUDGET_EXHAUSTED,
    ConditionType.FAILED,
    ConditionType.STRAGGLING,
    ConditionType.DISRUPTED,
)
_BAD_WHEN_FALSE = (
    ConditionType.PLANNED,
    ConditionType.PRICE_KNOWN,
    ConditionType.EFFICIENT,
    ConditionType.OBSERVED,
    ConditionType.BOOKED,
)


@dataclass(frozen=True)
class Event:
    """A Kubernetes event to post after the status is written."""

    condition: ConditionType
    """The condition that it is about."""
    warning: bool
    """Whether its type is Warning; Normal otherwise."""
    reason: str
    """One CamelCase word."""
    message: str
    """The condition with its status, and what it says."""


def events_of(old: tuple[Condition, ...], new: tuple[Condition, ...]) -> tuple[Event, ...]:
    """One event for each condition whose status or reason is another than before."""
    events = []
    for condition in new:
        before = find(old, condition.type)
        if before is not None and (before.status, before.reason) == (condition.status, condition.reason):
            continue
        if condition.status is ConditionStatus.UNKNOWN:
            continue
        holds = condition.status is ConditionStatus.TRUE
        warning = (holds and condition.type in _BAD_WHEN_TRUE) or (not holds and condition.type in _BAD_WHEN_FALSE)
        warning = warning or condition.reason in ("ImagePullFailing", "NearlySpent")
        message = f"{condition.type.value}={condition.status.value}: {condition.message}"
        events.append(Event(condition.type, warning, condition.reason, message))
    return tuple(events)
