"""Hashes of files, read piece by piece, so that whoever waits can be told how far it is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

OnBytes = Callable[[int], None]
"""Called with the number of bytes after each piece that was read or written."""
PIECE_BYTES = 4 * 2**20
"""Bytes of one piece."""


def unwatched(count: int) -> None:
    """Tells nobody."""


def sha256_of_file(path: Path, on_bytes: OnBytes = unwatched) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            on_bytes(count)
    return digest.hexdigest()


def forget_cached(path: Path) -> None:
    """Asks the kernel to drop a file's pages, so that the next reader gets what the disk holds. Nothing depends on the answer."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass
    finally:
        os.close(descriptor)
