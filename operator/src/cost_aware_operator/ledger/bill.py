"""A job's bill: its ledger beside the job, so that it outlives it. Pure."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from cost_aware_operator.ledger.ledger import LedgerState

CHILDREN_KEPT = 20
"""Jobs of a training job that a bill remembers, the newest."""


class Bill(BaseModel):
    """What one job has cost, by its uid. Open while a pod of it may be paid for; fields of a newer operator are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    uid: str
    """The job's uid."""
    namespace: str
    """Its namespace."""
    name: str
    """Its name."""
    opened_at: datetime
    """When the bill was opened."""
    closed_at: datetime | None = None
    """When the last pod had ended and the job was gone; None while the bill is open."""
    expired: bool = False
    """Whether the operator deleted the job, as its time had come (`ttlSecondsAfterFinished`)."""
    outcome: str = ""
    """Succeeded or Failed; empty for a run that did not end by itself."""
    trains: str = ""
    """Hash of what the manifest trains: another job with the same hash would do the same again."""
    folder: str = ""
    """Volume and folder of its checkpoints."""
    children: tuple[str, ...] = ()
    """Uids of the Jobs that were made for it, oldest first."""
    budget_usd: float | None = None
    """Dollars that it may spend; None without a budget."""
    storage_hourly_usd: float = 0.0
    """Dollars an hour of its checkpoints, while it has pods."""
    management_hourly_usd: float = 0.0
    """Dollars an hour of the control plane, while it has pods."""
    estimated: bool = False
    """Whether a pod's end is not known, so that it was booked up to when it was last seen."""
    ledger: LedgerState = LedgerState()
    """The books."""

    def with_child(self, uid: str | None) -> Bill:
        """The bill that knows of a Job."""
        if uid is None or uid in self.children:
            return self
        return self.model_copy(update={"children": (*self.children, uid)[-CHILDREN_KEPT:]})

    def closed(self, now: datetime) -> Bill:
        """The bill without what was only needed while pods could still change it."""
        estimated = self.estimated or any(account.estimated for account in self.ledger.accounts)
        ends = [account.accounted_until for account in self.ledger.accounts]
        return self.model_copy(
            update={
                "closed_at": min(now, max(ends, default=now)),
                "estimated": estimated,
                "ledger": self.ledger.model_copy(update={"accounts": (), "settled": {}}),
            }
        )
