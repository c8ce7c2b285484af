"""Jobs that this operator cannot read: what to tell their owners, without touching anything else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ValidationError

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.api.status import Condition, ConditionStatus, ConditionType, JobState, JobStatus
from cost_aware_operator.control.reading.unreadable_record import UNTIL_THEN, problems_of
from cost_aware_operator.control.status.events import Event

MOST_NAMED = 3
"""Fields that a message names."""


@dataclass(frozen=True)
class Unreadable:
    """What to write about a job: its whole status, and an event where the condition is new."""

    status: Mapping[str, Any]
    """The whole status document."""
    events: tuple[Event, ...]
    """One event where the condition is new."""


def why_unreadable(document: Mapping[str, Any]) -> str:
    """Which fields of a job's document this operator cannot read, and what to do about it."""
    manifest, status = _unfit(JobSpec, document, "spec"), _unfit(JobStatus, document, "status")
    advice = []
    if manifest:
        advice.append(
            "The CustomResourceDefinition in the cluster is of another version than this operator: upgrade the older of the two, or "
            "correct the manifest"
        )
    if status:
        advice.append(
            "A newer operator has written the status: upgrade this one, or take the field out with kubectl patch --subresource=status"
        )
    found = [*manifest, *status]
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    if not found:
        return f"The manifest cannot be read: write it again with kubectl apply. {UNTIL_THEN}"
    return f"{'; '.join(found[:MOST_NAMED])}{more}. {'. '.join(advice)}. {UNTIL_THEN}"


def told_unreadable(document: Mapping[str, Any], reason: str, message: str, now: datetime) -> Unreadable | None:
    """The status with the condition Planned=False in it; None where it says so already.

    The status is taken as it is, since a field that is left out of it would be removed, and may itself be unreadable.
    """
    old = document.get("status") or {}
    generation = document["metadata"].get("generation", 0)
    conditions = old.get("conditions")
    kept = [c for c in conditions if isinstance(c, Mapping) and "type" in c] if isinstance(conditions, list) else []
    before = next((c for c in kept if c["type"] == ConditionType.PLANNED), {})
    planned = Condition(
        type=ConditionType.PLANNED,
        status=ConditionStatus.FALSE,
        reason=reason,
        message=message[:4096],
        last_transition_time=now,
        observed_generation=generation,
    ).to_document()
    if before.get("status") == ConditionStatus.FALSE and "lastTransitionTime" in before:
        planned["lastTransitionTime"] = before["lastTransitionTime"]
    status = {
        **old,
        "state": JobState.REJECTED.value,
        "message": message[:1024],
        "observedGeneration": generation,
        "conditions": [planned if c is before else c for c in kept] + ([] if before else [planned]),
    }
    if status == old:
        return None
    known = (before.get("status"), before.get("reason")) == (ConditionStatus.FALSE, reason)
    event = Event(
        ConditionType.PLANNED, True, reason, f"{ConditionType.PLANNED.value}={ConditionStatus.FALSE.value}: {message}"
    )
    return Unreadable(status, () if known else (event,))


def _unfit(model: type[BaseModel], document: Mapping[str, Any], field: str) -> list[str]:
    try:
        model.model_validate(document.get(field) or {})
    except ValidationError as error:
        return problems_of(error, field)
    return []
