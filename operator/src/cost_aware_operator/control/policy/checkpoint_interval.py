"""How often a run is saved: what a save blocks, how often something fails, and the interval between saves that loses least. Pure."""

from __future__ import annotations

from cost_aware_operator.api.spec import CapacityType
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord, Saves
from cost_aware_operator.costs.models.goodput import optimal_interval
from cost_aware_operator.costs.search.three_d import checkpointing
from cost_aware_operator.costs.tables.hazards import node_hazard
from cost_aware_operator.planning.plan import Plan
from cost_aware_trainer.contract import Phase

LEAST_SECONDS, MOST_SECONDS = 10.0, 1800.0
"""Bounds of an interval that nobody wrote: saves must be rarer than scrapes, and half an hour is much to lose."""
UNKNOWN_SECONDS = 60.0
"""Seconds between saves while neither a save was seen nor the size of the state is known."""


def saves_seen(reading: Reading) -> Saves:
    """The record's saves with those that the newest samples tell of.

    A rank tells its newest whole checkpoint, and how long saves have blocked it since its attempt began. Looked at when a checkpoint
    has just become whole, the second over the number of checkpoints is what one blocks.
    """
    record = reading.facts.record
    known = record.saves
    lead = max(reading.samples, key=lambda s: s.checkpoint_step or 0, default=None)
    if lead is None or not lead.checkpoint_step:
        return known
    if known.attempt != record.attempt:
        # what it resumed from is not a save of this attempt
        newest = max(lead.resumed_step or 0, record.attempt_checkpoint)
        known = Saves(attempt=record.attempt, newest=newest, stall_seconds=known.stall_seconds)
    if lead.checkpoint_step <= known.newest:
        return known
    blocked = max(s.phase_seconds.get(Phase.CHECKPOINT, 0.0) for s in reading.samples)
    count = known.count + 1
    stall = blocked / count if blocked > 0 else known.stall_seconds
    return Saves(attempt=known.attempt, newest=lead.checkpoint_step, count=count, stall_seconds=stall)


def interval_of(reading: Reading, record: RunRecord, plan: Plan) -> tuple[float, str]:
    """Seconds between saves for the next attempt, and why: as written, else Daly's estimate from stall and failures."""
    written = reading.facts.job.spec.checkpoint.interval_seconds
    if written is not None:
        return float(written), "spec.checkpoint.intervalSeconds"
    stall, seen = _stall(reading, record, plan)
    if stall is None:
        return UNKNOWN_SECONDS, "no save was seen yet, and the size of the state is not known"
    rate, why = failures_per_hour(reading.facts, record, plan)
    best = optimal_interval(stall, 3600 / rate)
    seconds = round(min(max(best, LEAST_SECONDS), MOST_SECONDS), 1)
    bound = f", held within {LEAST_SECONDS:.0f} s and {MOST_SECONDS / 60:.0f} min" if seconds != round(best, 1) else ""
    return seconds, (
        f"Young/Daly: sqrt(2 x {stall:.3g} s that a save blocks ({seen}) x {3600 / rate:.3g} s between failures ({why})) "
        f"= {best:.3g} s{bound}"
    )


def _stall(reading: Reading, record: RunRecord, plan: Plan) -> tuple[float | None, str]:
    measured = record.saves.stall_seconds
    if measured is not None:
        return measured, "measured"
    space = reading.space
    if space is None:
        return None, ""
    return checkpointing(space.work, space.offers[0], plan.nodes)[0], "predicted"


def failures_per_hour(facts: Facts, record: RunRecord, plan: Plan) -> tuple[float, str]:
    """Failures an hour of all nodes together, and why: as listed for such nodes, or as this job has met them if that is more."""
    nodes = [n for p in facts.pods if p.ended_at is None and (n := facts.nodes.get(p.node or "")) is not None]
    only_spot = plan.spot or facts.job.spec.nodes.capacity_type is CapacityType.SPOT
    spot = sum(n.spot for n in nodes) if nodes else plan.nodes * only_spot
    spot = min(spot, plan.nodes)
    listed = spot * node_hazard(plan.ranks_per_node, spot=True)
    listed += (plan.nodes - spot) * node_hazard(plan.ranks_per_node, spot=False)
    hours = max(1.0, record.ledger.pod_seconds / 3600)
    met = record.interruptions / hours * plan.nodes
    if met > listed:
        return met, f"{record.interruptions} in {hours:.3g} node-hours of this job"
    return listed, f"{plan.nodes} nodes, {spot} of them spot"


def interval_for(reading: Reading, record: RunRecord, plan: Plan, *, goes_on: bool) -> tuple[float, str]:
    """Interval and reason for an attempt that ranks may go on to in their processes: another interval would make them start anew."""
    order = reading.facts.order
    written = reading.facts.job.spec.checkpoint.interval_seconds is not None
    if goes_on and not written and order is not None and order.plan is not None and order.nodes == plan.nodes:
        return order.plan.checkpoint.interval_seconds, record.interval_reason
    return interval_of(reading, record, plan)
