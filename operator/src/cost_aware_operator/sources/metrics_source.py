"""What is asked of pods' agents, and of a source of the ranks' metrics, whichever they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import AgentStatus, Release, RunOrder


def rank_name(rank: int, pod: PodView) -> str:
    """A rank as conditions and logs name it."""
    return f"rank {rank} (pod {pod.name})"


@dataclass(frozen=True)
class Answers:
    """A source's answer about one job's ranks."""

    samples: Mapping[str, tuple[RankSample, ...]] = field(default_factory=dict)
    """Samples by pod uid."""
    unheard: Mapping[str, str] = field(default_factory=dict)
    """Why a rank has no sample, by `rank_name`."""
    age_seconds: float = 0.0
    """Seconds since the samples were true."""


class Agents(Protocol):
    """The pods' agents: what they tell, and what they are told. Bounded in time and size; who is silent is left out."""

    async def statuses(self, pods: Iterable[PodView]) -> Mapping[str, AgentStatus]:
        """Statuses of usable pods' agents by pod uid; who does not answer is left out."""

    async def ends(self, pods: Iterable[PodView]) -> Mapping[str, datetime]:
        """When pods of a job ended, by uid, as one of a few that live can tell; the first that answers is believed."""

    async def order(self, pods: Iterable[PodView], order: RunOrder, token: str) -> None:
        """Tells agents of an attempt. Who does not hear it is told again at the next reconcile."""

    async def release(self, pods: Iterable[PodView], release: Release, token: str) -> None:
        """Lets pods go."""


class MetricsSource(Protocol):
    """A source of the ranks' metrics."""

    async def samples(self, job: JobKey, pods: Iterable[PodView], ranks_per_node: int) -> Answers:
        """The newest samples of a job's usable pods. Bounded in time and size; what goes wrong is told in the answer."""
