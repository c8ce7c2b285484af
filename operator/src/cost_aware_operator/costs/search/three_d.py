"""Search over data x tensor x pipeline degrees and all that goes with them, for the fewest dollars or the least time.

Every layout that the bounds allow is predicted, in arrays; nothing is sampled, and nothing is skipped but what does not fit
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_aware_operator.api.spec import Objective
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.compute import Parameters
from cost_aware_operator.costs.models.goodput import expected_goodput, optimal_interval
from cost_aware_operator.costs.models.layout import Layout, Layouts, StateSharding
from cost_aware_operator.costs.models.machines import usable_gib
from cost_aware_operator.costs.models.memory import GIB
from cost_aware_operator.costs.models.model_parallel import head_in_layers
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.predict import memory_of_ranks
from cost_aware_operator.costs.models.stages import spread
from cost_aware_operator.costs.models.step import step_seconds
from cost_aware_operator.costs.search.combinations import KINDS, Bounds, Counts, Offer, Work, rows_of, why_none
from cost_aware_operator.costs.search.combinations import grid as all_counts
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration

COPY_BYTES_PER_SECOND = 10e9
"""Rate of the copy of a node's state to host memory, for which an asynchronous checkpoint blocks training: half of PCIe 4 x16."""
RECOVERY_SECONDS = 300.0
"""Seconds from a lost node to the first new step: noticing, a new node, images, loading. An assumption, not a measurement."""

Floats = NDArray[Any]


COUNTS = ("data", "tensor", "pipeline", "interleave", "micro_batch")


class Need(StrEnum):
    """Limits that a combination can break."""

    MEMORY = "memory"
    HOURLY = "maxHourlyUSD"
    BUDGET = "budget"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Columns:
    """Predicted plans, one row each."""

    offer: Counts
    """Index into the offers asked for."""
    kind: Counts
    """Index into `KINDS`."""
    nodes: Counts
    """Nodes of the run."""
    data: Counts
    """Data-parallel degree."""
    tensor: Counts
    """Tensor-parallel degree."""
    pipeline: Counts
    """Pipeline stages."""
    micro_batch: Counts
    """Sequences that a replica computes at once."""
    interleave: Counts
    """Model chunks of each pipeline stage."""
    memory_gib: Floats
    """GiB that the fullest rank needs."""
    step_seconds: Floats
    """Seconds of one step."""
    productive_seconds: Floats
    """Seconds of a step that compute or update weights."""
    bubble_seconds: Floats
    """Seconds of a step that the pipeline's bubble takes."""
    communication_seconds: Floats
    """Seconds of a step of communication that computation does not hide."""
    goodput: Floats
    """Productive share of time under failures and checkpoints, 0 to 1."""
    hours: Floats
    """Hours of the whole run, failures included."""
    usd: Floats
    """Dollars of the whole run, failures included."""

    def __len__(self) -> int:
        return len(self.usd)

    def take(self, rows: Any) -> Columns:
        """Columns with some of the rows, in the order asked for."""
        return Columns(**{name: getattr(self, name)[rows] for name in Columns.__dataclass_fields__})


@dataclass(frozen=True)
class Shortfall:
    """Why combinations were ruled out. Figures are GiB, dollars an hour, hours or dollars, as `need` says."""

    need: Need
    """Limit that they break."""
    combinations: int
    """Number of combinations ruled out."""
    nearest: float
    """Least that one of them would have needed."""
    limit: float
    """Most that there is."""
    nearest_layout: Layout | None = None
    """Layout of that nearest combination; None where it is not told."""


@dataclass(frozen=True)
class Ranking:
    """Every feasible plan, best first, and why the others are not."""

    columns: Columns
    """The feasible plans, best first."""
    offers: tuple[Offer, ...]
    """Offers that were asked for."""
    work: Work
    """The training to be done."""
    objective: Objective
    """Goal that the order follows: fewest dollars or least time."""
    shortfalls: tuple[Shortfall, ...]
    """Why other combinations were ruled out."""
    combinations: int
    """Number of combinations predicted."""
    parameters: Parameters
    """Fitted parameters of the prediction."""

    def layout(self, row: int) -> Layout:
        """The layout of a row."""
        rows = {name: getattr(self.columns, name)[row : row + 1] for name in COUNTS}
        return _layouts(int(self.columns.kind[row]), rows, self.work, self.offer(row)).one(0)

    def offer(self, row: int) -> Offer:
        """The offer of a row."""
        return self.offers[int(self.columns.offer[row])]

    def stage_layers(self, row: int) -> tuple[int, ...]:
        """Layers of each pipeline stage of a row."""
        shape = self.work.shape
        return spread(shape.layers, int(self.columns.pipeline[row]), head_in_layers(shape)).counts()

    def best_of_each_degrees(self, most: int) -> list[int]:
        """Rows of the best plan of every (offer, nodes, degrees), best first, so that variants of one do not crowd a list."""
        found: dict[tuple[int, ...], int] = {}
        c = self.columns
        for row in range(len(c)):
            key = (int(c.offer[row]), int(c.nodes[row]), int(c.data[row]), int(c.tensor[row]), int(c.pipeline[row]))
            if key not in found:
                found[key] = row
                if len(found) == most:
                    break
        return list(found.values())

    def pareto(self) -> list[int]:
        """Rows that no other beats in both dollars and hours, cheapest first."""
        c = self.columns
        order = np.lexsort((c.hours, c.usd))
        hours = c.hours[order]
        least_before = np.minimum.accumulate(np.concatenate(([np.inf], hours[:-1])))
        return [int(row) for row in order[hours < least_before]]


