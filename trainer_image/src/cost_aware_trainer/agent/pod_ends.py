"""Agents' last words: when each pod of a job ended, and what a complete run came to.

A pod that is deleted takes its end with it. What it cost is known to the second all the same: its agent leaves word on the volume,
and whoever did not watch asks an agent that lives. A pod of a complete run stays, and the kubelet keeps what it says of the
result. Nothing here raises or holds up an end: without these words a pod's end is estimated, and a result is not told.
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
"""How long words are kept: much longer than anybody is going to ask."""
MOST = 1024
"""Words in one answer, which stays far below the contract's largest message."""
PATIENCE_SECONDS = 2.0
"""For a volume that does not answer: the pod's grace is for the ranks."""

only_reader = threading.Lock()


def leave_word(folder: Path | None, pod_uid: str, now_seconds: float) -> None:
    """Says that this pod ends now (Unix time). A pod that an older operator made knows neither its uid nor a folder."""
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
    """Says what a complete run came to, where the kubelet reads a container's termination message.

    Not atomically: the file is mounted, and read only once this process is gone. Outside a pod there is none, and none is made.
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
    """The words of pods that have ended, the newest first; none where nobody left any, or while another call still reads."""
    found: list[PodEnd] = []
    # a volume that does not answer must not collect callers
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
    return PodEnds(ends=tuple(sorted(found, key=lambda word: -word.ended_at)[:MOST]))


def _read(path: Path) -> list[PodEnd]:
    try:
        return [PodEnd.from_json(path.read_bytes())]
    except FileNotFoundError:  # another agent has just tidied up
        return []
    except ContractError as error:
        logger.warning("%s: %s", path, error)
        return []
