"""Samples of ranks with nothing but speed and phases."""

from __future__ import annotations

from cost_aware_operator.observing.samples import RankSample
from cost_aware_trainer.contract import Phase


def sample(rank: int, seconds: float, attempt: int = 1, share: float = 0.8) -> RankSample:
    phases = {Phase.COMPUTE: seconds * share, Phase.COMMUNICATION: seconds * (1 - share)}
    return RankSample(rank, attempt, steps=seconds, tokens=seconds * 10, step_seconds=seconds, phase_seconds=phases)
