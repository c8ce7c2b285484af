"""Stores of data: a folder, or an HTTP(S) server that answers HEAD, and GET with Range, as object stores do.

Files from the network are kept in a cache folder, one copy a host, and checked against the hashes of their manifest. They are
then read through memory maps, as any other data folder is.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from cost_aware_trainer.contract import RUN_FOLDER
from cost_aware_trainer.data.hashing import OnBytes, sha256_of_file, unwatched
from cost_aware_trainer.data.parts import DataError, PassingDataError
from cost_aware_trainer.data.token_files import (
    MANIFEST,
    SPLITS,
    DataManifest,
    PartFacts,
    Split,
)

ENV_CACHE = "CATJ_DATA_CACHE"
"""Cache folder. If unset, it lies under the run folder if there is one, else under the temporary folder."""
PIECE_BYTES = 8 * 2**20
"""Bytes of one request, which a broken connection costs."""
TRIES = 6
"""Number of times that a request is tried."""
FIRST_PAUSE_SECONDS = 0.2
"""Seconds to wait after the first failed try; doubled after each further one, 6 s in all."""
TIMEOUT_SECONDS = 20.0
"""Seconds that a server may be silent."""
_RETRIED = frozenset({408, 425, 429})
"""Statuses below 500 that ask to try again later."""


_T = TypeVar("_T")


class StoreError(DataError):
    """Data that cannot be read. The text names what was asked for, what came, and what to do."""


class UnreachableStoreError(StoreError, PassingDataError):
    """Store that does not answer now, or cache that has no room now. Another attempt may find it better."""


class _PassingError(Exception):
    """Failure that may be gone at the next try."""


class Store(Protocol):
    """Store of named files of known size, of which any range can be read."""

    def size_bytes(self, name: str) -> int:
        """Size of a file in bytes; raises StoreError if there is none."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Reads bytes start … end - 1 of a file, all of them; raises StoreError if that fails."""


def open_store(location: str) -> Store:
    """Opens the store of a path, or of a URL that begins with http:// or https://.

    Raises:
        StoreError: another kind of URL.
    """
    scheme = urllib.parse.urlsplit(location).scheme if "://" in location else ""
    if not scheme:
        return FolderStore(Path(location))
    if scheme not in ("http", "https"):
        raise StoreError(f"{location}: {scheme}:// is not supported; write a path, or an http:// or https:// address")
    return HttpStore(location)


@dataclass(frozen=True)
class FolderStore:
    """Store that is a folder."""

    folder: Path
    """Folder of the files."""

    def size_bytes(self, name: str) -> int:
        """See Store."""
        try:
            return (self.folder / name).stat().st_size
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from None

    def read(self, name: str, start: int, end: int) -> bytes:
        """See Store."""
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                content = file.read(end - start)
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from None
        if len(content) != end - start:
            raise StoreError(f"{self.folder / name}: ends at byte {start + len(content)}, {end} were expected")
        return content


