"""Ranks that work longer on the same than their peers do, over a whole window."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_aware_operator.observing.samples import Observation, Scrape, observe

STRAGGLING = 1.3
"""Times the median of its peers that a rank must work to be named."""
DEVIATIONS = 3 * 1.4826
"""And so many median absolute deviations from it, which are three standard deviations of normal noise."""


@dataclass(frozen=True)
class SlowRank:
    """One straggler: seconds of a step in which it computes and updates, and those of the median of its peers."""

    rank: int
    working_seconds: float
    peers_seconds: float

    @property
    def slowdown(self) -> float:
        """Times as long."""
        return self.working_seconds / self.peers_seconds


def stragglers(scrapes: Sequence[Scrape], stage_ranks: int) -> tuple[SlowRank, ...]:
    """The stragglers of a window: ranks that are outliers in the whole of it and in each half, so that a burst names nobody.

    Peers are the ranks of one pipeline stage (`stage_ranks` of them, numbered one after the other): they compute the same. A stage of
    one rank has none, and nothing is said of it.
    """
    whole = observe(scrapes)
    if whole is None:
        return ()
    own = [s for s in scrapes if any(r.attempt == whole.attempt for r in s.ranks)]
    half = len(own) // 2
    parts = (observe(own[: half + 1]), observe(own[half:])) if len(own) > 2 else ()
    found = _outliers(whole, stage_ranks)
    for part in parts:
        if part is not None:
            held = {s.rank for s in _outliers(part, stage_ranks)}
            found = [s for s in found if s.rank in held]
    return tuple(found)


def _outliers(seen: Observation, stage_ranks: int) -> list[SlowRank]:
    stages: dict[int, dict[int, float]] = {}
    for rank, worked in sorted(seen.working_seconds.items()):
        stages.setdefault(rank // stage_ranks, {})[rank] = worked
    return [slow for stage in stages.values() for rank in stage if (slow := _outlier(rank, stage)) is not None]


def _outlier(rank: int, stage: Mapping[int, float]) -> SlowRank | None:
    """A rank against the others of its stage; itself left out, as among two the median is half its own."""
    others = [worked for other, worked in stage.items() if other != rank]
    if not others:
        return None
    usual = statistics.median(others)
    spread = statistics.median(abs(worked - usual) for worked in others)
    worked = stage[rank]
    if usual <= 0 or worked < STRAGGLING * usual or worked - usual <= DEVIATIONS * spread:
        return None
    return SlowRank(rank, worked, usual)
