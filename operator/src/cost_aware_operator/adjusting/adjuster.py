"""DynamicParallelismAdjuster: may this run go on under another plan, for fewer dollars, the cost of changing included?

Checks run in order over one `Situation`; the first that has an answer gives the verdict, with the numbers that it rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_aware_operator.adjusting.candidates import (
    CANDIDATES,
    LEAST_MARGIN,
    OTHER_TYPE_MARGIN,
    downtime_seconds,
    in_force,
    other_offers,
    prediction_error,
    ranked,
)
from cost_aware_operator.adjusting.capacity import regrown
from cost_aware_operator.adjusting.changes import (
    Change,
    ChangeOutcome,
    Kind,
    described,
    described_from,
    kind_of,
    plan_key,
)
from cost_aware_operator.adjusting.moving import slow_node
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
from cost_aware_operator.costs.search.three_d import Ranking
from cost_aware_operator.planning.plan import Plan, is_other_kind, plan_of, type_of

WORSE = 1.02
"""Dollars of a step after a change over those before, above which it is taken back: less is noise."""


class DynamicParallelismAdjuster:
    """The chain of checks."""

    def verdict(self, given: Situation, recent: Verdict | None = None) -> Verdict:
        """What to do now; where only a search could tell, and there was a `recent` one, its answer."""
        for check in BEFORE:
            found = check(given)
            if found is not None:
                return found
        measured = measured_of(given)
        if measured is None:
            return _too_few(given)
        broken = _promise(measured)
        if broken is not None:
            return broken
        slow = slow_node(measured, search=recent is None)
        if slow is not None and slow.action is not Action.HOLD:
            return slow
        answers = (found for check in AFTER if (found := check(measured)) is not None)
        return replace(next(answers, None) or recent or _searched(measured), of_slow_node=slow)


def _off(given: Situation) -> Verdict | None:
    if given.settings.policy is AdjustPolicy.OFF:
        return hold("PolicyOff", "efficiency.policy is Off")
    return None


def _samples(given: Situation) -> Verdict | None:
    window, wanted = given.window, given.settings.window_seconds
    if window is None or window.seconds < wanted or window.steps < 2:
        return _too_few(given)
    return None


def _too_few(given: Situation) -> Verdict:
    window, wanted = given.window, given.settings.window_seconds
    seen = f"{window.seconds:.0f} s with {window.steps:.0f} steps" if window is not None else "nothing"
    return hold("TooFewSamples", f"{seen} measured under this plan; {wanted:.0f} s and two steps are needed")


def _price(given: Situation) -> Verdict | None:
    if given.hourly_usd is None:
        return hold(
            "PriceUnknown", "without a price of the nodes no dollars can be saved; give it in the price ConfigMap"
        )
    return None


def _promise(given: MeasuredSituation) -> Verdict | None:
    """Whether the last change was worse than what it replaced; then it is undone, once."""
    last = given.changes[-1] if given.changes else None
    if last is None or last.is_rollback or last.outcome is not ChangeOutcome.CHECKING:
        return None
    if not _could_go_back(given, last):
        return None
    node_hourly_usd = given.node_hourly_usd
    step_usd, before_usd = given.step_usd, last.before_at(node_hourly_usd)
    same_type = last.origin.instance_types == last.target.instance_types
    before_node_hourly_usd = node_hourly_usd if same_type else last.before_node_usd or node_hourly_usd
    if given.deadline_left_seconds is not None:
        return None
    if wants_time(given):
        # dollars of a step over those of a second are the seconds of a step
        before_seconds = before_usd * 3600 / (before_node_hourly_usd * last.origin.nodes)
        if given.window.wall_step_seconds <= WORSE * before_seconds:
            return None
    elif step_usd <= WORSE * before_usd:
        return None
    text = (
        f"a step costs ${step_usd:.3g} under {described(given.plan)}, more than the ${before_usd:.3g} before; "
        f"${last.predicted_step_usd:.3g} was predicted; going back to {described_from(last.origin, given.plan)}"
    )
    return Verdict(Action.ROLL_BACK, "PromiseBroken", text, last.origin, last.before_step_usd, 0.0)


def _could_go_back(given: Situation, last: Change) -> bool:
    """Not to nodes that are gone, nor to one that was left, where no other plan was tried; to another type's if they are free."""
    if last.kind is Kind.SHRINK:
        return False
    if last.origin.instance_types != last.target.instance_types:
        return sum(given.free_nodes.get(kind, 0) for kind in last.origin.instance_types) >= last.origin.nodes
    return last.kind is not Kind.MOVE or last.origin.nodes != last.target.nodes


def _need(given: MeasuredSituation) -> Verdict | None:
    efficiency, threshold = given.window.efficiency, given.settings.threshold
    if efficiency >= threshold and not given.is_late:
        return hold("Efficient", f"efficiency {efficiency:.0%} is not under the threshold of {threshold:.0%}")
    return None


def _cooldown(given: MeasuredSituation) -> Verdict | None:
    if not given.changes:
        return None
    passed = (given.now - given.changes[-1].at).total_seconds()
    if passed < given.settings.cooldown_seconds:
        return hold(
            "CoolingDown",
            f"the last change is {passed:.0f} s ago; the next may come after {given.settings.cooldown_seconds:.0f}",
        )
    return None


def _known(given: MeasuredSituation) -> Verdict | None:
    if given.space is None:
        return hold("ModelUnknown", "without spec.model and known hardware no other plan can be predicted")
    return None


