"""Nodes that come and go: on with fewer once the wait for others has cost as much, and back when there are others again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_aware_operator.adjusting.candidates import (
    CANDIDATES,
    LEAST_MARGIN,
    downtime_seconds,
    in_force,
    ranked,
)
from cost_aware_operator.adjusting.changes import Change, ChangeOutcome, Kind, described, plan_key
from cost_aware_operator.adjusting.situation import (
    Action,
    MeasuredSituation,
    Situation,
    Verdict,
    affordable,
    hold,
    measured_of,
    wants_time,
)
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.planning.plan import Plan, plan_of

LEAST_WAIT_SECONDS = 30.0
"""A scheduler takes moments for a pod even where there is room; however little a change costs, these are waited for."""
UNDONE = (ChangeOutcome.FAILED, ChangeOutcome.ROLLED_BACK)


@dataclass(frozen=True)
class Shortage:
    """Pods that have found no node, so that the others are paid for and cannot train."""

    pods: tuple[str, ...]
    """Names of the pods that wait."""
    seconds: float
    """Seconds that the oldest of them has waited."""
    held: int
    """Number of pods that have a node."""
    hourly_usd: float | None
    """Dollars an hour of those nodes together; None if a price is unknown."""


def without_nodes(given: Situation, short: Shortage) -> Verdict:
    """Whether to go on with the nodes that are left.

    Nobody knows how long others take to come. If the run goes on with fewer once the wait has cost as much as the change does, both
    together cost at most twice what the better choice in hindsight would have: the rule of ski rental (Karlin et al., Competitive
    snoopy caching, 1988).
    """
    waited = f"{', '.join(short.pods)} found no node for {short.seconds:.0f} s"
    refusal = _cannot(given, short, waited)
    if refusal is not None:
        return refusal
    measured = measured_of(given)
    if measured is None or short.hourly_usd is None:
        return hold("PriceUnknown", f"{waited}; without a price of the nodes no dollars can be compared")
    return _cooling(given, waited) or _gone_on(measured, short, waited, short.hourly_usd / short.held)


def _gone_on(given: MeasuredSituation, short: Shortage, waited: str, node_hourly_usd: float) -> Verdict:
    """Whether the wait has cost as much as a change to fewer nodes."""
    if short.seconds < LEAST_WAIT_SECONDS:
        return hold("WaitingForNodes", f"{waited}; for {LEAST_WAIT_SECONDS:.0f} s it waits in any case")
    found = _smaller(given, short.held)
    if found is None:
        return hold(
            "NoCandidate", f"{waited}; no plan on {short.held} or fewer nodes is within the manifest's bounds: it waits"
        )
    target, step_usd = found
    waited_usd = short.seconds * node_hourly_usd / 3600 * short.held
    paid_usd = downtime_seconds(given.changes, Kind.SHRINK) * node_hourly_usd / 3600 * target.nodes
    sums = f"the wait has cost ${waited_usd:.3g}, and going on as {described(target)} costs ${paid_usd:.3g}"
    if waited_usd < paid_usd:
        return hold("WaitingForNodes", f"{waited}; {sums}: until then it waits")
    saved_usd = given.remaining_steps * (given.step_usd - step_usd) - paid_usd
    action = Action.CHANGE if given.settings.policy is AdjustPolicy.ACT else Action.RECOMMEND
    return Verdict(action, Kind.SHRINK.value, f"{waited}; {sums}", target, step_usd, saved_usd, kind=Kind.SHRINK)


def _cannot(given: Situation, short: Shortage, waited: str) -> Verdict | None:
    if given.settings.policy is AdjustPolicy.OFF:
        return hold("PolicyOff", f"{waited}; efficiency.policy is Off, so the run waits")
    if given.space is None:
        return hold("ModelUnknown", f"{waited}; without spec.model and known hardware no smaller plan can be predicted")
    if not short.held:
        return hold("WaitingForNodes", f"{waited}; nothing is paid for meanwhile")
    return None


def _cooling(given: Situation, waited: str) -> Verdict | None:
    last = given.changes[-1] if given.changes else None
    if last is not None and last.outcome is ChangeOutcome.FAILED:
        passed = (given.now - last.at).total_seconds()
        if passed < given.settings.cooldown_seconds:
            return hold("CoolingDown", f"{waited}; the last change, which failed, was begun only {passed:.0f} s ago")
    return None


def _smaller(given: MeasuredSituation, nodes: int) -> tuple[Plan, float] | None:
    """The best plan on so many nodes or fewer by the job's objective, and the dollars of one of its steps."""
    known = in_force(given, given.window.measured)
    ranking = ranked(given, known.offer) if known is not None else None
    if ranking is None:
        return None
    node_usd_a_second = given.node_hourly_usd / 3600
    fits = [row for row in range(len(ranking.columns)) if int(ranking.columns.nodes[row]) <= nodes][:CANDIDATES]
    options = []
    for row in fits:
        target = plan_of(given.plan, ranking, row)
        if plan_key(target) not in given.barred:
            seconds = float(ranking.columns.step_seconds[row]) + given.overhead_seconds
            options.append((target, seconds * target.nodes * node_usd_a_second, seconds))
    if not options:
        return None
    best = min(options, key=lambda o: o[2] if wants_time(given) or given.is_late else o[1])
    return best[:2]


