"""What a source of the ranks' metrics answers, whichever it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.workload.views import PodView


def rank_name(rank: int, pod: PodView) -> str:
    """A rank as conditions and logs name it."""
    return f"rank {rank} (pod {pod.name})"


@dataclass(frozen=True)
class Answers:
    """Samples by pod uid, and for each rank without one why, by `rank_name`. Samples were true `age_seconds` ago."""

    samples: Mapping[str, tuple[RankSample, ...]] = field(default_factory=dict)
    unheard: Mapping[str, str] = field(default_factory=dict)
    age_seconds: float = 0.0


class MetricsSource(Protocol):
    """Where the ranks' metrics come from."""

    async def samples(self, job: JobKey, pods: Iterable[PodView], ranks_per_node: int) -> Answers:
        """The newest samples of a job's usable pods. Bounded in time and size; what goes wrong is told in the answer."""
