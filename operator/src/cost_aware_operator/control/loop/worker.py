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
    """Where workers report how it went."""

    def reconciled(self, seconds: float, outcome: str) -> None:
        """One reconcile ended: `ok`, `conflict`, `api_error` or `error`."""


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
            logger.info("%s: somebody else wrote first, trying again: %s", key, error)
        except (ApiError, TimeoutError) as error:
            outcome = "api_error"
            logger.warning("%s: %s", key, error)
        except Exception:
            outcome = "error"
            logger.exception("%s: reconcile failed", key)
        if outcome == "ok" and again is not None:
            queue.add_after(key, again)
        reports.reconciled(monotonic() - began, outcome)
        await queue.done(key, failed=outcome != "ok")
