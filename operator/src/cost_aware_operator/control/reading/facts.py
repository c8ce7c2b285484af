"""Everything that one reconcile has gathered; decisions are functions of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.costs.tables.prices import PriceBook
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.observing.samples import RankSample, Scrape
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.views import ChildJobView, NodeView, PodView
from cost_aware_trainer.contract import AgentStatus, RunOrder, RunResult


@dataclass(frozen=True)
class MissingClaim:
    """A PersistentVolumeClaim that the manifest names and the namespace lacks."""

    field: str
    """The manifest's field."""
    name: str
    """The claim's name."""


@dataclass(frozen=True)
class Unheard:
    """A rank whose metrics are missing or cannot be true."""

    rank: str
    """The rank and its pod, as conditions name them."""
    why: str
    """What is wrong."""
    seconds: float
    """Seconds since the last sample that could be believed."""


@dataclass(frozen=True)
class Unread:
    """An agent that cannot be worked with: its answer is not one, or it refuses orders."""

    uid: str
    """Its pod's uid."""
    pod: str
    """Its pod's name."""
    why: str
    """What is wrong, in words of our own."""
    seconds: float
    """Seconds for which it has been so."""


@dataclass(frozen=True)
class Facts:
    """One job's world at one moment, gathered once and never rewritten."""

    job: TrainingJob
    """The manifest, with the status that was written last."""
    now: datetime
    """The moment."""
    child: ChildJobView | None
    """The Indexed Job; None where there is none of this job."""
    pods: tuple[PodView, ...]
    """Pods that exist, by index and age."""
    departed: tuple[PodView, ...]
    """Pods whose deletion was watched and which are not yet accounted."""
    nodes: Mapping[str, NodeView]
    """Nodes under the pods, by name; those that may not be read are missing."""
    record: RunRecord
    """The record as it is stored."""
    order: RunOrder | None
    """The newest attempt's order."""
    result: RunResult | None
    """What the run came to; None until it is complete."""
    prices: PriceBook
    """Prices of today."""
    defaults: PodDefaults
    """What the installation adds to every pod."""
    former: tuple[PodView, ...] = ()
    """Pods of this job whose Job is gone: they end, and are paid for until they have."""
    bill: Bill | None = None
    """The job's bill; None before the first."""
    done_before: Bill | None = None
    """The bill of an earlier job that trained the same to its end; looked for only before the first pod is made."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the record and the bill that this operator does not know, and keeps."""
    clock_problem: str = ""
    """What is wrong with the operator's clock or the API server's; empty while nothing is."""
    key_versions: frozenset[int] = frozenset({1})
    """Versions of the operator's keys, from which tokens are derived."""
    missing_claims: tuple[MissingClaim, ...] = ()
    """Volumes that the manifest names and that are not there."""
    obstacle: str = ""
    """What to say of an object of a child's name that is not the job's; empty where there is none."""
    folder_taken: str = ""
    """What to say of another living job that has this one's folder of checkpoints; empty where none has."""
    agents: Mapping[str, AgentStatus] = field(default_factory=dict)
    """Agents' answers by pod uid; agents that did not answer are missing."""
    samples: Mapping[str, tuple[RankSample, ...]] = field(default_factory=dict)
    """Newest believable samples of the ranks, by pod uid."""
    scrapes: Sequence[Scrape] = ()
    """The recent history of samples, newest last."""
    unheard: tuple[Unheard, ...] = ()
    """Ranks without metrics that can be believed."""
    unread: tuple[Unread, ...] = ()
    """Agents that cannot be worked with."""
    told_ends: Mapping[str, datetime] = field(default_factory=dict)
    """Ends of pods that vanished unseen, by uid, as the agents left word of them."""
    cluster_nodes: tuple[NodeView, ...] | None = None
    """Nodes where else pods could run, looked up only while they may matter; None otherwise, or where they may not be listed."""
    scrape_interval_seconds: float = 5.0
    """Seconds between two looks at a job that trains."""
