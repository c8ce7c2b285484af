"""Ranks that work longer on the same than their peers do, over a whole window."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_aware_operator.observing.samples import Observation, Scrape, observe

STRAGGLING = 1.3
"""Times the median of its peers that a rank must work to be named."""
UNEQUALLY_STRAGGLING = 1.5
"""Times the median if peers have other work: its ratio is computed and not measured, and caches and small kernels break it."""
DEVIATIONS = 3 * 1.4826
"""And so many median absolute deviations from it, which are three standard deviations of normal noise."""

StageWorks = Sequence[Sequence[float]]


@dataclass(frozen=True)
class SlowRank:
    """One straggler."""

    rank: int
    """Its number."""
    working_seconds: float
    """Seconds of a step in which it computes and updates."""
    peers_seconds: float
    """The median of its peers' seconds."""

    @property
    def slowdown(self) -> float:
        """Times as long."""
        return self.working_seconds / self.peers_seconds


def stragglers(scrapes: Sequence[Scrape], stage_ranks: int, works: StageWorks = ()) -> tuple[SlowRank, ...]:
    """The stragglers of a window: ranks that are outliers in the whole of it and in each half, so that a burst names nobody.

    Peers are the ranks of one pipeline stage (`stage_ranks` of them, numbered one after the other): they compute the same. A stage of
    one rank has none; it is held against the other stages by what each has to compute, and nothing is said of it where that is
    not known. `works` holds estimates of that, each of all stages in a unit of its own, and a straggler is one by all of them.
    """
    whole = observe(scrapes)
    if whole is None:
        return ()
    found = _outliers(whole, stage_ranks, works)
    if not found:
        return ()
    own = [s for s in scrapes if any(r.attempt == whole.attempt for r in s.ranks)]
    half = len(own) // 2
    parts = (observe(own[: half + 1]), observe(own[half:])) if len(own) > 2 else ()
    for part in parts:
        if part is not None:
            held = {s.rank for s in _outliers(part, stage_ranks, works)}
            found = [s for s in found if s.rank in held]
    return tuple(found)


def _outliers(seen: Observation, stage_ranks: int, works: StageWorks) -> list[SlowRank]:
    if stage_ranks == 1:
        ranks = len(seen.working_seconds)
        return _among_stages(seen.working_seconds, [work for work in works if len(work) == ranks and min(work) > 0])
    stages: dict[int, dict[int, float]] = {}
    for rank, worked in sorted(seen.working_seconds.items()):
        stages.setdefault(rank // stage_ranks, {})[rank] = worked
    return [slow for stage in stages.values() for slow in _of_stage(stage, STRAGGLING)]


def _among_stages(working_seconds: Mapping[int, float], works: StageWorks) -> list[SlowRank]:
    """Ranks that are slow for what they compute by every estimate of it; how slow, by the mildest."""
    mildest: dict[int, SlowRank] | None = None
    for work in works:
        pace = {rank: worked / work[rank] for rank, worked in working_seconds.items()}
        slow = {
            s.rank: SlowRank(s.rank, working_seconds[s.rank], s.peers_seconds * work[s.rank])
            for s in _of_stage(pace, UNEQUALLY_STRAGGLING)
        }
        known = slow if mildest is None else mildest
        mildest = {r: max(slow[r], known[r], key=lambda s: s.peers_seconds) for r in slow.keys() & known.keys()}
    return [slow for _, slow in sorted((mildest or {}).items())]


def _of_stage(stage: Mapping[int, float], limit: float) -> Iterator[SlowRank]:
    """Ranks that stand out from the others of their stage; each is left out itself, as among two the median is half its own."""
    if len(stage) < 2:
        return
    order = sorted(stage.values())
    for rank, worked in stage.items():
        usual = median_without(order, bisect_left(order, worked))
        if usual <= 0 or worked < limit * usual:
            continue
        others = [seconds for other, seconds in stage.items() if other != rank]
        if worked - usual > DEVIATIONS * statistics.median(abs(seconds - usual) for seconds in others):
            yield SlowRank(rank, worked, usual)


def median_without(order: Sequence[float], left_out: int) -> float:
    """The median of sorted values without one of them: a stage may have thousands of ranks, and is not sorted for each."""
    count = len(order) - 1
    low, high = (count - 1) // 2, count // 2
    return (order[low + (low >= left_out)] + order[high + (high >= left_out)]) / 2
