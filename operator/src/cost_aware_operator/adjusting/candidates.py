"""Other plans for a running job: what they would take, and what changing to them costs."""

from __future__ import annotations

import statistics
from dataclasses import replace

from cost_aware_operator.adjusting.calibration import Calibrated, Measured, calibrated
from cost_aware_operator.adjusting.changes import Change, Kind
from cost_aware_operator.adjusting.situation import Situation
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.combinations import Bounds, Offer
from cost_aware_operator.costs.layout import Layout, Recompute, Sharding
from cost_aware_operator.costs.pipeline import Schedule
from cost_aware_operator.costs.three_d import Ranking, ThreeDParallelCostAnalyzer
from cost_aware_operator.planning.plan import Plan

PRIOR_DOWNTIME_SECONDS = {Kind.REBALANCE: 10.0, Kind.RESIZE: 60.0, Kind.MOVE: 60.0, Kind.SHRINK: 60.0}
"""Until this job has been changed once: ranks that rebuild in place, pods that come or go, and all pods made anew."""
SAME_PODS = (Kind.RESIZE, Kind.SHRINK)
"""Changes after which some pods are the same and their number is another."""
LEAST_MARGIN = 0.05
"""No change for a promise smaller than this share of a step's dollars, however small the model's error seems."""
CANDIDATES = 200
"""Of a ranking, how many plans are looked at beyond those that cannot be."""


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


def in_force(given: Situation, measured: Measured) -> Calibrated | None:
    """The nodes that the run has, as measured; None where model or hardware is not known."""
    space = given.space
    if space is None:
        return None
    names = given.plan.instance_types
    offers = [o for o in space.offers if o.name.removesuffix(" spot") in names] or list(space.offers)
    layout = layout_of(given.plan, space.work.global_batch, offers[0])
    return calibrated(space.work.shape, offers[0], layout, measured)


def ranked(given: Situation, offer: Offer) -> Ranking | None:
    """Every plan within the manifest's bounds on such nodes, cheapest first; None where nothing divides."""
    if given.space is None:
        return None
    space = given.space
    bounds: Bounds = replace(space.bounds, budget_usd=None, deadline_seconds=None)
    try:
        return ThreeDParallelCostAnalyzer().search(space.work, (offer,), bounds, space.objective)
    except AnalysisError:
        return None


def downtime_seconds(changes: tuple[Change, ...], kind: Kind) -> float:
    """What a change of a kind takes: this job's own median, or a prior. Fewer pods take what more pods take."""
    alike = SAME_PODS if kind in SAME_PODS else (kind,)
    own = [c.downtime_seconds for c in changes if c.kind in alike and c.downtime_seconds is not None]
    return statistics.median(own) if own else PRIOR_DOWNTIME_SECONDS[kind]


def prediction_error(changes: tuple[Change, ...]) -> float:
    """How far the last promises to this job were off, as a share; 0 before the first was checked."""
    off = [
        abs(c.predicted_step_usd / c.realised_step_usd - 1)
        for c in changes
        if c.realised_step_usd and not c.is_rollback
    ]
    return off[-1] if off else 0.0
