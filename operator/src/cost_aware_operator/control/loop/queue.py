"""A keyed work queue: a key is worked on by one worker at a time, and asked for many times it is worked on once.

The shape of client-go's work queue: `add` while a key is being worked on marks it dirty, so that it is taken again after; failures
back off exponentially; `add_after` remembers only the earliest time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 60.0


class KeyedQueue(Generic[K]):
    """The queue. `monotonic` is the clock whose seconds `oldest_seconds` is counted in."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._ready: deque[K] = deque()
        self._waiting_since: dict[K, float] = {}
        self._working: set[K] = set()
        self._dirty: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def oldest_seconds(self) -> float:
        """Seconds that the oldest key has waited."""
        since = self._waiting_since.values()
        return self._monotonic() - min(since) if since else 0.0

    async def add(self, key: K) -> None:
        """Asks for a key to be worked on soon."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._working:
            self._dirty.add(key)
            return
        if key in self._waiting_since:
            return
        self._waiting_since[key] = self._monotonic()
        self._ready.append(key)
        async with self._wake:
            self._wake.notify()

    def add_after(self, key: K, seconds: float) -> None:
        """Asks for a key to be worked on later; the earliest such time counts."""
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, seconds)
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= when:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        task = asyncio.ensure_future(self.add(key))
        task.add_done_callback(lambda done: done.result() if not done.cancelled() else None)

    async def take(self) -> K:
        """The next key; waits for one. `done` must follow."""
        async with self._wake:
            await self._wake.wait_for(lambda: bool(self._ready))
            key = self._ready.popleft()
        del self._waiting_since[key]
        self._working.add(key)
        return key

    async def done(self, key: K, *, failed: bool = False) -> None:
        """The work on a key has ended; a failure brings it back after a pause that doubles each time."""
        self._working.discard(key)
        if failed:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            self.add_after(key, min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (failures - 1)))
        else:
            self._failures.pop(key, None)
        if key in self._dirty:
            self._dirty.discard(key)
            await self.add(key)

    def forget(self, key: K) -> None:
        """Drops what is remembered of a key that is gone."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._failures.pop(key, None)
