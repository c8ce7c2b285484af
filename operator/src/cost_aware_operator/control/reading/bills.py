"""Bills of all jobs, in the operator's own namespace: they outlive jobs, and whoever may edit a job's namespace cannot empty them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cost_aware_operator.api import LABEL_JOB
from cost_aware_operator.api.job import JobKey, TrainingJob
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.control.reading.unreadable_record import RecordUnreadableError
from cost_aware_operator.engines.cluster import Cluster
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.ledger.blocks import total_usd
from cost_aware_operator.ledger.ledger import Fees
from cost_aware_operator.workload.names import checkpoint_folder
from cost_aware_operator.workload.views import PodView

logger = logging.getLogger(__name__)
LABEL_BILL = "costaware.dev/bill"
"""On every bill: `open` or `closed`."""
LABEL_NAMESPACE = "costaware.dev/namespace"
"""On every bill: the job's namespace."""
KEY_BILL = "bill.json"
KEY_OLDER = "older.json"
OLDER = "catj-bills-older"
"""The ConfigMap with the sums of closed bills that are not kept one by one any more."""
CLOSED_KEPT = 1000
"""Closed bills that are kept one by one, the newest."""
SWEPT_EVERY = 50
"""Bills that are closed between two looks at how many there are."""


@dataclass(frozen=True)
class StoredBill:
    """A bill as it was read."""

    bill: Bill
    """The bill."""
    version: str
    """The version that it was read at."""


def bill_name(uid: str) -> str:
    """The ConfigMap of a job's bill."""
    return f"catj-bill-{uid}"


