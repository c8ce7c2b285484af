"""Accounts of single pods: what is known of one, and up to when it is booked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from cost_aware_operator.costs.tables.prices import Price
from cost_aware_trainer.contract import Phase


class Cause(StrEnum):
    """What a pod's time went to."""

    PRODUCTIVE = "productive"
    COMMUNICATION = "communication"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    LOST_WORK = "lost_work"
    IDLE = "idle"


LAG_SECONDS = 5.0
"""How long ago a second of a pod that runs must be to be booked: by then its kubelet would have told of its end."""

CLOCKS_APART = timedelta(seconds=90)
"""How far the clocks of two machines that are looked after may be apart, and news late on top of it."""


@dataclass(frozen=True)
class PodFacts:
    """One pod as the ledger sees it."""

    uid: str
    """The pod's uid."""
    index: int
    """Its index in the Job."""
    started_at: datetime
    """When its container started."""
    ended_at: datetime | None
    """When it ended; None while it runs."""
    instance_type: str | None
    """Its node's type; None if not known."""
    zone: str | None
    """Its node's zone; None if not known."""
    price: Price | None
    """Its node's price; None if not known."""
    scheduled_at: datetime | None = None
    """When it was given its node, by the control plane's clock; its other times are by its node's. None if not known."""
    is_end_watched: bool = False
    """Whether its end is when its deletion was seen here, and not what its node said."""
    attempt: int = 0
    """The attempt that its ranks belong to."""
    phase_seconds: Mapping[Phase, float] | None = None
    """Seconds by phase since that attempt began, the mean over its ranks; None if no rank answered."""
    sent_bytes: float = 0.0
    """Bytes that its ranks sent to others."""
    otherwise: Cause = Cause.IDLE
    """Cause of the time that no phase explains."""

    @property
    def begun_at(self) -> datetime:
        """When it started, but not before it was given its node, as a node's clock that is behind would have it."""
        return max(self.started_at, self.scheduled_at or self.started_at)


class Stored(BaseModel):
    """Base of what is stored: fields of a newer operator are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")


class PodAccount(Stored):
    """What is known of one pod's costs so far. `credit` holds seconds of phases that were reported and not yet booked.

    `estimated`: it was closed without its pod's end being known. `clock_ahead_seconds`: how far its node's clock is ahead of the
    operator's, negative where it is behind. `seen_until`: up to when a pod was booked whose end was then estimated.
    """

    uid: str
    index: int
    instance_type: str | None
    zone: str | None
    hourly_usd: float | None
    started_at: datetime
    accounted_until: datetime
    closed: bool = False
    estimated: bool = False
    gone_since: datetime | None = None
    clock_ahead_seconds: float = 0.0
    seen_until: datetime | None = None
    attempt: int = 0
    seen: dict[Phase, float] = {}
    seen_bytes: float = 0.0
    credit: dict[Phase, float] = {}


class LedgerState(Stored):
    """The ledger of one job: what is booked, and the accounts of pods that exist."""

    usd: dict[Cause, float] = {}
    seconds: dict[Cause, float] = {}
    data_usd: float = 0.0
    """Dollars of waiting for data, a part of `idle`."""
    transfer_usd: float = 0.0
    storage_usd: float = 0.0
    management_usd: float = 0.0
    fees_until: datetime | None = None
    pod_seconds: float = 0.0
    unpriced_pod_seconds: float = 0.0
    attempt: int = 0
    attempt_resumed_step: int = 0
    trained_step: int = 0
    trained_steps: int = 0
    accounts: tuple[PodAccount, ...] = ()
    settled: dict[str, datetime] = {}
    """Pods that were paid to their end a while ago and are still listed, by uid, with when they were listed last: all that is left of
    their accounts, as a job that lives long meets thousands."""

    @property
    def accrued_usd(self) -> float:
        """The sum over all causes."""
        return sum(self.usd.values())

    def without_end(self) -> set[str]:
        """Uids of pods that still run, or whose end is not known."""
        return {account.uid for account in self.accounts if account.estimated or not account.closed}

    @property
    def goodput(self) -> float | None:
        """The productive share of all pod-seconds that were booked by cause; None before the first."""
        booked = sum(self.seconds.values())
        return self.seconds.get(Cause.PRODUCTIVE, 0.0) / booked if booked > 0 else None

    def by_cause(self, cause: Cause) -> float:
        """Dollars of one cause."""
        return self.usd.get(cause, 0.0)

    @field_validator("usd", "seconds", mode="before")
    @classmethod
    def _known_causes(cls, sums: Any) -> Any:
        """A cause of a newer operator's counts as idle here: no dollar is lost."""
        if not isinstance(sums, dict):
            return sums
        known = {name: value for name, value in sums.items() if name in set(Cause)}
        others = [value for name, value in sums.items() if name not in known]
        if not others or not all(isinstance(v, int | float) for v in (*others, known.get(Cause.IDLE, 0.0))):
            return sums
        return {**known, Cause.IDLE: known.get(Cause.IDLE, 0.0) + sum(others)}


def opened(pod: PodFacts, now: datetime) -> PodAccount:
    """The account of a pod that is seen for the first time, with how far its node's clock can be seen to be off."""
    ahead = 0.0
    if pod.scheduled_at is not None and pod.started_at < pod.scheduled_at:
        ahead = (pod.started_at - pod.scheduled_at).total_seconds()
    elif pod.started_at > now:
        ahead = (pod.started_at - now).total_seconds()
    return PodAccount(
        uid=pod.uid,
        index=pod.index,
        instance_type=pod.instance_type,
        zone=pod.zone,
        hourly_usd=pod.price.hourly_usd if pod.price is not None else None,
        started_at=pod.started_at,
        accounted_until=pod.started_at,
        clock_ahead_seconds=ahead,
    )


def booked_until(account: PodAccount, pod: PodFacts, now: datetime, lag_seconds: float) -> datetime:
    """The moment, by the node's clock, up to which a pod is booked: its end, or as long as it surely ran.

    A node's clock that jumps while a pod runs makes its end one that cannot be: none lies far beyond the present, nor far before what
    the pod was last seen to run.
    """
    present = now + timedelta(seconds=account.clock_ahead_seconds)
    if pod.ended_at is None:
        return present - timedelta(seconds=lag_seconds)
    if pod.is_end_watched:
        return max(account.started_at, pod.ended_at + timedelta(seconds=account.clock_ahead_seconds))
    seen = (
        account.accounted_until - CLOCKS_APART if account.accounted_until > account.started_at else account.started_at
    )
    return min(max(pod.ended_at, seen, account.started_at), present + CLOCKS_APART)