class ThreeDParallelCostAnalyzer:
    """Search for the degrees, the kind of nodes and their number."""

    def search(
        self,
        work: Work,
        offers: Sequence[Offer],
        bounds: Bounds,
        objective: Objective = Objective.COST,
        parameters: Parameters = FITTED,
    ) -> Ranking:
        """All plans within the bounds, ranked; of equals the one with fewer dollars, hours, nodes, and less memory.

        Raises:
            AnalysisError: no offer, a bound that no combination can meet, or too many combinations.
        """
        if not offers:
            raise AnalysisError("offers: is empty: write one instance type or more")
        found: list[Columns] = []
        lacks: list[Shortfall] = []
        combinations = 0
        for index, offer in enumerate(offers):
            searched = _OfferSearch(index, offer, work, bounds, parameters)
            combinations += searched.combinations
            found += searched.columns
            lacks += searched.lacks
        if combinations == 0:
            raise AnalysisError(why_none(work, offers, bounds))
        columns = _joined(found)
        kept, limits = _within_limits(columns, offers, bounds)
        keys = [kept.memory_gib, kept.nodes, kept.hours, kept.usd]
        if objective is Objective.TIME:
            keys[2], keys[3] = keys[3], keys[2]
        # in single precision what differs by rounding alone is equal, so that ties are broken by meaning
        order = np.lexsort([key.astype(np.float32) for key in keys])
        return Ranking(
            kept.take(order), tuple(offers), work, objective, (*_merged(lacks), *limits), combinations, parameters
        )


class _OfferSearch:
    """Predictions of all combinations on one offer."""

    def __init__(self, index: int, offer: Offer, work: Work, bounds: Bounds, parameters: Parameters) -> None:
        self.index, self.offer, self.work, self.bounds, self.parameters = index, offer, work, bounds, parameters
        self.columns: list[Columns] = []
        self.lacks: list[Shortfall] = []
        self.combinations = 0
        self._goodput: dict[int, float] = {}
        columns = all_counts(work, offer, bounds)
        for kind, (schedule, sharding, recompute) in enumerate(KINDS):
            if sharding in bounds.shardings and recompute in bounds.recomputes and len(columns["data"]):
                rows = rows_of(columns, schedule, sharding, bounds)
                self._of_kind(kind, {name: column[rows] for name, column in columns.items()})

    def _of_kind(self, kind: int, rows: dict[str, Counts]) -> None:
        # one practice serves all rows but where it depends on whether tensors are split at all
        split = rows["tensor"] > 1
        parts = (
            (split, ~split)
            if self.offer.machine.accelerator.generation is AcceleratorGeneration.AMPERE
            else (split | True,)
        )
        for part in parts:
            chosen = {name: column[part] for name, column in rows.items()}
            self.combinations += len(chosen["data"])
            if len(chosen["data"]):
                self._predict(kind, chosen)

    def _held_gib(self, kind: int, rows: dict[str, Counts]) -> Floats:
        """GiB of each rank's memory that copies of states take: on CPUs it is the node's memory, on GPUs another one, so 0."""
        if self.offer.machine.accelerator.generation is not AcceleratorGeneration.CPU:
            return np.zeros(len(rows["data"]))
        shards = rows["tensor"] * rows["pipeline"] * (1 if KINDS[kind][1] is StateSharding.DDP else rows["data"])
        held: Floats = np.where(rows["nodes"] > 1, self.work.held_states, 0.0) * self.work.state_gib / shards
        return held

    def _predict(self, kind: int, rows: dict[str, Counts]) -> None:
        offer, work = self.offer, self.work
        needed = memory_of_ranks(work.shape, offer.machine, _layouts(kind, rows, work, offer), bundled=work.bundled)
        memory_gib = needed.total + self._held_gib(kind, rows)
        usable_gib_of_rank = self.bounds.memory_share * usable_gib(offer.machine)
        fits = memory_gib <= usable_gib_of_rank
        if not fits.all():
            over = np.flatnonzero(~fits)
            nearest = over[np.argmin(memory_gib[over])]
            layout = _layouts(kind, rows, work, offer).one(int(nearest))
            self.lacks.append(Shortfall(Need.MEMORY, len(over), float(memory_gib[nearest]), usable_gib_of_rank, layout))
            rows, memory_gib = {name: column[fits] for name, column in rows.items()}, memory_gib[fits]
        if not len(memory_gib):
            return
        step = step_seconds(work.shape, offer.machine, _layouts(kind, rows, work, offer), self.parameters)
        seconds = step.total
        goodput = self._goodputs(rows["nodes"])
        hours = work.steps * seconds / goodput / 3600
        communication_seconds = step.tensor_communication + step.pipeline_communication + step.data_communication
        same = np.zeros(len(memory_gib), dtype=np.int64)
        self.columns.append(
            Columns(
                offer=same + self.index,
                kind=same + kind,
                **rows,
                memory_gib=memory_gib,
                step_seconds=seconds,
                productive_seconds=step.compute + step.optimizer,
                bubble_seconds=step.bubble + same,
                communication_seconds=communication_seconds + same,
                goodput=goodput,
                hours=hours,
                usd=hours * (rows["nodes"] * offer.node_hourly_usd + work.fixed_hourly_usd(offer)),
            )
        )

    def _goodputs(self, nodes: Counts) -> Floats:
        values, where = np.unique(nodes, return_inverse=True)
        for n in values:
            if int(n) not in self._goodput:
                self._goodput[int(n)] = goodput_of(self.work, self.offer, int(n))
        return np.array([self._goodput[int(n)] for n in values])[where]


