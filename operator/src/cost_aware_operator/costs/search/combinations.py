"""Every combination of counts and choices that a plan may be within bounds, as columns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_aware_operator.costs.checks import AnalysisError, count, not_negative, positive, share
from cost_aware_operator.costs.models.layout import Recompute, StateSharding
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.memory import GIB
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.tables.hardware import NumberFormat
from cost_aware_operator.costs.tables.hazards import node_hazard

MICRO_BATCH_CAP = 64
"""Largest micro-batch that is tried, in sequences: beyond it products are as efficient as they get."""
STATE_BYTES = 12.0
"""Bytes of one weight in a checkpoint: fp32 master, momentum, variance."""
HOURS_A_MONTH = 730.0
MOST_ROWS = 5_000_000
"""A search over more combinations would take gigabytes; the message says what to bound."""

Counts = NDArray[Any]


@dataclass(frozen=True)
class Offer:
    """Nodes of one kind at one price."""

    name: str
    """Name that a person would call it by: the instance type, with ` spot` where it is spot."""
    machine: Machine
    """Hardware of one node."""
    node_hourly_usd: float
    """Dollars an hour of one node."""
    precision: NumberFormat
    """Type in which matrix products are computed."""
    spot: bool = False
    """Whether the nodes are bought as spot."""
    management_hourly_usd: float = 0.0
    """Dollars an hour of the control plane, whatever the number of nodes."""
    storage_usd_per_gib_month: float = 0.0
    """Dollars for one GiB kept for a month where checkpoints lie."""

    def __post_init__(self) -> None:
        positive(f"offer {self.name}: hourly_usd", self.node_hourly_usd, 1e6)
        not_negative(f"offer {self.name}: management_hourly_usd", self.management_hourly_usd, 1e6)
        not_negative(f"offer {self.name}: storage_usd_per_gib_month", self.storage_usd_per_gib_month, 1e6)

    @property
    def failures_per_hour(self) -> float:
        """Failures of one node an hour."""
        return node_hazard(self.machine.gpus_per_node, spot=self.spot)


@dataclass(frozen=True)
class Work:
    """The training to be done."""

    shape: DecoderShape
    """The model."""
    global_batch: int
    """Sequences of one step."""
    steps: int
    """Optimizer steps of the run."""
    checkpoints: int = 0
    """Checkpoints kept on storage."""
    held_states: float = 0.0
    """Copies of its state that a node's memory holds for each of its ranks."""
    bundled: bool = False
    """Whether the bundled trainer does it, of whose memory more is known than of other frameworks'."""

    def __post_init__(self) -> None:
        count("global_batch", self.global_batch)
        count("steps", self.steps)
        count("checkpoints", self.checkpoints, 0)
        not_negative("held_states", self.held_states, 100)

    @property
    def state_gib(self) -> float:
        """GiB of one checkpoint: weights and both moments in fp32."""
        return STATE_BYTES * self.shape.parameters / GIB

    def fixed_hourly_usd(self, offer: Offer) -> float:
        """Dollars an hour that do not depend on the nodes: the control plane and the checkpoints that are kept."""
        stored_hourly_usd = self.checkpoints * self.state_gib * offer.storage_usd_per_gib_month / HOURS_A_MONTH
        return offer.management_hourly_usd + stored_hourly_usd


