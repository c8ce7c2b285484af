"""Everything one reconcile knows, gathered once; the decisions are functions of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.costs.tables.prices import PriceBook
from cost_aware_operator.observing.samples import RankSample, Scrape
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.views import ChildJobView, NodeView, PodView
from cost_aware_trainer.contract import AgentStatus, RunOrder, RunResult


@dataclass(frozen=True)
class MissingClaim:
    """A PersistentVolumeClaim that the manifest names and the namespace lacks."""

    field: str
    name: str


@dataclass(frozen=True)
class Unheard:
    """A rank whose metrics are missing or cannot be true, why, and for how many seconds."""

    rank: str
    why: str
    seconds: float


@dataclass(frozen=True)
class Facts:
    """One job's world at one moment.

    `pods` holds the pods that exist, `departed` those whose deletion was watched and not yet accounted. `agents` and
    `samples` are by pod uid and hold only who answered. `obstacle` names an object of a child's name that is not the job's.
    `scrapes` is the recent history, newest last. `cluster_nodes` are looked up only while they may matter; None where that is not
    so, or nodes may not be listed. `unheard` are ranks without metrics, or with some that cannot be true. `told_ends` are ends of
    pods that vanished, by uid, as their agents have left word of them.
    """

    job: TrainingJob
    now: datetime
    child: ChildJobView | None
    pods: tuple[PodView, ...]
    departed: tuple[PodView, ...]
    nodes: Mapping[str, NodeView]
    record: RunRecord
    order: RunOrder | None
    result: RunResult | None
    prices: PriceBook
    defaults: PodDefaults
    missing_claims: tuple[MissingClaim, ...] = ()
    obstacle: str = ""
    agents: Mapping[str, AgentStatus] = field(default_factory=dict)
    samples: Mapping[str, tuple[RankSample, ...]] = field(default_factory=dict)
    scrapes: Sequence[Scrape] = ()
    unheard: tuple[Unheard, ...] = ()
    told_ends: Mapping[str, datetime] = field(default_factory=dict)
    cluster_nodes: tuple[NodeView, ...] | None = None
    scrape_interval_seconds: float = 5.0
