"""Workers that take keys from the queue and reconcile them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.control.loop.queue import KeyedQueue
from cost_aware_operator.engines.cluster import ApiError, ConflictError

logger = logging.getLogger(__name__)
RECONCILE_TIMEOUT_SECONDS = 120.0


class Reports(Protocol):
    """A receiver of the workers' reports."""

    def reconciled(self, seconds: float, outcome: str) -> None:
        """One reconcile ended: `ok`, `conflict`, `api_error` or `error`."""


def about(key: JobKey) -> dict[str, str]:
    """Fields by which a log line says which job it is about."""
    return {"namespace": key.namespace, "job": key.name}


async def work(
    queue: KeyedQueue[JobKey],
    reconcile: Callable[[JobKey], Awaitable[float | None]],
    reports: Reports,
    monotonic: Callable[[], float],
) -> None:
    """One worker; runs until cancelled. A job that cannot be reconciled is tried again later and never stops the others."""
    while True:
        key = await queue.take()
        began, outcome, again = monotonic(), "ok", None
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_SECONDS):
                again = await reconcile(key)
        except ConflictError as error:
            outcome = "conflict"
            logger.info("somebody else wrote first, trying again: %s", error, extra=about(key))
        except (ApiError, TimeoutError) as error:
            outcome = "api_error"
            logger.warning("%s", error, extra=about(key))
        except Exception:
            outcome = "error"
            logger.exception("reconcile failed", extra=about(key))
        if outcome == "ok" and again is not None:
            queue.add_after(key, again)
        reports.reconciled(monotonic() - began, outcome)
        await queue.done(key, failed=outcome != "ok")
