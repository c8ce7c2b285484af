"""A pod's log, whole or followed, by anybody who may read its folder: no kubelet is needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from cost_aware_operator.engines.local.pods.launch import PodFolder

FOLLOW_SECONDS = 0.2
"""Seconds between two looks at a log that is followed."""
PIECE_BYTES = 2**16


def pod_folder(state: Path, uid: str) -> PodFolder:
    """The folder of a pod.

    Raises:
        ValueError: the uid is no name of a folder.
    """
    if not uid or uid != os.path.basename(uid) or uid.startswith("."):
        raise ValueError(f"{uid!r} is no uid of a pod")
    return PodFolder(state / "pods" / uid)


def pod_log(folder: PodFolder) -> str:
    """All that is kept of a pod's log; empty where there is none."""
    pieces = (file.read_bytes() for file in (folder.older_log, folder.log) if file.exists())
    return b"".join(pieces).decode(errors="replace")


def log_end(folder: PodFolder, most_bytes: int) -> str:
    """The last bytes of a pod's log."""
    if not folder.log.exists():
        return ""
    with folder.log.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - most_bytes))
        return log.read().decode(errors="replace")


async def follow_log(folder: PodFolder) -> AsyncIterator[bytes]:
    """A pod's log from its beginning, and what is written to it until the pod has ended."""
    begun_anew = _mark(folder.older_log)
    for piece in _pieces(folder.older_log, 0):
        yield piece
    offset = 0
    while True:
        # looked at first: what was written before the end is then read for certain
        has_ended = folder.end() is not None
        mark = _mark(folder.older_log)
        if mark != begun_anew:
            # nothing is lost of a log that began anew only once since the last look
            for piece in _pieces(folder.older_log, offset):
                yield piece
            begun_anew, offset = mark, 0
        for piece in _pieces(folder.log, offset):
            offset += len(piece)
            yield piece
        if has_ended:
            return
        await asyncio.sleep(FOLLOW_SECONDS)


def _mark(file: Path) -> tuple[int, int]:
    """What tells a file from its successor of this name."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _pieces(file: Path, offset: int) -> list[bytes]:
    """What a file holds beyond an offset, in pieces."""
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            return list(iter(lambda: opened.read(PIECE_BYTES), b""))
    except FileNotFoundError:
        return []
