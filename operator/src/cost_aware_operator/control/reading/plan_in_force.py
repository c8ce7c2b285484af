"""Which plan a job runs by: the stored one while it holds, else a new one, or why there is none. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.changes import under_way
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.planning.plan import Plan, PlanInput, Refusal, make_plan, planning_key, repriced


def plan_in_force(facts: Facts, given: PlanInput) -> Plan | Refusal:
    """The stored plan while pods run by it or the manifest still asks for what it answers; else a new one.

    So neither an upgrade of the operator nor a new price moves a running job; only its manifest does.
    """
    spec, record, child = facts.job.spec, facts.record, facts.child
    is_as_planned = record.planned_for == planning_key(spec)
    # while pods are made anew, the Job is suspended or away for a moment
    is_changing = under_way(record.changes) is not None and not spec.suspend and is_as_planned
    runs = (child is not None and not child.suspended) or is_changing
    if record.plan is not None and (runs or record.ended_at is not None):
        return repriced(record.plan, given)
    answer = make_plan(given)
    if not isinstance(answer, Plan) or record.plan is None:
        return answer
    if is_as_planned:
        return repriced(record.plan, given)
    # a slow node that was left stays left, whatever else is asked for
    return replace(answer, excluded_nodes=record.plan.excluded_nodes)
