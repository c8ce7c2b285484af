"""Background loading of values that are needed next."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Prefetcher(Generic[Key, Value]):
    """Loader of values by key on a thread of its own, at most those of one call of `ahead`.

    Taking a value waits only if it is not ready. A value that was not announced is loaded at once. An error of loading is
    raised when the value is taken.
    """

    def __init__(self, load: Callable[[Key], Value]) -> None:
        self._load = load
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ready: dict[Key, concurrent.futures.Future[Value]] = {}

    def ahead(self, keys: Iterable[Key]) -> None:
        """Starts to load the keys that will be taken next, in this order. Forgets those announced before and not taken."""
        forgotten, self._ready = self._ready, {}
        for future in forgotten.values():
            future.cancel()
        for key in keys:
            self._ready[key] = self._pool.submit(self._load, key)

    def take(self, key: Key) -> Value:
        """Takes the value of a key, once."""
        future = self._ready.pop(key, None)
        return future.result() if future else self._load(key)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
