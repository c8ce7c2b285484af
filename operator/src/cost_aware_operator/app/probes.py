"""Probes that tell the truth, and `/metrics`.

`/livez`: the event loop answers, no key has waited for a worker too long, and the watches deliver what a list shows to be there.
`/readyz`: this replica has listed everything once, or stands by and asks for the Lease. A standby is ready: otherwise a rolling
update would wait for a replica that waits for the one before it to end. Who leads is in the metrics and in the Lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

WATCH_LAG_LIMIT_SECONDS = 180.0
QUEUE_AGE_LIMIT_SECONDS = 300.0


@dataclass
class Health:
    """Figures that the probes look at."""

    monotonic: Callable[[], float]
    """A clock that only grows, in seconds."""
    queue_age: Callable[[], float]
    """Seconds that the oldest key has waited in the queue."""
    standing_by: bool = False
    """Whether this process waits for the Lease."""
    leading: bool = False
    """Whether it has the Lease."""
    synced: bool = False
    """Whether its watches have delivered what there is."""
    missing_since: float | None = None
    """Since when a job's change has been missing from the watches; None while none is."""

    def compared(self, missing: bool) -> None:
        """A list was compared with what the watches delivered; `missing` means that they lag behind it."""
        self.missing_since = (self.missing_since or self.monotonic()) if missing else None

    @property
    def watch_lag_seconds(self) -> float:
        """For how long the watches have failed to deliver something that a list shows."""
        return self.monotonic() - self.missing_since if self.missing_since is not None else 0.0

    def why_not_alive(self) -> str:
        """Empty when alive."""
        if self.queue_age() > QUEUE_AGE_LIMIT_SECONDS:
            return f"a job has waited {self.queue_age():.0f} s for a worker"
        if self.leading and self.watch_lag_seconds > WATCH_LAG_LIMIT_SECONDS:
            return f"the watches have missed for {self.watch_lag_seconds:.0f} s what a list shows"
        return ""

    def why_not_ready(self) -> str:
        """Empty when ready."""
        if self.leading:
            return "" if self.synced else "not everything has been listed yet"
        return "" if self.standing_by else "the Lease has not been asked for yet"


async def serve(health: Health, registry: CollectorRegistry, port: int, host: str = "0.0.0.0") -> web.AppRunner:  # noqa: S104
    """Starts serving; the caller cleans the runner up."""

    def answer(why_not: str) -> web.Response:
        return web.Response(text=why_not or "ok", status=503 if why_not else 200)

    async def livez(_: web.Request) -> web.Response:
        return answer(health.why_not_alive())

    async def readyz(_: web.Request) -> web.Response:
        return answer(health.why_not_ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
