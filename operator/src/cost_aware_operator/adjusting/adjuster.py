"""DynamicParallelismAdjuster: may this run go on under another plan, for fewer dollars, the cost of changing included?

Checks run in order over one `Situation`; the first that has an answer gives the verdict, with the numbers that it rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cost_aware_operator.adjusting.calibration import Calibrated
from cost_aware_operator.adjusting.candidates import (
    CANDIDATES,
    LEAST_MARGIN,
    downtime_seconds,
    in_force,
    prediction_error,
    ranked,
)
from cost_aware_operator.adjusting.capacity import regrown
from cost_aware_operator.adjusting.changes import ChangeOutcome, Kind, described, kind_of, plan_key
from cost_aware_operator.adjusting.moving import slow_node
from cost_aware_operator.adjusting.situation import (
    Action,
    Situation,
    Verdict,
    affordable,
    hold,
    late,
    step_usd,
    wants_time,
)
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.planning.plan import Plan, plan_of

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
        slow = slow_node(given, search=recent is None)
        if slow is not None and slow.action is not Action.HOLD:
            return slow
        answers = (found for check in AFTER if (found := check(given)) is not None)
        return replace(next(answers, None) or recent or _searched(given), of_slow_node=slow)


def _off(given: Situation) -> Verdict | None:
    if given.settings.policy is AdjustPolicy.OFF:
        return hold("PolicyOff", "efficiency.policy is Off")
    return None


def _samples(given: Situation) -> Verdict | None:
    window, wanted = given.window, given.settings.window_seconds
    if window is None or window.seconds < wanted or window.steps < 2:
        seen = f"{window.seconds:.0f} s with {window.steps:.0f} steps" if window is not None else "nothing"
        return hold("TooFewSamples", f"{seen} measured under this plan; {wanted:.0f} s and two steps are needed")
    return None


def _price(given: Situation) -> Verdict | None:
    if given.hourly_usd is None:
        return hold(
            "PriceUnknown", "without a price of the nodes no dollars can be saved; give it in the price ConfigMap"
        )
    return None


def _promise(given: Situation) -> Verdict | None:
    """Whether the last change was worse than what it replaced; then it is undone, once."""
    last = given.changes[-1] if given.changes else None
    if last is None or last.is_rollback or last.outcome is not ChangeOutcome.CHECKING:
        return None
    if last.kind is Kind.SHRINK or (last.kind is Kind.MOVE and last.origin.nodes == last.target.nodes):
        # nodes that are gone, or a node that was left, cannot be gone back to, and no other plan was tried
        return None
    node_usd = (given.hourly_usd or 0.0) / given.plan.nodes
    now, before = step_usd(given), last.before_at(node_usd)
    if given.deadline_left_seconds is not None:
        return None
    if wants_time(given):
        # dollars of a step over those of a node-second
        if (
            given.window is None
            or given.window.wall_step_seconds <= WORSE * before * 3600 / node_usd / last.origin.nodes
        ):
            return None
    elif now <= WORSE * before:
        return None
    text = (
        f"a step costs ${now:.3g} under {described(given.plan)}, more than the ${before:.3g} before; "
        f"${last.predicted_step_usd:.3g} was predicted; going back to {described(last.origin)}"
    )
    return Verdict(Action.ROLL_BACK, "PromiseBroken", text, last.origin, last.before_step_usd, 0.0)


def _need(given: Situation) -> Verdict | None:
    window, threshold = given.window, given.settings.threshold
    if window is not None and window.efficiency >= threshold and not late(given):
        return hold("Efficient", f"efficiency {window.efficiency:.0%} is not under the threshold of {threshold:.0%}")
    return None


def _cooldown(given: Situation) -> Verdict | None:
    if not given.changes:
        return None
    passed = (given.now - given.changes[-1].at).total_seconds()
    if passed < given.settings.cooldown_seconds:
        return hold(
            "CoolingDown",
            f"the last change is {passed:.0f} s ago; the next may come after {given.settings.cooldown_seconds:.0f}",
        )
    return None


def _known(given: Situation) -> Verdict | None:
    if given.space is None:
        return hold("ModelUnknown", "without spec.model and known hardware no other plan can be predicted")
    return None


def _searched(given: Situation) -> Verdict:
    return replace(_candidate(given), searched=True)


def _candidate(given: Situation) -> Verdict:
    """The best plan that pays for the change, or why there is none."""
    if given.window is None or given.hourly_usd is None:
        raise AssertionError("checked before")
    known = in_force(given, given.window.measured)
    if known is None:
        raise AssertionError("checked before")
    ranking = ranked(given, known.offer)
    if ranking is None:
        return hold("NoCandidate", "no other degrees fill whole nodes within the manifest's bounds")
    overhead = given.window.wall_step_seconds - given.window.measured.step_seconds
    now, best = step_usd(given), None
    node_usd = given.hourly_usd / given.plan.nodes
    for row in range(min(len(ranking.columns), CANDIDATES)):
        columns = ranking.columns
        target = plan_of(given.plan, ranking, row)
        if plan_key(target) == plan_key(given.plan) or plan_key(target) in given.barred:
            continue
        seconds = float(columns.step_seconds[row]) + overhead
        then = seconds * target.nodes * node_usd / 3600
        if wants_time(given) and seconds > given.window.wall_step_seconds:
            continue
        downtime = downtime_seconds(given.changes, kind_of(given.plan, target))
        paid = downtime * max(target.nodes, given.plan.nodes) * node_usd / 3600
        saved = given.remaining_steps * (now - then) - paid
        if late(given) and given.deadline_left_seconds is not None:
            in_time = given.remaining_steps * seconds + downtime <= given.deadline_left_seconds
            if in_time and affordable(given, given.remaining_steps * then + paid):
                return _changed(
                    given,
                    target,
                    then,
                    saved,
                    f"at the present speed the deadline is missed; {described(target)} meets it",
                )
            continue
        if best is None or saved > best[2]:
            best = (target, then, saved, paid)
    return _worth(given, known, best, now)


def _worth(given: Situation, known: Calibrated, best: tuple[Plan, float, float, float] | None, now: float) -> Verdict:
    """The break-even gate."""
    if best is None:
        return hold(
            "NoCandidate",
            "every other plan within the manifest's bounds is barred, or misses the deadline or the budget",
        )
    target, then, saved, paid = best
    error = prediction_error(given.changes)
    margin = max(LEAST_MARGIN, error)
    steps = f"{given.remaining_steps:,} steps x (${now:.3g} - ${then:.3g})"
    sums = f"{steps} - ${paid:.3g} for the change = ${saved:.3g}"
    if then > now * (1 - margin):
        return hold(
            "BestPlan" if then >= now else "PromiseTooSmall",
            f"the best other plan, {described(target)}, would cost ${then:.3g} a step against ${now:.3g}; a change must promise "
            f"{margin:.0%} less (the model's error here: {error:.0%})",
        )
    if saved <= given.settings.minimum_savings_usd:
        return hold(
            "NotWorthIt",
            f"{described(target)} would not pay for the change: {sums}, and must exceed ${given.settings.minimum_savings_usd:.3g}",
        )
    efficiency = given.window.efficiency if given.window is not None else 0.0
    return _changed(
        given,
        target,
        then,
        saved,
        f"efficiency {efficiency:.0%} is under {given.settings.threshold:.0%}; {described(target)} saves: {sums}",
    )


def _changed(given: Situation, target: Plan, then: float, saved: float, message: str) -> Verdict:
    act = given.settings.policy is AdjustPolicy.ACT
    reason = kind_of(given.plan, target).value
    return Verdict(Action.CHANGE if act else Action.RECOMMEND, reason, message, target, then, saved)


BEFORE: tuple[Callable[[Situation], Verdict | None], ...] = (_off, _samples, _price, _promise)
"""What must be clear before anything is thought about; then a node that is slow is left, if that pays."""
AFTER: tuple[Callable[[Situation], Verdict | None], ...] = (regrown, _need, _cooldown, _known)
"""What must be clear before other plans are searched for. Nodes that were lost and are there again need no search."""
