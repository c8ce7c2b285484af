"""Training windows read from a store when they are needed, for data that no pod's disk holds.

Samples come in a random order, so reading ahead in the file would fetch bytes that nobody needs. Each window is a ranged
request of its own, many at a time. The trainer's prefetcher asks for a step's windows while the step before computes.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cost_aware_trainer.data.hashing import OnBytes, unwatched
from cost_aware_trainer.data.parts import FilePart, TokenPart
from cost_aware_trainer.data.stores import (
    FolderStore,
    Store,
    StoreError,
    local_folder,
    local_heldout,
    open_store,
    read_manifest,
)
from cost_aware_trainer.data.token_files import Corpus, check_window

ENV_STREAM = "CATJ_DATA_STREAM"
"""Mode of streaming: `always`, `never`, or `auto`, the default, which streams data from the network if the cache has no room
for a copy."""
REQUESTS_AT_ONCE = 16
SPARED_BYTES = 2**30
"""Bytes that a copy must leave free in the cache folder's file system."""


class StreamedPart(TokenPart):
    """Part in a store. Its size is compared with the manifest's. Its hash cannot be, because it is never read as a whole."""

    def __init__(self, store: Store, name: str, size_bytes: int) -> None:
        found_bytes = store.size_bytes(name)
        if found_bytes != size_bytes:
            raise StoreError(
                f"{name}: {found_bytes} bytes in the store, its manifest says {size_bytes}; "
                "upload the file and its manifest again"
            )
        self._store, self._name, self._size_bytes = store, name, size_bytes
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="stream")

    def __len__(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """See `TokenPart`; raises StoreError if the store does not answer."""

        def read(start: int) -> NDArray[np.uint8]:
            return np.frombuffer(self._store.read(self._name, start, start + length), dtype=np.uint8)

        found = list(self._pool.map(read, (int(start) for start in starts)))
        return np.stack(found) if found else np.empty((0, length), dtype=np.uint8)


def open_data(location: str, sequence_length: int, *, verify_hashes: bool, on_bytes: OnBytes = unwatched) -> Corpus:
    """Opens the data of a folder or an address: read from disk, or streamed if the cache has no room for a copy.

    Raises:
        StoreError: something cannot be read, or `CATJ_DATA_STREAM` is none of its values.
        DataError: what is there is not what its manifest says, or too small for one window.
    """
    store = open_store(location)
    if isinstance(store, FolderStore) or not _is_streamed(store):
        folder = local_folder(location, on_bytes=on_bytes)
        return Corpus.open(folder, sequence_length, verify_hashes=verify_hashes, on_bytes=on_bytes)
    manifest, folder = local_heldout(store, on_bytes=on_bytes)
    train = StreamedPart(store, "train.bin", manifest.train.bytes)
    check_window(f"{location}/train.bin", manifest.train.bytes, sequence_length)
    check_window(f"{location}/heldout.bin", manifest.heldout.bytes, sequence_length)
    return Corpus(manifest, train, FilePart(folder / "heldout.bin", manifest.heldout.bytes), sequence_length)


def _is_streamed(store: Store) -> bool:
    mode = os.environ.get(ENV_STREAM, "auto")
    if mode not in ("auto", "always", "never"):
        raise StoreError(f"{ENV_STREAM}: {mode!r}; write auto, always or never")
    if mode != "auto":
        return mode == "always"
    manifest, folder = read_manifest(store)
    if (folder / "manifest.json").exists():
        return False
    return manifest.train.bytes + manifest.heldout.bytes + SPARED_BYTES > _free_bytes(folder)


def _free_bytes(folder: Path) -> int:
    """Free bytes in the file system of a folder, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
