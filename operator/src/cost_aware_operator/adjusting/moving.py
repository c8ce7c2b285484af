"""Leaving a node that is slow: whether it pays to make the pods anew without it, on another node or on fewer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_aware_operator.adjusting.candidates import LEAST_MARGIN, downtime_seconds, in_force, prediction_error, ranked
from cost_aware_operator.adjusting.changes import Kind, described, move_key
from cost_aware_operator.adjusting.situation import (
    Action,
    MeasuredSituation,
    SlowNode,
    Verdict,
    hold,
    wants_time,
)
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.planning.plan import Plan, plan_of

FEWER = 50
"""Number of plans on fewer nodes that are looked at."""


@dataclass(frozen=True)
class _Option:
    """A way to leave a slow node."""

    plan: Plan
    """The plan without the node."""
    step_usd: float
    """Dollars of one of its steps."""
    saved_usd: float
    """Dollars saved over the rest of the run, the cost of the change taken off."""
    paid_usd: float
    """Dollars that the change itself costs."""


def slow_node(given: MeasuredSituation, *, search: bool = True) -> Verdict | None:
    """Whether to leave the node that holds the others up; None where there is none.

    With another node to go to, the dollars decide alone. Without one, plans on fewer nodes are looked at as all other plans are: while
    efficiency is under the threshold, and only if a `search` is wanted now.
    """
    slow = given.slow
    if slow is None:
        return None
    if move_key(slow.name) in given.barred:
        return hold("MoveBarred", f"{_named(slow)}; leaving it was tried and did not work")
    if given.changes:
        passed = (given.now - given.changes[-1].at).total_seconds()
        if passed < given.settings.cooldown_seconds:
            return hold("CoolingDown", f"{_named(slow)}; the last change is only {passed:.0f} s ago")
    best = _elsewhere(given, slow) or (_fewer(given, slow) if search else None)
    if best is None:
        return hold(
            "NoSpareNode", f"{_named(slow)}; {_no_room(given)}, and no plan on fewer nodes is within the bounds"
        )
    return _worth(given, slow, best)


def _named(slow: SlowNode) -> str:
    ranks = f"rank{'' if len(slow.ranks) == 1 else 's'} {', '.join(map(str, slow.ranks))}"
    return (
        f"node {slow.name} is slow: {ranks} there compute{'s' if len(slow.ranks) == 1 else ''} "
        f"{slow.working_seconds:.3g} s a step, {slow.slowdown:.2f} times the {slow.peers_seconds:.3g} s of their peers"
    )


def _no_room(given: MeasuredSituation) -> str:
    return "nodes may not be listed" if given.spare_nodes is None else "no other node could take the pod"


def _without(plan: Plan, slow: SlowNode) -> Plan:
    return replace(plan, excluded_nodes=(*plan.excluded_nodes, slow.name))


def _gained(slow: SlowNode) -> float:
    """Seconds of a step that are waited for the slow node and for no other rank.

    With a pipeline the slow rank's micro-batches are on the step's critical path one after the other, so the same holds.
    """
    return max(0.0, slow.working_seconds - max(slow.rest_seconds, slow.peers_seconds))


def _option(given: MeasuredSituation, plan: Plan, seconds: float) -> _Option:
    node_usd_a_second = given.node_hourly_usd / 3600
    step_usd = seconds * plan.nodes * node_usd_a_second
    paid_usd = downtime_seconds(given.changes, Kind.MOVE) * max(plan.nodes, given.plan.nodes) * node_usd_a_second
    return _Option(plan, step_usd, given.remaining_steps * (given.step_usd - step_usd) - paid_usd, paid_usd)


def _elsewhere(given: MeasuredSituation, slow: SlowNode) -> _Option | None:
    """The plan in force with another node in place of the slow one."""
    if not given.spare_nodes:
        return None
    seconds = given.window.wall_step_seconds - _gained(slow)
    return _option(given, _without(given.plan, slow), seconds)


def _fewer(given: MeasuredSituation, slow: SlowNode) -> _Option | None:
    """The plan on fewer nodes that saves most, predicted for nodes as fast as the slow one's peers."""
    window = given.window
    if given.plan.nodes == 1 or window.efficiency >= given.settings.threshold:
        return None
    gained = _gained(slow)
    others = replace(
        window.measured,
        step_seconds=window.measured.step_seconds - gained,
        working_seconds=slow.working_seconds - gained,
    )
    known = in_force(given, others)
    ranking = ranked(given, known.offer) if known is not None else None
    if ranking is None:
        return None
    overhead = given.overhead_seconds
    rows = [row for row in range(len(ranking.columns)) if int(ranking.columns.nodes[row]) < given.plan.nodes][:FEWER]
    options = [
        _option(
            given,
            _without(plan_of(given.plan, ranking, row), slow),
            float(ranking.columns.step_seconds[row]) + overhead,
        )
        for row in rows
        if not _misses(given, float(ranking.columns.step_seconds[row]) + overhead)
    ]
    return max(options, key=lambda o: o.saved_usd, default=None)


def _misses(given: MeasuredSituation, seconds: float) -> bool:
    """Whether a deadline that is kept now, or could be, would be missed; or a step takes longer where time is the objective."""
    if wants_time(given) and seconds > given.window.wall_step_seconds:
        return True
    left = given.deadline_left_seconds
    return left is not None and given.remaining_steps * seconds + downtime_seconds(given.changes, Kind.MOVE) > left


def _worth(given: MeasuredSituation, slow: SlowNode, best: _Option) -> Verdict:
    """The break-even gate."""
    now_usd = given.step_usd
    margin = max(LEAST_MARGIN, prediction_error(given.changes))
    sums = (
        f"{given.remaining_steps:,} steps x (${now_usd:.3g} - ${best.step_usd:.3g}) - ${best.paid_usd:.3g} for the change "
        f"= ${best.saved_usd:.3g}"
    )
    enough = best.step_usd <= now_usd * (1 - margin) and best.saved_usd > given.settings.minimum_savings_usd
    if not (enough or (given.is_late and best.plan.nodes == given.plan.nodes)):
        least = f"must exceed ${given.settings.minimum_savings_usd:.3g}, with {margin:.0%} off each step"
        if not given.spare_nodes:
            return hold("NoSpareNode", f"{_named(slow)}; {_no_room(given)}, and fewer do not pay: {sums}, and {least}")
        return hold("NotWorthIt", f"{_named(slow)}; leaving it would not pay for the change: {sums}, and {least}")
    message = f"{_named(slow)}; {described(best.plan)} saves: {sums}"
    action = Action.CHANGE if given.settings.policy is AdjustPolicy.ACT else Action.RECOMMEND
    return Verdict(action, Kind.MOVE.value, message, best.plan, best.step_usd, best.saved_usd)
