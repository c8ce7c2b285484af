"""What a decision makes of the Indexed Job, found out before anything is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.planning.plan import Plan


@dataclass(frozen=True)
class DeleteJob:
    """The Job goes with its pods; it is made anew when it has gone."""

    uid: str
    """The Job's uid."""


@dataclass(frozen=True)
class MakeJob:
    """Secret, Service and Job are made by a plan."""

    plan: Plan
    """The plan."""


@dataclass(frozen=True)
class SetJob:
    """The Job is suspended, resumed, or gets another number of pods."""

    suspend: bool
    """Whether it shall have no pods."""
    active_deadline_seconds: int | None
    """Seconds that its pods may be active; None for no limit."""
    completions: int | None
    """Number of pods; None where the Job has none."""


Shaping = DeleteJob | MakeJob | SetJob


def shaping_of(facts: Facts, decision: Decision) -> Shaping | None:
    """What to do to the Job; None where it is as it shall be, or where nothing may be touched."""
    child = facts.child
    if decision.keep_off:
        return None
    if child is None:
        return MakeJob(decision.plan) if decision.want_pods and decision.plan is not None else None
    if decision.replace_child:
        return None if child.deleting else DeleteJob(child.uid)
    if child.complete or child.failure is not None or child.deleting or child.held_by:
        # a Job that others have suspended is theirs to resume
        return None
    wanted = SetJob(
        suspend=not decision.want_pods,
        active_deadline_seconds=facts.job.spec.active_deadline_seconds,
        completions=decision.pods if decision.pods is not None else child.completions,
    )
    return wanted if wanted != SetJob(child.suspended, child.active_deadline_seconds, child.completions) else None
