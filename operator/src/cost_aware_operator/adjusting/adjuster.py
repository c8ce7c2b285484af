"""DynamicParallelismAdjuster: may this run go on under another plan, for fewer dollars, the cost of changing included?

Checks run in order over one `Situation`; the first that has an answer gives the verdict, with the numbers that it rests on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from cost_aware_operator.adjusting.calibration import Calibrated, Measured, calibrated
from cost_aware_operator.adjusting.changes import Change, ChangeOutcome, Kind, described, kind_of, plan_key
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.combinations import Bounds, Offer
from cost_aware_operator.costs.layout import Layout, Recompute, Sharding
from cost_aware_operator.costs.pipeline import Schedule
from cost_aware_operator.costs.three_d import Ranking, ThreeDParallelCostAnalyzer
from cost_aware_operator.planning.plan import Plan, plan_of
from cost_aware_operator.planning.space import Space

PRIOR_DOWNTIME_SECONDS = {Kind.REBALANCE: 10.0, Kind.RESIZE: 60.0}
"""Until this job has been changed once: ranks that rebuild in place, and pods that come or go."""
WORSE = 1.02
"""Dollars of a step after a change over those before, above which it is taken back: less is noise."""
LEAST_MARGIN = 0.05
"""No change for a promise smaller than this share of a step's dollars, however small the model's error seems."""
CANDIDATES = 200
"""Of the ranking, how many are looked at beyond those that are barred."""


class Action(StrEnum):
    """What to do."""

    HOLD = "Hold"
    RECOMMEND = "Recommend"
    CHANGE = "Change"
    ROLL_BACK = "RollBack"


@dataclass(frozen=True)
class Settings:
    """What the manifest says of adjusting."""

    policy: AdjustPolicy
    threshold: float
    window_seconds: float
    cooldown_seconds: float
    minimum_savings_usd: float


@dataclass(frozen=True)
class Window:
    """What the ranks of the present attempt did over the last seconds. `wall_step_seconds` counts everything."""

    seconds: float
    steps: float
    efficiency: float
    wall_step_seconds: float
    measured: Measured


@dataclass(frozen=True)
class Situation:
    """All that a verdict depends on. `space` is None where model or hardware is not known."""

    now: datetime
    settings: Settings
    plan: Plan
    space: Space | None
    window: Window | None
    remaining_steps: int
    hourly_usd: float | None
    changes: tuple[Change, ...]
    barred: frozenset[str]
    deadline_left_seconds: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What to do and why: one CamelCase word, and a sentence with its numbers."""

    action: Action
    reason: str
    message: str
    plan: Plan | None = None
    predicted_step_usd: float | None = None
    predicted_savings_usd: float | None = None
    searched: bool = False
    """Whether other plans were searched for."""


def _hold(reason: str, message: str) -> Verdict:
    return Verdict(Action.HOLD, reason, message)


class DynamicParallelismAdjuster:
    """The chain of checks."""

    def verdict(self, given: Situation, recent: Verdict | None = None) -> Verdict:
        """What to do now; where only a search could tell, and there was a `recent` one, its answer."""
        checks: tuple[Callable[[Situation], Verdict | None], ...] = (
            _off,
            _samples,
            _price,
            _promise,
            _need,
            _cooldown,
            _known,
        )
        for check in checks:
            found = check(given)
            if found is not None:
                return found
        return recent or replace(_candidate(given), searched=True)


def _off(given: Situation) -> Verdict | None:
    if given.settings.policy is AdjustPolicy.OFF:
        return _hold("PolicyOff", "efficiency.policy is Off")
    return None


def _samples(given: Situation) -> Verdict | None:
    window, wanted = given.window, given.settings.window_seconds
    if window is None or window.seconds < wanted or window.steps < 2:
        seen = f"{window.seconds:.0f} s with {window.steps:.0f} steps" if window is not None else "nothing"
        return _hold("TooFewSamples", f"{seen} measured under this plan; {wanted:.0f} s and two steps are needed")
    return None


def _price(given: Situation) -> Verdict | None:
    if given.hourly_usd is None:
        return _hold(
            "PriceUnknown", "without a price of the nodes no dollars can be saved; give it in the price ConfigMap"
        )
    return None


def step_usd(given: Situation) -> float:
    """Dollars of a step as it goes now, everything included."""
    if given.window is None or given.hourly_usd is None:
        raise AssertionError("checked before")
    return given.window.wall_step_seconds * given.hourly_usd / 3600


def _promise(given: Situation) -> Verdict | None:
    """Whether the last change was worse than what it replaced; then it is undone, once."""
    last = given.changes[-1] if given.changes else None
    if last is None or last.is_rollback or last.outcome is not ChangeOutcome.CHECKING:
        return None
    now, before = step_usd(given), last.before_at((given.hourly_usd or 0.0) / given.plan.nodes)
    if now <= WORSE * before or given.deadline_left_seconds is not None:
        return None
    text = (
        f"a step costs ${now:.3g} under {described(given.plan)}, more than the ${before:.3g} before; "
        f"${last.predicted_step_usd:.3g} was predicted; going back to {described(last.origin)}"
    )
    return Verdict(Action.ROLL_BACK, "PromiseBroken", text, last.origin, last.before_step_usd, 0.0)


