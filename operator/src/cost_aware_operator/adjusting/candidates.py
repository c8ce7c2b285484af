"""Other plans for a running job: what they would take, and what changing to them costs."""

from __future__ import annotations

import statistics
from dataclasses import replace

from cost_aware_operator.adjusting.calibration import Calibrated, Measured, calibrated, faster
from cost_aware_operator.adjusting.changes import Change, Kind
from cost_aware_operator.adjusting.situation import Situation
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.search.combinations import Bounds, Offer
from cost_aware_operator.costs.search.three_d import Ranking, ThreeDParallelCostAnalyzer
from cost_aware_operator.planning.plan import is_other_kind, type_of

PRIOR_DOWNTIME_SECONDS = {Kind.REBALANCE: 10.0, Kind.RESIZE: 60.0, Kind.MOVE: 60.0, Kind.SHRINK: 60.0}
"""Until this job has been changed once: ranks that rebuild in place, pods that come or go, and all pods made anew."""
SAME_PODS = (Kind.RESIZE, Kind.SHRINK)
"""Changes after which some pods are the same and their number is another."""
LEAST_MARGIN = 0.05
"""No change for a promise smaller than this share of a step's dollars, however small the model's error seems."""
OTHER_TYPE_MARGIN = 0.2
"""Least promise of a change to nodes of another type: what was measured here says less about them."""
CANDIDATES = 200
"""Number of plans of a ranking that are looked at."""


def in_force(given: Situation, measured: Measured) -> Calibrated | None:
    """The nodes that the run has, as measured; None where model or hardware is not known."""
    space = given.space
    if space is None:
        return None
    offer = listed_offer(given) or space.offers[0]
    layout = given.plan.layout(space.work.global_batch, offer.precision)
    return calibrated(space.work.shape, offer, layout, measured)


def listed_offer(given: Situation) -> Offer | None:
    """The nodes that the run has, as the tables list them."""
    offers = given.space.offers if given.space is not None else ()
    return next((o for o in offers if not is_other_kind(given.plan, o)), None)


def other_offers(given: Situation, known: Calibrated) -> tuple[Offer, ...]:
    """Other types of nodes of which some are free.

    They are taken to be as much faster or slower than their tables say as the present ones were found to be than theirs: what
    a model's kernels make of a machine is a matter of the model more than of the machine.
    """
    listed = listed_offer(given)
    if given.space is None or listed is None:
        return ()
    factor = _peak(known.offer) / _peak(listed)
    return tuple(
        replace(offer, machine=faster(offer.machine, factor))
        for offer in given.space.offers
        if is_other_kind(given.plan, offer) and given.free_nodes.get(type_of(offer), 0) > 0
    )


def _peak(offer: Offer) -> float:
    return next(iter(offer.machine.accelerator.peak_tflops.values()))


def ranked(given: Situation, *offers: Offer) -> Ranking | None:
    """Every plan within the manifest's bounds on such nodes, cheapest first; None where nothing divides."""
    if given.space is None:
        return None
    space = given.space
    bounds: Bounds = replace(space.bounds, budget_usd=None, deadline_seconds=None)
    try:
        return ThreeDParallelCostAnalyzer().search(space.work, offers, bounds, space.objective)
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