def _searched(given: MeasuredSituation) -> Verdict:
    return replace(_candidate(given), searched=True)


@dataclass(frozen=True)
class OtherPlan:
    """Another plan for the run, with what it takes and what changing to it costs."""

    plan: Plan
    """The plan."""
    seconds: float
    """Seconds of one of its steps, everything included."""
    step_usd: float
    """Dollars of one of its steps."""
    paid_usd: float
    """Dollars that the change itself costs."""
    saved_usd: float
    """Dollars saved over the rest of the run, the cost of the change taken off."""
    margin: float
    """Share of a step's dollars that a change to it must promise."""


def _candidate(given: MeasuredSituation) -> Verdict:
    """The best plan that pays for the change, or why there is none."""
    known = in_force(given, given.window.measured)
    present = None if known is None else replace(known.offer, hourly_usd=given.node_hourly_usd)
    ranking = None if known is None or present is None else ranked(given, present, *other_offers(given, known))
    if ranking is None:
        return hold("NoCandidate", "no other degrees fill whole nodes within the manifest's bounds")
    rows = range(min(len(ranking.columns), CANDIDATES))
    found = [one for row in rows if (one := _looked_at(given, ranking, row)) is not None]
    if given.is_late:
        return _in_time(given, found)
    return worth_changing(given, found)


def _looked_at(given: MeasuredSituation, ranking: Ranking, row: int) -> OtherPlan | None:
    """A row of the ranking; None for the plan in force, what is barred, and what nothing is known of or has no room."""
    target, offer = plan_of(given.plan, ranking, row), ranking.offer(row)
    other = is_other_kind(given.plan, offer)
    if plan_key(target) == plan_key(given.plan) or plan_key(target) in given.barred:
        return None
    if other and given.free_nodes.get(type_of(offer), 0) < target.nodes:
        return None
    seconds = float(ranking.columns.step_seconds[row]) + given.overhead_seconds
    if wants_time(given) and seconds > given.window.wall_step_seconds:
        return None
    hourly_usd = target.nodes * offer.hourly_usd
    step_usd = seconds * hourly_usd / 3600
    paid_usd = downtime_seconds(given.changes, kind_of(given.plan, target)) * max(hourly_usd, given.hourly_usd) / 3600
    saved_usd = given.remaining_steps * (given.step_usd - step_usd) - paid_usd
    margin = max(OTHER_TYPE_MARGIN if other else LEAST_MARGIN, prediction_error(given.changes))
    return OtherPlan(target, seconds, step_usd, paid_usd, saved_usd, margin)


def _in_time(given: MeasuredSituation, found: list[OtherPlan]) -> Verdict:
    """The best plan that meets a deadline which is missed at the present speed."""
    left = given.deadline_left_seconds or 0.0
    for one in found:
        downtime = downtime_seconds(given.changes, kind_of(given.plan, one.plan))
        in_time = given.remaining_steps * one.seconds + downtime <= left
        if in_time and affordable(given, given.remaining_steps * one.step_usd + one.paid_usd):
            what = described_from(one.plan, given.plan)
            return _changed(given, one, f"at the present speed the deadline is missed; {what} meets it")
    return hold("NoCandidate", "every other plan within the manifest's bounds misses the deadline or the budget")


def worth_changing(given: MeasuredSituation, found: list[OtherPlan]) -> Verdict:
    """The break-even gate."""
    if not found:
        return hold("NoCandidate", "every other plan within the manifest's bounds is barred")
    now_usd = given.step_usd
    sound = [one for one in found if one.step_usd <= now_usd * (1 - one.margin)]
    best = max(sound or found, key=lambda one: one.saved_usd)
    what = described_from(best.plan, given.plan)
    if not sound:
        error = prediction_error(given.changes)
        return hold(
            "BestPlan" if best.step_usd >= now_usd else "PromiseTooSmall",
            f"the best other plan, {what}, would cost ${best.step_usd:.3g} a step against ${now_usd:.3g}; a change must promise "
            f"{best.margin:.0%} less (the model's error here: {error:.0%})",
        )
    steps = f"{given.remaining_steps:,} steps x (${now_usd:.3g} - ${best.step_usd:.3g})"
    sums = f"{steps} - ${best.paid_usd:.3g} for the change = ${best.saved_usd:.3g}"
    if best.saved_usd <= given.settings.minimum_savings_usd:
        return hold(
            "NotWorthIt",
            f"{what} would not pay for the change: {sums}, and must exceed ${given.settings.minimum_savings_usd:.3g}",
        )
    efficiency = given.window.efficiency
    return _changed(
        given, best, f"efficiency {efficiency:.0%} is under {given.settings.threshold:.0%}; {what} saves: {sums}"
    )


def _changed(given: MeasuredSituation, best: OtherPlan, message: str) -> Verdict:
    action = Action.CHANGE if given.settings.policy is AdjustPolicy.ACT else Action.RECOMMEND
    reason = kind_of(given.plan, best.plan).value
    return Verdict(action, reason, message, best.plan, best.step_usd, best.saved_usd)


BEFORE: tuple[Callable[[Situation], Verdict | None], ...] = (_off, _samples, _price)
"""Checks before dollars can be compared. Then a broken promise is taken back, and a slow node is left if that pays."""
AFTER: tuple[Callable[[MeasuredSituation], Verdict | None], ...] = (regrown, _need, _cooldown, _known)
"""Checks before other plans are searched for. Nodes that were lost and are there again need no search."""
