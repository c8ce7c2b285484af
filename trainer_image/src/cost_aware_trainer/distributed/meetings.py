"""Meetings of ranks around storage: they wait for each other's reading and writing by the store, and never inside a collective.

A collective gives up after a fixed time, whatever its ranks do meanwhile. How long storage takes follows from bytes and bandwidth. So
a rank tells the others how many bytes it has read or written, and is waited for as long as that number grows at the pace it has shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from cost_aware_trainer.contract.heartbeat import Heartbeat
from cost_aware_trainer.data.hashing import PIECE_BYTES, OnBytes, unwatched

SILENCE_FACTOR = 20.0
"""Factor on the time that a piece takes at the measured bandwidth, after which ranks that have shown no progress are given up."""
_TOLD_EVERY_SECONDS = 0.25
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05
THREADS = 4
"""Threads of a rank that read files beside each other."""


class StorageError(RuntimeError):
    """Ranks whose storage does not answer. Another attempt may find it better."""


class Meeting:
    """Meeting of all ranks, each of which may have something to read or to write before it comes."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        patience: timedelta,
        pace: OnBytes,
        gone: threading.Event | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._gone = gone or threading.Event()
        self._patience_seconds, self._pace = patience.total_seconds(), pace
        self._heartbeat: Heartbeat | None = None
        self._mine, self._is_over = "", False
        self._lock = threading.Lock()
        self._untold, self._told_at_seconds = 0, 0.0
        self._began_seconds = self.moved_at_seconds = time.monotonic()
        """Moment of the last progress that this rank has made or seen."""

    def beating(self, heartbeat: Heartbeat) -> Meeting:
        """Shows progress in the heartbeat too. For the thread that writes the heartbeat; `progressed` may run on others."""
        self._heartbeat = heartbeat
        return self

    def progressed(self, count: int) -> None:
        """Tells the others that this rank has read or written so many bytes, until it has come itself. Any thread may call it."""
        self._pace(count)
        if self._is_over:
            return
        with self._lock:
            self._untold += count
            now_seconds = self.moved_at_seconds = time.monotonic()
            if self._store is None or now_seconds - self._told_at_seconds < _TOLD_EVERY_SECONDS:
                return
            told, self._untold, self._told_at_seconds = self._untold, 0, now_seconds
        self._store.add("bytes", told)

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Runs this rank's share of the work on a few threads; raises the first error."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="storage") as pool:
            beaten_at_seconds = time.monotonic()
            pending = {pool.submit(job) for job in jobs}
            while pending:
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
                if self._heartbeat and self.moved_at_seconds > beaten_at_seconds:
                    self._heartbeat.beat()
                    beaten_at_seconds = time.monotonic()
                failed = next((error for future in done if (error := future.exception())), None)
                if failed is not None:
                    for future in pending:
                        future.cancel()
                    raise failed

    def told(self) -> list[str]:
        """Texts that the ranks brought, by rank, after all have come."""
        if self._store is None:
            return [self._mine]
        return [self._store.get(f"told/{rank}").decode() for rank in range(self._size)]

    def agree(self, problem: str = "", *, tells: str = "") -> str:
        """Waits for all ranks, and brings them a text; returns the problem of the lowest rank that has one, empty if none has.

        Raises:
            StorageError: ranks do not come, and show no progress.
        """
        self._mine, self._is_over = tells, True
        if self._store is None:
            return problem
        self._store.set(f"told/{self._rank}", tells)
        if self._heartbeat is None:
            return self._agree(self._store, problem, lambda: None)
        with self._heartbeat.waiting():
            heartbeat = self._heartbeat
            return self._agree(self._store, problem, lambda: heartbeat.beat(waits=True))

    def _agree(self, store: Store, problem: str, beat: Callable[[], None]) -> str:
        store.set(f"problem/{self._rank}", problem)
        if problem:
            store.add("problems", 1)
        store.add("come", 1)
        seen, pause_seconds = (0, 0), _SHORTEST_PAUSE_SECONDS
        self.moved_at_seconds = time.monotonic()
        while True:
            now = store.add("come", 0), store.add("bytes", 0)
            if now[0] >= self._size:
                break
            if now != seen:
                seen, self.moved_at_seconds = now, time.monotonic()
                beat()
            if self._gone.is_set():
                raise StorageError("ranks that this one waits for are gone")
            silent_seconds = time.monotonic() - self.moved_at_seconds
            if silent_seconds > self._limit_seconds(now[1]):
                raise StorageError(self._who(store, silent_seconds))
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, _LONGEST_PAUSE_SECONDS)
        told = self._problems(store)
        store.add("left", 1)
        if self._rank == 0:
            # the store may be this process's: it must not end before all have seen that all have come
            deadline_seconds = time.monotonic() + self._patience_seconds
            while store.add("left", 0) < self._size and time.monotonic() < deadline_seconds and not self._gone.is_set():
                time.sleep(_SHORTEST_PAUSE_SECONDS)
        return told

    def _problems(self, store: Store) -> str:
        if not store.add("problems", 0):
            return ""
        told = (store.get(f"problem/{rank}").decode(errors="replace") for rank in range(self._size))
        return next((text for text in told if text), "")

    def _limit_seconds(self, moved_bytes: int) -> float:
        """Seconds without progress that are too many: what a piece takes each rank at the bandwidth so far, many times over."""
        if not moved_bytes:
            return self._patience_seconds
        bytes_per_second = moved_bytes / max(1e-3, time.monotonic() - self._began_seconds) / self._size
        return max(self._patience_seconds, SILENCE_FACTOR * PIECE_BYTES / bytes_per_second)

    def _who(self, store: Store, silent_seconds: float) -> str:
        missing = [rank for rank in range(self._size) if not store.check([f"problem/{rank}"])]
        names = ", ".join(str(rank) for rank in missing[:8]) + (" and more" if len(missing) > 8 else "")
        return (
            f"storage: ranks {names} have neither read nor written anything for {silent_seconds:.0f} s; look at the volumes on "
            "their nodes"
        )


class Meetings:
    """Meetings of a run's ranks, each with a name. All ranks call for the meetings of one name in the same order."""

    def __init__(
        self, store: Store | None, rank: int, size: int, patience: timedelta, pace: OnBytes = unwatched
    ) -> None:
        self._store, self._rank, self._size, self._patience = store, rank, size, patience
        self.pace = pace
        """Called with the bytes of each piece that this rank reads or writes; a slow store for tests."""
        self._numbers: dict[str, int] = {}
        self._gone = threading.Event()

    def abandon(self) -> None:
        """Ends all waits at once: other ranks are gone."""
        self._gone.set()

    def call(self, name: str) -> Meeting:
        """Calls for the next meeting of a name."""
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        if self._store is None:
            return Meeting(None, self._rank, self._size, self._patience, self.pace)
        if self._rank == 0 and number > 1:
            # all have come to the one before, so nobody is at this one any more
            self._clear(f"{name}/{number - 2}")
        store = PrefixStore(f"{name}/{number}", self._store)
        return Meeting(store, self._rank, self._size, self._patience, self.pace, self._gone)

    def _clear(self, name: str) -> None:
        assert self._store is not None  # noqa: S101  there are other ranks
        store = PrefixStore(name, self._store)
        for key in (
            "bytes",
            "come",
            "left",
            "problems",
            *(f"{kind}/{rank}" for kind in ("problem", "told") for rank in range(self._size)),
        ):
            store.delete_key(key)
