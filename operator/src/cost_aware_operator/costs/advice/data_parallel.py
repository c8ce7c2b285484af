"""Data parallelism: what more nodes give and cost, how long gradients take to synchronise, how a batch is shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_aware_operator.costs.checks import AnalysisError, count, not_negative, positive, share
from cost_aware_operator.costs.models.communication import Group
from cost_aware_operator.costs.models.layout import Layout, StateSharding
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.predict import Machine, predict

BUCKET_BYTES = 25 * 2**20
"""torch's DistributedDataParallel reduces gradients in buckets of 25 MiB unless told otherwise (bucket_cap_mb)."""


@dataclass(frozen=True)
class ScalingCost:
    """A run on some nodes, compared with the same run on one."""

    nodes: int
    """Nodes of the run."""
    hours: float
    """Hours of the run."""
    speedup: float
    """Hours on one node over hours on these."""
    efficiency: float
    """Speed-up over nodes. Every node is billed for as long as the run takes, so this equals one node's dollars over
    these: `cost_efficiency` in the seed's tables."""
    total_usd: float
    """Dollars of the run."""
    lost_usd: float
    """Dollars that perfect scaling would not have cost."""


@dataclass(frozen=True)
class Synchronisation:
    """Gradient synchronisation of one step, in seconds."""

    buckets: int
    """Buckets sent."""
    total: float
    """Seconds of all communication."""
    exposed: float
    """Seconds of communication after backward has ended."""
    slowed: float
    """Seconds that hidden traffic takes from computation beside it."""

    @property
    def hidden(self) -> float:
        """What ran while backward computed."""
        return self.total - self.exposed

    @property
    def cost_seconds(self) -> float:
        """What the step takes longer."""
        return self.exposed + self.slowed


@dataclass(frozen=True)
class BatchShare:
    """The global batch shared out over ranks, in sequences."""

    ranks: int
    """Ranks that share the batch."""
    larger: int
    """Sequences of a rank with the larger share."""
    larger_ranks: int
    """Ranks with the larger share."""
    smaller: int
    """Sequences of every other rank."""
    micro_batches: tuple[int, ...]
    """Sequences of each pass of a rank with the larger share, in order."""

    @property
    def global_batch(self) -> int:
        """The batch that was asked for, exactly."""
        return self.larger * self.larger_ranks + self.smaller * (self.ranks - self.larger_ranks)

    @property
    def even(self) -> bool:
        """Whether all ranks do the same."""
        return self.larger_ranks == self.ranks

    @property
    def efficiency(self) -> float:
        """1 where the batch divides evenly."""
        return self.global_batch / (self.ranks * self.larger)


