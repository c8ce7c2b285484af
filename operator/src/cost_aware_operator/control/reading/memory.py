"""Memory of a job between reconciles. All of it can be lost: it is gathered again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from cost_aware_operator.api.job import JobKey, TrainingJob
from cost_aware_operator.control.reading.bills import StoredBill
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.observing.samples import RankSample, Scrape
from cost_aware_operator.workload.folders import LivingJob
from cost_aware_operator.workload.views import PodView

SCRAPES_KEPT = 13
"""The window of efficiency and throughput: a minute at the default interval."""


DEPARTED_KEPT = 5000
"""Pods that left and are remembered for one name; a pod that no job pays for is never accounted."""


@dataclass
class Memory:
    """One job's memory."""

    uid: str
    """The job's uid."""
    scrapes: deque[Scrape] = field(default_factory=lambda: deque(maxlen=SCRAPES_KEPT))
    """The newest scrapes, oldest first."""
    samples: dict[str, tuple[RankSample, ...]] = field(default_factory=dict)
    """The newest believable samples by pod uid."""
    unheard: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Ranks without a sample that can be believed, by name: since when, and why."""
    unread: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Pods whose agents cannot be worked with, by uid: since when, and why."""
    refused: dict[str, str] = field(default_factory=dict)
    """Pods whose agents refused the newest order, by uid, and why."""
    secret_made: str = ""
    """The Secret that was made for a Job which is still to be made; empty where there is none."""
    departed: dict[str, PodView] = field(default_factory=dict)
    """Pods whose deletion was watched and which are not yet accounted, by uid: of all jobs of the name, one after the other."""
    bill: StoredBill | None = None
    """The job's bill as it was read or written last; None where it has none."""
    bill_read: bool = False
    """Whether the bill was read."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Entries of the stored record that this operator cannot read, and keeps."""
    unknown_fields: tuple[str, ...] = ()
    """What this operator does not know in record and bill, by name."""
    done_before: Bill | None = None
    """The bill of an earlier job that did the same."""
    looked_before: bool = False
    """Whether it was looked for."""
    saved: RunRecord | None = None
    """The newest record; its ledger may be ahead of the stored one."""
    saved_at: float = float("-inf")
    """When the record was written, in seconds of a clock that only grows."""
    dirty: bool = False
    """Whether the record has changed since it was written."""
    record_version: str | None = None
    """The stored record's resource version; None where none is stored."""
    job: TrainingJob | None = None
    """The manifest that was read last."""

    @property
    def living(self) -> LivingJob | None:
        """The job, while it is known and has not ended."""
        ended = self.saved is not None and self.saved.ended_at is not None
        if self.job is None or ended:
            return None
        return LivingJob(self.job, self.saved is not None and self.saved.attempt > 0)


class Memories:
    """Memories of all jobs, in which the pod watch also leaves pods that were deleted."""

    def __init__(self) -> None:
        self._by_key: dict[JobKey, Memory] = {}
        self._departed: dict[JobKey, dict[str, PodView]] = {}

    def of(self, key: JobKey, uid: str) -> Memory:
        """The memory of a job; a new job of an old name begins with none, but for pods that left: each is told by its owner."""
        memory = self._by_key.get(key)
        if memory is None or memory.uid != uid:
            memory = self._by_key[key] = Memory(uid, departed=self.departed(key))
        return memory

    def departed(self, key: JobKey) -> dict[str, PodView]:
        """Pods of jobs of a name whose deletion was watched and which are not yet accounted, by uid."""
        return self._departed.setdefault(key, {})

    def living(self) -> list[LivingJob]:
        """Jobs that are known and have not ended."""
        return [living for memory in self._by_key.values() if (living := memory.living) is not None]

    def depart(self, key: JobKey, pod: PodView, now: datetime) -> None:
        """A pod's deletion was watched: it is kept until it is accounted."""
        if pod.started_at is None:
            return
        left = self.departed(key)
        left[pod.uid] = pod if pod.ended_at is not None else replace(pod, ended_at=now, is_end_watched=True)
        while len(left) > DEPARTED_KEPT:
            del left[next(iter(left))]

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._by_key.pop(key, None)
        self._departed.pop(key, None)