def trains(job: TrainingJob) -> str:
    """Hash of what a manifest trains and where it is kept: what may change while a run goes on does not count."""
    parts = job.spec.model_dump(mode="json", include={"trainer", "model", "batch"}, exclude_defaults=True)
    text = json.dumps([parts, job.spec.checkpoint.volume, job.spec.checkpoint.folder], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bill_of(
    job: TrainingJob,
    record: RunRecord,
    before: Bill | None,
    child: str | None,
    fees: Fees,
    now: datetime,
    expired: bool,
) -> Bill:
    """A job's bill as its record has the books now."""
    opened = before or Bill(uid=job.uid, namespace=job.key.namespace, name=job.key.name, opened_at=now)
    ended = "" if record.ended_at is None else "Failed" if record.failed is not None else "Succeeded"
    return opened.with_child(child).model_copy(
        update={
            "ledger": record.ledger,
            "outcome": ended,
            "expired": expired or opened.expired,
            "trains": trains(job),
            "folder": f"{job.spec.checkpoint.volume}:{checkpoint_folder(job)}",
            "budget_usd": job.spec.budget.total_usd if job.spec.budget is not None else None,
            "storage_hourly_usd": fees.storage_hourly_usd,
            "management_hourly_usd": fees.management_hourly_usd,
        }
    )


def is_of(pod: PodView, uid: str, children: Iterable[str], accounts: Iterable[str]) -> bool:
    """Whether a pod is paid for by a job: by the job's uid on it, and without that by the Job that made it, or by its account."""
    if pod.job_uid:
        return pod.job_uid == uid
    return pod.owner_uid in children or pod.uid in accounts


class Bills:
    """All bills. Which of them are open is listed once and then remembered: only the leader writes them."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._open: dict[JobKey, set[str]] | None = None
        self._closed_since = SWEPT_EVERY

    async def open_of(self, key: JobKey) -> frozenset[str]:
        """Uids of the jobs of a name, one after the other, whose bills are open."""
        return frozenset((await self._index()).get(key, ()))

    async def open_keys(self) -> frozenset[JobKey]:
        """Names of all jobs with an open bill."""
        return frozenset(await self._index())

    async def read(self, uid: str) -> StoredBill | None:
        """A job's bill; None where it has none.

        Raises:
            RecordUnreadableError: it is of another form.
        """
        stored = await self._cluster.config_map(self._namespace, bill_name(uid))
        if stored is None:
            return None
        try:
            return StoredBill(Bill.model_validate_json(stored.data.get(KEY_BILL, "")), stored.resource_version)
        except ValueError as error:
            raise RecordUnreadableError(f"{self._namespace}/{bill_name(uid)}", error, KEY_BILL) from error

    async def save(self, bill: Bill, version: str | None) -> StoredBill:
        """Writes a bill over the version that was read.

        Raises:
            ConflictError: another leader wrote it.
        """
        state = "open" if bill.closed_at is None else "closed"
        document = self._document(bill_name(bill.uid), {KEY_BILL: bill.model_dump_json()})
        document["metadata"]["labels"] |= {
            LABEL_BILL: state,
            LABEL_JOB: bill.name[:63],
            LABEL_NAMESPACE: bill.namespace,
        }
        saved = StoredBill(bill, await self._cluster.save_config_map(document, version))
        index, key = await self._index(), JobKey(bill.namespace, bill.name)
        if bill.closed_at is None:
            index.setdefault(key, set()).add(bill.uid)
            return saved
        index.get(key, set()).discard(bill.uid)
        if not index.get(key):
            index.pop(key, None)
        self._closed_since += 1
        if self._closed_since >= SWEPT_EVERY:
            self._closed_since = 0
            await self._sweep()
        return saved

    async def done_before(self, job: TrainingJob) -> Bill | None:
        """The bill of a job of this name that trained the same to its end and was deleted when its time had come; the newest."""
        named = {LABEL_BILL: "closed", LABEL_JOB: job.key.name[:63], LABEL_NAMESPACE: job.key.namespace}
        found = [bill for _, bill in await self._listed(named)]
        wanted = trains(job)
        same = [b for b in found if b.expired and b.outcome == "Succeeded" and b.trains == wanted and b.uid != job.uid]
        return max(same, key=lambda bill: bill.opened_at, default=None)

    async def _index(self) -> dict[JobKey, set[str]]:
        if self._open is None:
            found: dict[JobKey, set[str]] = {}
            for _, bill in await self._listed({LABEL_BILL: "open"}):
                found.setdefault(JobKey(bill.namespace, bill.name), set()).add(bill.uid)
            self._open = found
        return self._open

    async def _listed(self, labels: Mapping[str, str]) -> list[tuple[dict[str, Any], Bill]]:
        """Bills by labels; one that cannot be read is left where it is, and told of when its job is looked at."""
        found = []
        for document in await self._cluster.config_maps(self._namespace, labels):
            try:
                found.append((document, Bill.model_validate_json((document.get("data") or {}).get(KEY_BILL, ""))))
            except ValueError:
                logger.error("ConfigMap %s/%s is no bill", self._namespace, document["metadata"]["name"])
        return found

    async def _sweep(self) -> None:
        """Adds the oldest closed bills to the sums by namespace, and removes them: how many there are is bounded."""
        closed = sorted(await self._listed({LABEL_BILL: "closed"}), key=lambda one: mark_of(one[1]))
        for document, bill in closed[: max(0, len(closed) - CLOSED_KEPT)]:
            stored = await self._cluster.config_map(self._namespace, OLDER)
            sums = json.loads(stored.data.get(KEY_OLDER, "{}")) if stored is not None else {}
            sums = with_sum(sums, bill)
            document_of_sums = self._document(OLDER, {KEY_OLDER: json.dumps(sums, sort_keys=True)})
            version = stored.resource_version if stored is not None else None
            await self._cluster.save_config_map(document_of_sums, version)
            name = document["metadata"]["name"]
            await self._cluster.delete("ConfigMap", JobKey(self._namespace, name), document["metadata"]["uid"])

    def _document(self, name: str, data: Mapping[str, str]) -> dict[str, Any]:
        labels = {
            "app.kubernetes.io/name": "cost-aware-training",
            "app.kubernetes.io/managed-by": "cost-aware-operator",
        }
        metadata = {"name": name, "namespace": self._namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(data)}


def mark_of(bill: Bill) -> str:
    """A bill's place among closed ones, by when it was closed."""
    return f"{(bill.closed_at or bill.opened_at).isoformat()} {bill.uid}"


def with_sum(sums: Mapping[str, Any], bill: Bill) -> dict[str, Any]:
    """The sums with a bill; one that was added already, by a leader that died before it removed the bill, is not added again."""
    mine = dict(sums.get(bill.namespace) or {"jobs": 0, "usd": 0.0, "newest": ""})
    mark = mark_of(bill)
    if mark > mine["newest"]:
        mine |= {"jobs": mine["jobs"] + 1, "usd": mine["usd"] + total_usd(bill.ledger), "newest": mark}
    return {**sums, bill.namespace: mine}
