"""Protocols of the pods' agents and of a source of the ranks' metrics."""

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


@dataclass(frozen=True)
class AgentAnswers:
    """The answers of one job's agents. Those that do not answer are in neither part."""

    statuses: Mapping[str, AgentStatus] = field(default_factory=dict)
    """Statuses by pod uid."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Why an answer cannot be read, by pod uid, in fixed words: what a pod says may have come from anywhere."""


class Agents(Protocol):
    """The pods' agents. Calls are bounded in time and size; agents that do not answer are left out."""

    async def statuses(self, pods: Iterable[PodView]) -> AgentAnswers:
        """Statuses of usable pods' agents."""

    async def ends(self, pods: Iterable[PodView]) -> Mapping[str, datetime]:
        """Ends of a job's pods by uid, as a live agent can tell them; the first of a few that answers is believed."""

    async def order(self, pods: Iterable[PodView], order: RunOrder, token: str) -> Mapping[str, str]:
        """Tells agents of an attempt. An agent that does not hear it is told again at the next reconcile.

        Returns:
            Why an agent refuses it, by pod uid, in fixed words.
        """

    async def release(self, pods: Iterable[PodView], release: Release, token: str) -> None:
        """Lets pods go."""


class MetricsSource(Protocol):
    """A source of the ranks' metrics."""

    async def samples(self, job: JobKey, pods: Iterable[PodView], ranks_per_node: int) -> Answers:
        """The newest samples of a job's usable pods. Bounded in time and size; what goes wrong is told in the answer."""