@dataclass(frozen=True)
class Bounds:
    """Limits of a search. An empty tuple, or None, leaves a choice open."""

    nodes_min: int = 1
    """Fewest nodes."""
    nodes_max: int = 1
    """Most nodes."""
    data: tuple[int, ...] = ()
    """Data-parallel degrees to try."""
    tensor: tuple[int, ...] = ()
    """Tensor-parallel degrees to try."""
    pipeline: tuple[int, ...] = ()
    """Numbers of pipeline stages to try."""
    micro_batch: tuple[int, ...] = ()
    """Micro-batch sizes to try, in sequences."""
    shardings: tuple[StateSharding, ...] = tuple(StateSharding)
    """State shardings to try; at least one."""
    recomputes: tuple[Recompute, ...] = tuple(Recompute)
    """Kinds of recompute to try; at least one."""
    schedules: tuple[PipelineSchedule, ...] = tuple(PipelineSchedule)
    """Pipeline schedules to try; at least one."""
    max_hourly_usd: float | None = None
    """Dollars an hour that all nodes together may cost."""
    budget_usd: float | None = None
    """Dollars that the whole run may cost."""
    deadline_seconds: float | None = None
    """Seconds that the whole run may take."""
    memory_share: float = 1.0
    """Share of a rank's memory that a plan may be predicted to need, 0 to 1."""
    filled_pipelines: bool = False
    """Whether a pipeline takes as many micro-batches as it has stages, or more, as torch's 1F1B does."""
    whole_vocabulary_shards: bool = False
    """Whether tensor ranks divide the vocabulary and the sequence without padding."""

    def __post_init__(self) -> None:
        count("nodes_min", self.nodes_min)
        count("nodes_max", self.nodes_max, self.nodes_min)
        for name in ("max_hourly_usd", "budget_usd", "deadline_seconds"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        share("memory_share", self.memory_share)
        for name in ("shardings", "recomputes", "schedules"):
            if not getattr(self, name):
                raise AnalysisError(f"{name}: is empty: write one or more")


KINDS = tuple(
    product(
        (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE, PipelineSchedule.ZERO_BUBBLE), StateSharding, Recompute
    )
)
"""Choices that have no number, by index. An interleaved schedule is 1F1B with several chunks a stage."""


def divisors(number: int) -> list[int]:
    """All divisors of a number, smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def grid(work: Work, offer: Offer, bounds: Bounds) -> dict[str, Counts]:
    """Every count within the bounds that divides what it must, one column a count.

    Raises:
        AnalysisError: more combinations than memory holds.
    """
    shape, batch, gpus = work.shape, work.global_batch, offer.machine.gpus_per_node
    ways = math.gcd(shape.heads, shape.kv_heads, shape.ffn)
    if bounds.whole_vocabulary_shards:
        ways = math.gcd(ways, shape.vocabulary, shape.sequence_length)
    tensors = _chosen(divisors(ways), bounds.tensor)
    pipelines = _chosen(range(1, shape.layers + 1), bounds.pipeline)
    datas = _chosen(divisors(batch), bounds.data)
    t, p, d = (a.ravel() for a in np.meshgrid(tensors, pipelines, datas, indexing="ij"))
    ranks = t * p * d
    nodes = ranks // gpus
    fits = (ranks % gpus == 0) & (nodes >= bounds.nodes_min) & (nodes <= bounds.nodes_max)
    t, p, d, nodes = t[fits], p[fits], d[fits], nodes[fits]
    sizes = {int(n): _chosen(_micro_batch_sizes(batch // int(n)), bounds.micro_batch) for n in np.unique(d)}
    t, p, d, nodes, micro_batch = _spread(sizes, d, (t, p, d, nodes))
    micro_batches = batch // (d * micro_batch)
    chunks = {int(n): _chunks(shape.layers, int(n)) for n in np.unique(p)}
    t, p, d, nodes, micro_batch, micro_batches, v = _spread(chunks, p, (t, p, d, nodes, micro_batch, micro_batches))
    # an interleaved pipeline takes micro-batches in groups of as many as stages
    works = ((v == 1) | (micro_batches % p == 0)) & ((micro_batches >= p) | (not bounds.filled_pipelines))
    if works.sum() > MOST_ROWS:
        raise AnalysisError(
            f"nodes, parallelism: {works.sum():,} combinations are too many: bound a degree or the nodes"
        )
    found = {"nodes": nodes, "data": d, "tensor": t, "pipeline": p, "micro_batch": micro_batch, "interleave": v}
    return {name: column[works] for name, column in found.items()}


def _spread(choices: dict[int, list[int]], by: Counts, columns: tuple[Counts, ...]) -> tuple[Counts, ...]:
    """Each row once for each choice that goes with its value in `by`; the choice is the last column."""
    sizes = np.array([len(choices[int(n)]) for n in by], dtype=np.int64)
    chosen = [c for n in by for c in choices[int(n)]]
    return (*(np.repeat(column, sizes) for column in columns), np.array(chosen, dtype=np.int64))


def _micro_batch_sizes(share: int) -> list[int]:
    return [n for n in divisors(share) if n <= MICRO_BATCH_CAP]


def _chunks(layers: int, stages: int) -> list[int]:
    """Chunks of a stage: 1, or any number that cuts all stages' layers evenly."""
    if stages == 1 or layers % stages:
        return [1]
    return divisors(layers // stages)


def _chosen(possible: Iterable[int], wanted: tuple[int, ...]) -> list[int]:
    return [n for n in possible if not wanted or n in wanted]


def rows_of(
    columns: dict[str, Counts], schedule: PipelineSchedule, sharding: StateSharding, bounds: Bounds
) -> NDArray[np.bool_]:
    """Rows in which a choice makes a difference: a schedule needs stages, sharding needs replicas."""
    piped, chunked = columns["pipeline"] > 1, columns["interleave"] > 1
    if schedule is PipelineSchedule.ONE_F_ONE_B:
        plain, interleaved = (wanted in bounds.schedules for wanted in (schedule, PipelineSchedule.INTERLEAVED))
        rows = np.where(chunked, interleaved, plain | ~piped)
    else:
        rows = piped & ~chunked & (schedule in bounds.schedules)
    return np.asarray(rows if sharding is StateSharding.DDP else rows & (columns["data"] > 1), dtype=np.bool_)


def why_none(work: Work, offers: Iterable[Offer], bounds: Bounds) -> str:
    """Message for bounds within which no degrees fill whole nodes: the problem and what to write."""
    offers = tuple(offers)
    sizes = ", ".join(sorted({f"{offer.name} ({offer.machine.gpus_per_node} ranks a node)" for offer in offers}))
    asked = f"nodes from {bounds.nodes_min} to {bounds.nodes_max} of {sizes} and a global batch of {work.global_batch}"
    for names in (("data",), ("data", "micro_batch"), ("data", "tensor", "pipeline", "micro_batch")):
        if not any(getattr(bounds, name) for name in names):
            continue
        for offer in offers:
            columns = grid(work, offer, _without(bounds, names))
            if len(columns["data"]):
                example = ", ".join(f"{name}: {columns[name][0]}" for name in names)
                return f"parallelism: the degrees asked for do not fill {asked}: write {example}"
    for offer in offers:
        columns = grid(work, offer, replace(bounds, nodes_min=1, nodes_max=max(64, 2 * bounds.nodes_max)))
        if len(columns["nodes"]):
            nearest = min(set(columns["nodes"].tolist()), key=lambda n: abs(n - bounds.nodes_min))
            return f"nodes: no degrees fill {asked}: write {nearest} nodes"
    ranks = offers[0].machine.gpus_per_node * bounds.nodes_min
    batch = max(ranks, round(work.global_batch / ranks) * ranks)
    return f"batch.global: no degrees fill {asked}: write {batch}"


def _without(bounds: Bounds, names: tuple[str, ...]) -> Bounds:
    """Bounds that leave some counts open."""
    free: dict[str, Any] = dict.fromkeys(names, ())
    return replace(bounds, **free)
