"""Setting and reading conditions, with transition times that change only when the status does."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from cost_aware_operator.api.status import Condition, ConditionStatus, ConditionType


def find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    """The condition of a type, if it is set."""
    return next((c for c in conditions if c.type is kind), None)


def is_true(conditions: Iterable[Condition], kind: ConditionType) -> bool:
    """Whether a condition is set and True."""
    condition = find(conditions, kind)
    return condition is not None and condition.status is ConditionStatus.TRUE


def merged(
    old: Iterable[Condition],
    new: Iterable[tuple[ConditionType, ConditionStatus, str, str]],
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """The new conditions over the old ones, ordered by type; an unchanged status keeps its transition time."""
    result = {c.type: c for c in old}
    for kind, status, reason, message in new:
        before = result.get(kind)
        since = before.last_transition_time if before is not None and before.status is status else now
        result[kind] = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message[:4096],
            last_transition_time=since,
            observed_generation=generation,
        )
    return tuple(result[kind] for kind in ConditionType if kind in result)