def _late(given: Situation) -> bool:
    """Whether the run misses its deadline at the present speed."""
    left = given.deadline_left_seconds
    return (
        left is not None and given.window is not None and given.remaining_steps * given.window.wall_step_seconds > left
    )


def _need(given: Situation) -> Verdict | None:
    window, threshold = given.window, given.settings.threshold
    if window is not None and window.efficiency >= threshold and not _late(given):
        return _hold("Efficient", f"efficiency {window.efficiency:.0%} is not under the threshold of {threshold:.0%}")
    return None


def _cooldown(given: Situation) -> Verdict | None:
    if not given.changes:
        return None
    passed = (given.now - given.changes[-1].at).total_seconds()
    if passed < given.settings.cooldown_seconds:
        return _hold(
            "CoolingDown",
            f"the last change is {passed:.0f} s ago; the next may come after {given.settings.cooldown_seconds:.0f}",
        )
    return None


def _known(given: Situation) -> Verdict | None:
    if given.space is None:
        return _hold("ModelUnknown", "without spec.model and known hardware no other plan can be predicted")
    return None


def layout_of(plan: Plan, global_batch: int, offer: Offer) -> Layout:
    """A plan as the cost models see it."""
    schedule = Schedule(plan.schedule)
    return Layout(
        data=plan.data,
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        context=1,
        sharding=Sharding(plan.sharding),
        interleave=plan.interleave,
        recompute=Recompute(plan.recompute),
        micro_batch=plan.micro_batch,
        global_batch=global_batch,
        precision=offer.precision,
        schedule=Schedule.ONE_F_ONE_B if schedule is Schedule.INTERLEAVED else schedule,
    )


def in_force(given: Situation) -> Calibrated | None:
    """The nodes that the run has, as measured; None where the space does not hold them."""
    space, window = given.space, given.window
    if space is None or window is None:
        return None
    names = given.plan.instance_types
    offers = [o for o in space.offers if o.name.removesuffix(" spot") in names] or list(space.offers)
    layout = layout_of(given.plan, space.work.global_batch, offers[0])
    return calibrated(space.work.shape, offers[0], layout, window.measured)


def _candidate(given: Situation) -> Verdict:
    """The best plan that pays for the change, or why there is none."""
    known = in_force(given)
    if known is None or given.space is None or given.window is None or given.hourly_usd is None:
        raise AssertionError("checked before")
    ranking = _ranked(given, known.offer)
    if ranking is None:
        return _hold("NoCandidate", "no other degrees fill whole nodes within the manifest's bounds")
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
        downtime = downtime_seconds(given.changes, kind_of(given.plan, target))
        paid = downtime * max(target.nodes, given.plan.nodes) * node_usd / 3600
        saved = given.remaining_steps * (now - then) - paid
        if _late(given) and given.deadline_left_seconds is not None:
            if given.remaining_steps * seconds + downtime <= given.deadline_left_seconds:
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
        return _hold("NoCandidate", "every other plan within the manifest's bounds is barred, or misses the deadline")
    target, then, saved, paid = best
    error = prediction_error(given.changes)
    margin = max(LEAST_MARGIN, error)
    steps = f"{given.remaining_steps:,} steps x (${now:.3g} - ${then:.3g})"
    sums = f"{steps} - ${paid:.3g} for the change = ${saved:.3g}"
    if then > now * (1 - margin):
        return _hold(
            "BestPlan" if then >= now else "PromiseTooSmall",
            f"the best other plan, {described(target)}, would cost ${then:.3g} a step against ${now:.3g}; a change must promise "
            f"{margin:.0%} less (the model's error here: {error:.0%})",
        )
    if saved <= given.settings.minimum_savings_usd:
        return _hold(
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


def _ranked(given: Situation, offer: Offer) -> Ranking | None:
    if given.space is None:
        return None
    space = given.space
    bounds: Bounds = replace(space.bounds, budget_usd=None, deadline_seconds=None)
    try:
        return ThreeDParallelCostAnalyzer().search(space.work, (offer,), bounds, space.objective)
    except AnalysisError:
        return None


def downtime_seconds(changes: tuple[Change, ...], kind: Kind) -> float:
    """What a change of a kind takes: this job's own median, or a prior."""
    own = [c.downtime_seconds for c in changes if c.kind is kind and c.downtime_seconds is not None]
    return statistics.median(own) if own else PRIOR_DOWNTIME_SECONDS[kind]


def prediction_error(changes: tuple[Change, ...]) -> float:
    """How far the last promises to this job were off, as a share; 0 before the first was checked."""
    off = [
        abs(c.predicted_step_usd / c.realised_step_usd - 1)
        for c in changes
        if c.realised_step_usd and not c.is_rollback
    ]
    return off[-1] if off else 0.0