def _layouts(kind: int, rows: Mapping[str, Counts], work: Work, offer: Offer) -> Layouts:
    schedule, sharding, recompute = KINDS[kind]
    return Layouts(
        data=rows["data"],
        tensor=rows["tensor"],
        pipeline=rows["pipeline"],
        context=1,
        sharding=sharding,
        interleave=rows["interleave"],
        recompute=recompute,
        micro_batch=rows["micro_batch"],
        global_batch=work.global_batch,
        precision=offer.precision,
        schedule=schedule,
    )


def checkpointing(work: Work, offer: Offer, nodes: int) -> tuple[float, float]:
    """Seconds for which a checkpoint blocks training, and the best seconds between two, see `goodput.optimal_interval`."""
    stall_seconds = max(0.05, work.state_gib * GIB / nodes / COPY_BYTES_PER_SECOND)
    return stall_seconds, optimal_interval(stall_seconds, 3600 / (nodes * offer.failures_per_hour))


def goodput_of(work: Work, offer: Offer, nodes: int) -> float:
    """Productive share of time of a run on so many nodes; never below one in a thousand."""
    stall_seconds, interval_seconds = checkpointing(work, offer, nodes)
    mtbf_seconds = 3600 / (nodes * offer.failures_per_hour)
    return max(1e-3, expected_goodput(interval_seconds, stall_seconds, RECOVERY_SECONDS, mtbf_seconds))


def _joined(parts: list[Columns]) -> Columns:
    if not parts:
        empty = np.zeros(0)
        return Columns(**dict.fromkeys(Columns.__dataclass_fields__, empty))
    return Columns(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in Columns.__dataclass_fields__}
    )


def _within_limits(columns: Columns, offers: Sequence[Offer], bounds: Bounds) -> tuple[Columns, list[Shortfall]]:
    """Rows that meet price, budget and deadline, each checked on what the one before left."""
    lacks: list[Shortfall] = []
    node_hourly_usd = np.array([offer.node_hourly_usd for offer in offers])
    deadline_hours = None if bounds.deadline_seconds is None else bounds.deadline_seconds / 3600
    limits: tuple[tuple[Need, float | None, Callable[[Columns], Floats]], ...] = (
        (Need.HOURLY, bounds.max_hourly_usd, lambda c: node_hourly_usd[c.offer.astype(np.int64)] * c.nodes),
        (Need.DEADLINE, deadline_hours, lambda c: c.hours),
        (Need.BUDGET, bounds.budget_usd, lambda c: c.usd),
    )
    for need, limit, figure in limits:
        if limit is None or not len(columns):
            continue
        values = figure(columns)
        over = values > limit
        if over.any():
            lacks.append(Shortfall(need, int(over.sum()), float(values[over].min()), limit))
            columns = columns.take(~over)
    return columns, lacks


def _merged(lacks: Sequence[Shortfall]) -> list[Shortfall]:
    """One shortfall for all those of memory, with the nearest of them."""
    if not lacks:
        return []
    nearest = min(lacks, key=lambda s: s.nearest / s.limit)
    return [replace(nearest, combinations=sum(s.combinations for s in lacks))]
