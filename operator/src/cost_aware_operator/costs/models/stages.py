"""Equal layers over pipeline stages, with a head on the last: as even as frameworks split them, else as balanced as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_aware_operator.costs.elementwise import Numbers, ceil, least, most, where


@dataclass(frozen=True)
class StageLayers:
    """Layers of each pipeline stage: `high` on the first `highs`, then `low`, then `last`. Numbers or arrays."""

    stages: Numbers
    """Stages of the pipeline."""
    highs: Numbers
    """Stages at the front that hold `high` layers."""
    high: Numbers
    """Layers of each of the first `highs` stages."""
    low: Numbers
    """Layers of each stage between those and the last."""
    last: Numbers
    """Layers of the last stage."""

    @property
    def first(self) -> Numbers:
        """Layers of the first stage."""
        return where(self.stages > 1, where(self.highs > 0, self.high, self.low), self.last)

    @property
    def least_of_front(self) -> Numbers:
        """Layers of the emptiest stage before the last; of the last where it is the only one."""
        return where(self.stages > 1, where(self.highs < self.stages - 1, self.low, self.high), self.last)

    @property
    def most(self) -> Numbers:
        """Layers of the fullest stage."""
        return most(self.first, self.last)

    def counts(self) -> tuple[int, ...]:
        """Layers of each stage, of one layout."""
        stages, highs = int(self.stages), int(self.highs)
        front = (int(self.high if i < highs else self.low) for i in range(stages - 1))
        return (*front, int(self.last))


def stage_work(layers: Sequence[int], head_in_layers: float) -> tuple[float, ...]:
    """What each rank of a pipeline computes, in layers; the last has the head besides. The embedding is but a lookup."""
    return tuple(count + head_in_layers * (stage == len(layers) - 1) for stage, count in enumerate(layers))


def interleaved(layers: int, ranks: int, chunks: int) -> tuple[int, ...]:
    """Layers of each rank of a pipeline with several stages on each, in turns: cut evenly, the first stages taking one more."""
    each, rest = divmod(layers, ranks * chunks)
    return tuple(sum(each + (rank + lap * ranks < rest) for lap in range(chunks)) for rank in range(ranks))


def spread(layers: int, stages: Numbers, head_in_layers: Numbers = 0.0) -> StageLayers:
    """Layers over stages, the same on each where they divide; else so that the dearest stage is as cheap as can be.

    The last stage computes the head too, worth `head_in_layers` layers. Where l layers on the last leave the others at most
    ceil((L - l)/(p - 1)), the best l is where both grow equally dear, or the next; of equals the smallest.
    """
    others = most(1, stages - 1)
    balanced = ceil((layers - head_in_layers * others) / (others + 1))
    limit = layers - stages + 1
    last: Numbers = limit
    worst: Numbers = float("inf")
    for offset in (-1, 0, 1):
        tried = most(1, least(balanced + offset, limit))
        cost = most(ceil((layers - tried) / others), tried + head_in_layers)
        # more layers than fill the others to that cost would be on the last for nothing
        fewest = most(1, layers - (cost // 1) * others)
        tried = least(tried, where(fewest + head_in_layers <= cost, most(1, fewest), tried))
        better = cost < worst
        last, worst = where(better, tried, last), where(better, cost, worst)
    even = (layers % stages == 0) | (stages == 1)
    last = where(even, layers // stages, last)
    high = ceil((layers - last) / others)
    rest = layers - last - others * (high - 1)
    highs = where(even | (rest >= others), 0, rest)
    low = where(highs > 0, high - 1, high)
    return StageLayers(stages, highs, high, low, last)