class DataParallelCostAnalyzer:
    """Scaling efficiency, synchronisation time, batch distribution."""

    def scaling_efficiency(self, single_node_seconds: float, seconds: float, nodes: int) -> float:
        """T1 / (n Tn) of the same work, strong scaling (Amdahl 1967). Above 1 is possible, through caches or smaller shards.

        Raises:
            AnalysisError: a time that is not positive, or fewer than 1 node.
        """
        one = positive("single_node_seconds", single_node_seconds)
        return one / (count("nodes", nodes) * positive("seconds", seconds))

    def cost_of_times(self, single_node_hours: float, hours: float, nodes: int, hourly_usd: float) -> ScalingCost:
        """Dollars from measured or predicted hours: nodes x hours x price of a node.

        Raises:
            AnalysisError: a figure that is not positive.
        """
        efficiency = self.scaling_efficiency(single_node_hours, hours, nodes)
        usd = positive("hourly_usd", hourly_usd, 1e9)
        positive("single_node_hours", single_node_hours, 1e9)
        total = nodes * positive("hours", hours, 1e9) * usd
        return ScalingCost(nodes, hours, single_node_hours / hours, efficiency, total, total - single_node_hours * usd)

    def cost_of_efficiency(
        self, single_node_hours: float, efficiency: float, nodes: int, hourly_usd: float
    ) -> ScalingCost:
        """Hours and dollars at a known efficiency: hours = T1 / (n e).

        Raises:
            AnalysisError: a figure that is not positive, or an efficiency above 2.
        """
        share("efficiency", positive("efficiency", efficiency), 2.0)
        hours = positive("single_node_hours", single_node_hours, 1e9) / (count("nodes", nodes) * efficiency)
        return self.cost_of_times(single_node_hours, hours, nodes, hourly_usd)

    def predicted(
        self,
        shape: DecoderShape,
        machine: Machine,
        layout: Layout,
        data_degrees: Sequence[int],
        steps: int,
        hourly_usd: float,
    ) -> tuple[ScalingCost, ...]:
        """`steps` steps of `layout` at each data degree, from the cost model, with the global batch kept.

        `hourly_usd` is a whole node's. Speed-up and efficiency count from the first degree, whose nodes stand for the seed's one.

        Raises:
            AnalysisError: no degree; a degree by which the global batch does not divide into micro-batches; a price or a count
                that is not positive.
        """
        if not data_degrees:
            raise AnalysisError("data_degrees: empty: write at least one degree, such as 1")
        count("steps", steps)
        hours: list[tuple[int, float]] = []
        for degree in data_degrees:
            unit = count("data_degrees", degree) * layout.micro_batch
            if layout.global_batch % unit:
                fits = [d for d in range(1, degree + 1) if layout.global_batch % (d * layout.micro_batch) == 0]
                nearest = f"write {fits[-1]}" if fits else "write a micro_batch that divides global_batch"
                raise AnalysisError(
                    f"data_degrees: {degree} x micro_batch {layout.micro_batch} does not divide global_batch "
                    f"({layout.global_batch}): {nearest}"
                )
            at = replace(layout, data=degree)
            nodes = math.ceil(at.ranks / machine.gpus_per_node)
            hours.append((nodes, steps * predict(shape, machine, at).step_seconds / 3600))
        first_nodes, first_hours = hours[0]
        return tuple(self.cost_of_times(first_nodes * first_hours, h, nodes, hourly_usd) for nodes, h in hours)

    def synchronisation(
        self,
        group: Group,
        gradient_bytes: float,
        backward_seconds: float,
        *,
        sharding: StateSharding = StateSharding.DDP,
        bucket_bytes: float = BUCKET_BYTES,
        slowdown: float = FITTED.gather_slowdown,
    ) -> Synchronisation:
        """Seconds of one step's gradient synchronisation, with buckets sent while backward goes on.

        Gradients are made evenly over the last backward of the step (`backward_seconds`) and cut into n equal buckets of at most
        `bucket_bytes`; each takes c seconds on one stream. The first is ready at T/n, the last at T, so communication ends at
        max(T/n + n c, T + c), and max(c, n c - T (n-1)/n) is exposed: the last bucket never hides (`exposed_seconds`).
        DDP all-reduces; ZeRO-1 to 3 reduce-scatter (their gathers belong to the weights, not to the gradients).

        Raises:
            AnalysisError: bytes, seconds or share out of range.
        """
        size = not_negative("gradient_bytes", gradient_bytes)
        window = not_negative("backward_seconds", backward_seconds)
        share("slowdown", slowdown)
        if size == 0 or group.size <= 1:
            return Synchronisation(0, 0.0, 0.0, 0.0)
        buckets = max(1, math.ceil(size / positive("bucket_bytes", bucket_bytes)))
        one = (group.all_reduce if sharding is StateSharding.DDP else group.reduce_scatter)(size / buckets)
        exposed = exposed_seconds(one, buckets, window)
        return Synchronisation(buckets, buckets * one, exposed, slowdown * (buckets * one - exposed))

    def distribute_batch(self, global_batch: int, ranks: int, largest_micro_batch: int) -> BatchShare:
        """The global batch, unchanged, over `ranks`, in as few passes as memory allows.

        Shares differ by at most one sequence. A rank needs ceil(share / largest) passes. Passes of powers of two are taken where
        their number is not larger; else passes of equal size, to within one sequence, as their longest is then shortest.

        Raises:
            AnalysisError: a count below 1, more ranks than sequences, or more than a million passes.
        """
        count("global_batch", global_batch)
        count("largest_micro_batch", largest_micro_batch)
        if count("ranks", ranks) > global_batch:
            raise AnalysisError(
                f"ranks: {ranks} is more than global_batch ({global_batch}): write {global_batch} or fewer"
            )
        smaller, over = divmod(global_batch, ranks)
        larger = smaller + 1 if over else smaller
        passes = math.ceil(larger / largest_micro_batch)
        if passes > 10**6:
            least = math.ceil(larger / 10**6)
            raise AnalysisError(
                f"largest_micro_batch: {largest_micro_batch} means {passes} passes a step: write {least} or more"
            )
        return BatchShare(ranks, larger, over or ranks, smaller, _passes(larger, passes, largest_micro_batch))


def exposed_seconds(bucket_seconds: float, buckets: int, backward_seconds: float) -> float:
    """What n equal buckets of c seconds leave after a backward of T seconds: max(c, n c - T (n-1)/n), at most n c."""
    last = max(bucket_seconds, buckets * bucket_seconds - backward_seconds * (buckets - 1) / buckets)
    return min(last, buckets * bucket_seconds)


def _passes(sequences: int, passes: int, largest: int) -> tuple[int, ...]:
    power = 1 << (largest.bit_length() - 1)
    while power >= 1 and (passes - 1) * power < sequences <= passes * power:
        last = sequences - (passes - 1) * power
        if last & (last - 1) == 0:
            return (power,) * (passes - 1) + (last,)
        power //= 2
    each, over = divmod(sequences, passes)
    return (each + 1,) * over + (each,) * (passes - over)
