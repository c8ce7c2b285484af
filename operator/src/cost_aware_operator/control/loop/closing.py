"""Books of jobs that are gone, or whose manifest or record cannot be read: their pods are paid for until they end."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.control.reading.bills import Bills, StoredBill, is_of
from cost_aware_operator.control.reading.gather import Gatherer
from cost_aware_operator.control.reading.memory import Memories
from cost_aware_operator.control.reading.unreadable_record import RecordUnreadableError
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.ledger.accounts import LAG_SECONDS
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.ledger.ledger import Cause, Fees, PodFacts, TrainedSteps, accrue
from cost_aware_operator.sources.clock import Clock
from cost_aware_operator.workload.views import NodeView, PodView

logger = logging.getLogger(__name__)
CLOSING_SECONDS = 2.0
"""How often to look while pods of a job that is gone still end."""


class Bookkeeper:
    """Keeps the bills of jobs that no reconcile keeps."""

    def __init__(self, bills: Bills, gatherer: Gatherer, memories: Memories, clock: Clock) -> None:
        self._bills, self._gatherer, self._memories, self._clock = bills, gatherer, memories, clock

    async def close(self, key: JobKey, alive: str | None) -> float | None:
        """Books the pods of all jobs of a name but the one that is alive, and closes the bills of those without any.

        Returns:
            Seconds after which to look again; None where every bill is closed.

        Raises:
            ApiError: the API server refused or could not be reached.
        """
        again = None
        for uid in sorted(await self._bills.open_of(key) - {alive}):
            try:
                stored = await self._bills.read(uid)
            except RecordUnreadableError as error:
                # left as it is: an operator that can read it closes it
                logger.error("%s", error)
                continue
            if stored is None or stored.bill.closed_at is not None:
                continue
            try:
                stored = await self.book(key, stored)
            except ApiError as error:
                if error.status != 403:
                    raise
                # its namespace is not watched any more: the bill stays open for an operator that may look there
                logger.warning("the bill of %s (uid %s) stays open: %s", key, uid, error)
                continue
            if all(account.closed for account in stored.bill.ledger.accounts):
                bill = stored.bill.closed(self._clock.now())
                await self._bills.save(bill, stored.version)
                logger.info(
                    "the bill of %s (uid %s) is closed: $%.2f", key, uid, bill.ledger.accrued_usd,
                    extra={"namespace": key.namespace, "job": key.name},
                )  # fmt: skip
            else:
                again = CLOSING_SECONDS
        return again

    async def book(self, key: JobKey, stored: StoredBill) -> StoredBill:
        """A bill with its pods booked up to now or to their end, saved where that changed it."""
        bill = stored.bill
        accounts = {account.uid: account for account in bill.ledger.accounts}
        departed = self._memories.departed(key)
        views = [*await self._gatherer.pods(key), *departed.values()]
        own = {pod.uid: pod for pod in views if is_of(pod, bill.uid, bill.children, accounts)}
        nodes = await self._gatherer.nodes_of(own.values())
        pods = [one for pod in own.values() if (one := self._facts(pod, nodes)) is not None]
        fees = Fees(bill.storage_hourly_usd, bill.management_hourly_usd)
        ledger = accrue(bill.ledger, pods, TrainedSteps(), self._clock.now(), fees, None, LAG_SECONDS)
        if ledger == bill.ledger:
            return stored
        saved = await self._bills.save(bill.model_copy(update={"ledger": ledger}), stored.version)
        for uid in own.keys() & departed.keys():
            departed.pop(uid)
        return saved

    def _facts(self, pod: PodView, nodes: Mapping[str, NodeView]) -> PodFacts | None:
        if pod.started_at is None:
            return None
        node = nodes.get(pod.node or "")
        return PodFacts(
            uid=pod.uid,
            index=pod.index,
            started_at=pod.started_at,
            ended_at=pod.ended_at,
            instance_type=node.instance_type if node is not None else None,
            zone=node.zone if node is not None else None,
            scheduled_at=pod.scheduled_at or pod.created_at,
            is_end_watched=pod.is_end_watched,
            price=self._gatherer.price(node) if node is not None else None,
            otherwise=Cause.IDLE,
        )


def is_spent(bill: Bill) -> bool:
    """Whether a bill has reached its job's budget."""
    return bill.budget_usd is not None and bill.ledger.accrued_usd >= bill.budget_usd
