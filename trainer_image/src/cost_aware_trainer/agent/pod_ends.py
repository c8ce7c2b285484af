"""Ends of a job's pods, which agents write to the volume, and the result of a complete run.

A pod that is deleted takes its end with it. Its cost is still known to the second: its agent writes the time of the end to the
volume, and an operator that did not watch asks a living agent. A pod of a complete run stays, and the kubelet keeps its
termination message, the result. Nothing here raises or delays an end. Without these records a pod's end is estimated, and a
result is not told.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from cost_aware_trainer.contract import MAX_TERMINATION_BYTES, ContractError, PodEnd, PodEnds, RunResult
from cost_aware_trainer.contract.rank_environment import write_atomically

logger = logging.getLogger(__name__)

KEPT_SECONDS = 24 * 3600.0
"""Seconds that a record is kept: much longer than anybody will ask for it."""
MOST_ENDS = 1024
"""Largest number of records in one answer, which stays far below the contract's largest message."""
PATIENCE_SECONDS = 2.0
"""Seconds to wait for a volume that does not answer: the pod's grace is for the ranks."""

only_reader = threading.Lock()


def leave_word(folder: Path | None, pod_uid: str, now_seconds: float) -> None:
    """Records that this pod ends now (Unix time). Does nothing in a pod of an older operator, which sets neither uid nor folder."""
    if folder is None or not pod_uid:
        return
    writer = threading.Thread(target=_write, args=(folder, pod_uid, now_seconds), name="last-words", daemon=True)
    writer.start()
    writer.join(PATIENCE_SECONDS)
    if writer.is_alive():
        logger.warning("%s does not answer; when this pod ended is not written down", folder)


def _write(folder: Path, pod_uid: str, now_seconds: float) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{pod_uid}.json", PodEnd(pod_uid=pod_uid, ended_at=now_seconds).to_json())
        for path in folder.glob("*.json"):
            if now_seconds - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: %s; when this pod ended is not written down", folder, error.strerror)


def leave_result(file: Path, result: RunResult | None) -> None:
    """Writes the result of a complete run to the file of the container's termination message.

    The write is not atomic: the file is mounted, and read only once this process is gone. Outside a pod there is no such file,
    and none is made.
    """
    if result is None or not file.exists():
        return
    text = result.to_json()
    if len(text.encode()) > MAX_TERMINATION_BYTES:
        text = replace(result, message="").to_json()
    try:
        file.write_text(text)
    except OSError as error:
        logger.warning("%s: %s; the result is not written down", file, error.strerror)


def last_words(folder: Path | None) -> PodEnds:
    """Reads the records of pods that have ended, the newest first. Empty if there are none, or while another call still reads."""
    found: list[PodEnd] = []
    # callers must not pile up before a volume that does not answer
    if not only_reader.acquire(blocking=False):
        return PodEnds()
    try:
        paths = [] if folder is None else list(folder.glob("*.json"))
        for path in paths:
            found += _read(path)
    except OSError as error:
        logger.warning("%s: %s", folder, error.strerror)
    finally:
        only_reader.release()
    return PodEnds(ends=tuple(sorted(found, key=lambda word: -word.ended_at)[:MOST_ENDS]))


def _read(path: Path) -> list[PodEnd]:
    try:
        return [PodEnd.from_json(path.read_bytes())]
    except FileNotFoundError:  # another agent has just tidied up
        return []
    except ContractError as error:
        logger.warning("%s: %s", path, error)
        return []
