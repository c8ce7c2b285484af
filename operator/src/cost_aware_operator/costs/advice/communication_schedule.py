"""Buckets of gradients: how large, so that the least communication is left when backward ends. Overlap is simulated, not assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cost_aware_operator.costs.checks import AnalysisError, count, not_negative
from cost_aware_operator.costs.models.communication import Group

MOST_EXACT = 48
"""Up to this many layers every bucket size that groups them differently is tried."""
MOST_LAYERS = 2000
GRID = 96


@dataclass(frozen=True)
class LayerGradients:
    """One layer's part of the backward pass."""

    seconds: float
    """Seconds until its gradients are made, counted from the end of the layer before."""
    size_bytes: int
    """Bytes of its gradients, a whole number."""


@dataclass(frozen=True)
class Sent:
    """One bucket on the communication stream, in seconds since backward began."""

    size_bytes: float
    """Bytes of the bucket."""
    ready: float
    """Seconds at which its last gradient is made."""
    start: float
    """Seconds at which sending begins."""
    end: float
    """Seconds at which sending ends."""


@dataclass(frozen=True)
class Timeline:
    """Backward with its communication beside it."""

    bucket_bytes: float
    """Bytes at which a bucket is closed."""
    backward_seconds: float
    """Seconds of the backward pass."""
    sent: tuple[Sent, ...]
    """Buckets in the order in which they were sent."""

    @property
    def communication_seconds(self) -> float:
        """What the stream was busy for."""
        return sum((bucket.end - bucket.start for bucket in self.sent), 0.0)

    @property
    def exposed_seconds(self) -> float:
        """From the end of backward to the end of communication."""
        return max(0.0, self.sent[-1].end - self.backward_seconds) if self.sent else 0.0

    @property
    def overlap(self) -> float:
        """Share of communication that ran beside backward; 1 where there is none to hide."""
        busy = self.communication_seconds
        return max(0.0, 1 - self.exposed_seconds / busy) if busy > 0 else 1.0


@dataclass(frozen=True)
class BucketAdvice:
    """The bucket size to set and what it achieves, beside the alternatives."""

    best: Timeline
    """Timeline of the advised bucket size."""
    whole: Timeline
    """Timeline of one bucket for all gradients."""
    per_layer: Timeline
    """Timeline of one bucket for each layer."""
    bound_seconds: float
    """Exposed seconds of the best grouping of consecutive layers, whether of one bucket size or not."""

    @property
    def bucket_mib(self) -> float:
        """As torch's `bucket_cap_mb` counts."""
        return self.best.bucket_bytes / 2**20

    @property
    def regret_seconds(self) -> float:
        """What a free choice of every bucket would save still."""
        return max(0.0, self.best.exposed_seconds - self.bound_seconds)


class CommunicationScheduler:
    """Chooses buckets for layers in the order of backward: the last layer of the model first.

    Args:
        layers: each layer's backward seconds and gradient bytes, in the order of backward.
        reduce_seconds: seconds of one collective of that many bytes, such as `Group.all_reduce`. It must not fall with size.

    Raises:
        AnalysisError: no layers, too many, or figures out of range.
    """

    def __init__(self, layers: Sequence[LayerGradients], reduce_seconds: Callable[[float], float]) -> None:
        if not 1 <= len(layers) <= MOST_LAYERS:
            raise AnalysisError(f"layers: {len(layers)} of them: write 1 to {MOST_LAYERS}")
        for i, layer in enumerate(layers):
            not_negative(f"layers[{i}].seconds", layer.seconds)
            count(f"layers[{i}].size_bytes", layer.size_bytes, 0, 10**18)
        self._reduce = reduce_seconds
        self._ready = tuple(accumulate(layer.seconds for layer in layers))
        self._sizes = tuple(layer.size_bytes for layer in layers)
        self._upto = (0, *accumulate(self._sizes))

    @classmethod
    def even(cls, layers: int, gradient_bytes: float, backward_seconds: float, group: Group) -> CommunicationScheduler:
        """A model of equal layers, all-reduced over `group`.

        Raises:
            AnalysisError: figures out of range.
        """
        if not 1 <= layers <= MOST_LAYERS:
            raise AnalysisError(f"layers: got {layers}: write {max(1, min(layers, MOST_LAYERS))}")
        size, seconds = (
            not_negative("gradient_bytes", gradient_bytes),
            not_negative("backward_seconds", backward_seconds),
        )
        return cls([LayerGradients(seconds / layers, math.ceil(size / layers))] * layers, group.all_reduce)

    def simulate(self, bucket_bytes: float) -> Timeline:
        """Backward with buckets closed as soon as they hold `bucket_bytes` or more, or nothing is left to come.

        A layer's gradients are not cut. A bucket is ready when its last gradient is, and waits for those before it: one stream, in
        order, as in DistributedDataParallel (Li et al. 2020, section 3.2).

        Raises:
            AnalysisError: a size below 0, or none.
        """
        not_negative("bucket_bytes", bucket_bytes, math.inf)
        sent: list[Sent] = []
        end, first = 0.0, 0
        last = len(self._sizes) - 1
        for i, ready in enumerate(self._ready):
            size = self._upto[i + 1] - self._upto[first]
            if (size < bucket_bytes and i < last) or size <= 0:
                continue
            start = max(ready, end)
            end = start + self._reduce(size)
            sent.append(Sent(size, ready, start, end))
            first = i + 1
        return Timeline(bucket_bytes, self._ready[-1], tuple(sent))

    def optimise(self) -> BucketAdvice:
        """The bucket size with the least exposed time; of equals the one with the fewest buckets.

        Up to 48 layers all sizes are tried at which the grouping changes: the sums of consecutive layers. Beyond, a geometric grid
        of 96 from the smallest layer to the whole.
        """
        timelines = [self.simulate(size) for size in self._candidates()]
        best = min(timelines, key=lambda t: (t.exposed_seconds, len(t.sent), t.bucket_bytes))
        return BucketAdvice(best, self.simulate(self._upto[-1]), self.simulate(0.0), self._bound())

    def _candidates(self) -> list[float]:
        whole, layers = self._upto[-1], len(self._sizes)
        if whole <= 0:
            return [0.0]
        if layers <= MOST_EXACT:
            sums = {self._upto[j] - self._upto[i] for i in range(layers) for j in range(i + 1, layers + 1)}
            return sorted(size for size in sums if size > 0)
        least = max(min(size for size in self._sizes if size > 0), whole * 1e-9)
        return [min(whole, least * (whole / least) ** (k / (GRID - 1))) for k in range(GRID)]

    def _bound(self) -> float:
        """Best grouping by dynamic programming: end(j) = min over i < j of max(end(i), ready(j)) + seconds(i..j).

        Exact, as an earlier end of the first layers never makes the rest end later. For many layers, whose n^2/2 groups would take
        long, the bound is that of communication alone: nothing starts before the first gradient, the last is never hidden.
        """
        layers = len(self._sizes)
        if self._upto[-1] <= 0:
            return 0.0
        if layers > MOST_EXACT * 4:
            after = self._reduce(self._sizes[-1]) if self._sizes[-1] > 0 else 0.0
            return max(after, self._reduce(self._upto[-1]) - (self._ready[-1] - self._ready[0]))
        ends = [0.0] * (layers + 1)
        for j in range(1, layers + 1):
            ready = self._ready[j - 1]
            ends[j] = min(
                max(ends[i], ready) + self._reduce(size) if (size := self._upto[j] - self._upto[i]) > 0 else ends[i]
                for i in range(j)
            )
        return max(0.0, ends[layers] - self._ready[-1])