def regrown(given: MeasuredSituation) -> Verdict | None:
    """Whether to go back to the plan from before nodes were lost; None while there are none for it, or it would not pay."""
    if given.spare_nodes is None:
        return None
    last = given.changes[-1] if given.changes else None
    if last is None or (given.now - last.at).total_seconds() < given.settings.cooldown_seconds:
        return None
    room = given.plan.nodes + given.spare_nodes
    lost = nodes_lost(given.changes, given.plan.nodes)
    most = min(room, _nodes_allowed(given))
    origins = [c for c in lost if c.origin.nodes <= most and plan_key(c.origin) not in given.barred]
    if not origins:
        return None
    change = max(origins, key=lambda c: c.origin.nodes)
    target = replace(change.origin, excluded_nodes=given.plan.excluded_nodes)
    node_hourly_usd, now_usd = given.node_hourly_usd, given.step_usd
    step_usd = change.before_at(node_hourly_usd)
    seconds, wall = step_usd * 3600 / node_hourly_usd / target.nodes, given.window.wall_step_seconds
    downtime = downtime_seconds(given.changes, Kind.RESIZE)
    paid_usd = downtime * target.nodes * node_hourly_usd / 3600
    saved_usd = given.remaining_steps * (now_usd - step_usd) - paid_usd
    nodes = f"there are nodes for {described(target)} again"
    if wants_time(given) or given.is_late:
        sooner = given.remaining_steps * (wall - seconds) - downtime
        if seconds > wall * (1 - LEAST_MARGIN) or sooner <= 0:
            return None
        if not affordable(given, given.remaining_steps * step_usd + paid_usd):
            return None
        text = f"{nodes}: a step took {seconds:.3g} s under it and takes {wall:.3g} s now, so the run ends {sooner:.0f} s sooner"
    else:
        if step_usd > now_usd * (1 - LEAST_MARGIN) or saved_usd <= given.settings.minimum_savings_usd:
            return None
        steps = f"{given.remaining_steps:,} steps x (${now_usd:.3g} - ${step_usd:.3g})"
        text = f"{nodes}: {steps} - ${paid_usd:.3g} for the change = ${saved_usd:.3g}"
    action = Action.CHANGE if given.settings.policy is AdjustPolicy.ACT else Action.RECOMMEND
    return Verdict(action, Kind.RESIZE.value, text, target, step_usd, saved_usd)


def _nodes_allowed(given: MeasuredSituation) -> int:
    """Most nodes that the manifest of today allows, by their number and by its dollars an hour."""
    if given.space is None:
        return 0
    bounds = given.space.bounds
    dear = math.inf if bounds.max_hourly_usd is None else bounds.max_hourly_usd / given.node_hourly_usd
    return int(min(bounds.nodes_max, dear + 1e-9))


def nodes_lost(changes: Sequence[Change], nodes: int) -> Iterator[Change]:
    """The changes by which a run on so many nodes has lost some and not got them back, newest first."""
    for change in reversed(changes):
        if change.outcome in UNDONE:
            continue
        if change.kind is Kind.SHRINK:
            if change.origin.nodes > nodes:
                yield change
        elif change.kind is Kind.MOVE or change.target.nodes < change.origin.nodes:
            return