@dataclass(frozen=True)
class HttpStore:
    """Store of files under an address. Server errors, time-outs and bodies cut short are tried again."""

    address: str
    """URL under which the files lie."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """Seconds that the server may be silent."""
    tries: int = TRIES
    """Number of times that a request is tried."""
    first_pause_seconds: float = FIRST_PAUSE_SECONDS
    """Seconds to wait after the first failed try; doubled after each further one."""

    def size_bytes(self, name: str) -> int:
        """See Store."""

        def ask(url: str) -> int:
            with self._open(url, "HEAD", {}) as answer:
                length = answer.headers.get("Content-Length")
            if length is None:
                raise StoreError(f"{url}: the server does not say how large it is; use one that sends Content-Length")
            return int(length)

        return self._try(name, ask)

    def read(self, name: str, start: int, end: int) -> bytes:
        """See Store."""

        def ask(url: str) -> bytes:
            with self._open(url, "GET", {"Range": f"bytes={start}-{end - 1}"}) as answer:
                if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                    raise StoreError(
                        f"{url}: answered {answer.status} to a request with Range; use a server that has ranges"
                    )
                content: bytes = answer.read(end - start)
            if len(content) != end - start:
                raise _PassingError(f"{len(content)} bytes of {end - start} came")
            return content

        return self._try(name, ask)

    def _open(self, url: str, method: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310  checked in open_store
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout_seconds)  # noqa: S310
        return answer

    def _try(self, name: str, ask: Callable[[str], _T]) -> _T:
        url = f"{self.address.rstrip('/')}/{name}"
        pause_seconds = self.first_pause_seconds
        problem: Exception | None = None
        for number in range(self.tries):
            if number:
                time.sleep(pause_seconds)
                pause_seconds *= 2
            try:
                return ask(url)
            except urllib.error.HTTPError as error:
                if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR and error.code not in _RETRIED:
                    raise StoreError(f"{url}: {error.code} {error.reason}") from None
                problem = error
            except (OSError, http.client.HTTPException, _PassingError) as error:
                problem = error
        raise UnreachableStoreError(f"{url}: {problem}, {self.tries} times in a row")


def cache_folder() -> Path:
    """Folder on this host that keeps data from the network."""
    given = os.environ.get(ENV_CACHE)
    if given:
        return Path(given)
    return Path(RUN_FOLDER if os.access(RUN_FOLDER, os.W_OK) else tempfile.gettempdir()) / "catj-data"


def local_folder(location: str, cache: Path | None = None, on_bytes: OnBytes = unwatched) -> Path:
    """Data folder of a location: the path itself, or for an address its copy in the cache, complete and checked.

    One rank of each host fetches, and the others wait for it. A data set is identified by its manifest's hash: a new manifest at
    the same address is another data set, and an old copy is never taken for it.

    Raises:
        StoreError: something cannot be read, or is not what the manifest says.
        DataError: the manifest is not one.
    """
    store = open_store(location)
    return store.folder if isinstance(store, FolderStore) else _copy(store, SPLITS, cache, on_bytes)[1]


def local_heldout(store: Store, cache: Path | None = None, on_bytes: OnBytes = unwatched) -> tuple[DataManifest, Path]:
    """Manifest of data that are streamed, and the folder in the cache that holds their held-out part.

    Raises:
        StoreError: something cannot be read, or is not what the manifest says.
        DataError: the manifest is not one.
    """
    return _copy(store, ("heldout",), cache, on_bytes)


def read_manifest(store: Store, cache: Path | None = None) -> tuple[DataManifest, Path]:
    """Manifest of a store's data, and the folder in the cache for their copy, which may not exist; raises as `local_heldout` does."""
    content = store.read(MANIFEST, 0, store.size_bytes(MANIFEST))
    return DataManifest.parse(content, MANIFEST), _cached(content, SPLITS, cache)


def _cached(manifest: bytes, splits: Sequence[Split], cache: Path | None) -> Path:
    name = hashlib.sha256(manifest).hexdigest()[:32]
    return (cache or cache_folder()) / (name if tuple(splits) == SPLITS else f"{name}-{'-'.join(splits)}")


def _copy(store: Store, splits: Sequence[Split], cache: Path | None, on_bytes: OnBytes) -> tuple[DataManifest, Path]:
    content = store.read(MANIFEST, 0, store.size_bytes(MANIFEST))
    manifest, folder = DataManifest.parse(content, MANIFEST), _cached(content, splits, cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not (folder / MANIFEST).exists():
                partial = folder / f".{MANIFEST}.partial"
                partial.write_bytes(content)
                for split in splits:
                    fetch(store, f"{split}.bin", manifest.part(split), folder, on_bytes)
                # last: without a manifest there is no data set
                partial.replace(folder / MANIFEST)
    except OSError as error:
        raise UnreachableStoreError(
            f"cache {folder}: {error.strerror}; set {ENV_CACHE} to a folder with room for the data"
        ) from None
    return manifest, folder


def fetch(store: Store, name: str, facts: PartFacts, folder: Path, on_bytes: OnBytes = unwatched) -> None:
    """Copies a file piece by piece, checks size and hash, and only then gives it its name. Pieces of an earlier try are kept.

    Raises:
        StoreError: it cannot be read, is of another size, or has another hash than its manifest says.
        OSError: the folder cannot be written.
    """
    size_bytes = store.size_bytes(name)
    if size_bytes != facts.bytes:
        raise StoreError(
            f"{name}: {size_bytes} bytes in the store, its manifest says {facts.bytes}; upload the file and its manifest again"
        )
    partial = folder / f".{name}.partial"
    with partial.open("ab") as file:
        for start in range(file.tell(), facts.bytes, PIECE_BYTES):
            file.write(store.read(name, start, min(start + PIECE_BYTES, facts.bytes)))
            on_bytes(min(PIECE_BYTES, facts.bytes - start))
        file.flush()
        os.fsync(file.fileno())
    if partial.stat().st_size != facts.bytes or sha256_of_file(partial, on_bytes) != facts.sha256:
        partial.unlink()
        raise StoreError(f"{name}: its SHA-256 is not the manifest's; upload the file and its manifest again")
    partial.replace(folder / name)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock during the block. The kernel frees it however this process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
