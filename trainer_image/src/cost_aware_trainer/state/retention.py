"""What becomes of checkpoints that are not needed: old ones are removed once newer ones are verified, damaged ones set aside."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cost_aware_trainer.data.hashing import OnBytes, forget_cached
from cost_aware_trainer.state.claims import ClaimLostError, sync_folder
from cost_aware_trainer.state.manifests import MANIFEST, checkpoint_folders, read_verified

logger = logging.getLogger(__name__)

METADATA = ".metadata"
"""File that torch.distributed.checkpoint writes when all ranks have written theirs."""
SAVING = ".saving-"
"""Beginning of the name of a folder that a save is writing to."""
_REMOVING = ".removing-"
_TRUSTED_SECONDS = 3600.0
"""Seconds for which a checkpoint that was read and found whole is believed to be so."""
_PATIENCE_SECONDS = 5.0
"""Seconds that the end of a run waits for what is under way here. What is left is done after the next save."""


class _StoppedError(Exception):
    """The run ends."""


class Retention:
    """Keeper of a folder's checkpoints, on a thread of rank 0."""

    def __init__(self, root: Path, claims: Callable[[], None], pace: OnBytes) -> None:
        """Takes what raises ClaimLostError once the folder is somebody else's, and what is told of bytes that are read."""
        self._root, self._claims, self._pace = root, claims, pace
        self._verified_at_seconds: dict[str, float] = {}
        self._damaged: set[str] = set()
        self._stops = threading.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retention")
        self._tidying: Future[None] | None = None

    def found_whole(self, name: str) -> None:
        """Notes a checkpoint that was just read and found whole."""
        self._verified_at_seconds[name] = time.monotonic()

    def found_damaged(self, name: str) -> None:
        """Notes a checkpoint that cannot be used."""
        self._damaged.add(name)

    def start(self, keep: int) -> None:
        """Begins to tidy up in the background, unless that is under way."""
        if self._tidying is None or self._tidying.done():
            self._tidying = self._executor.submit(self._tidied, keep)

    def close(self) -> None:
        """Waits a little for what is under way, and ends the thread."""
        if self._tidying is not None:
            deadline_seconds = time.monotonic() + _PATIENCE_SECONDS
            while not self._tidying.done() and time.monotonic() < deadline_seconds:
                time.sleep(0.01)
        self._stops.set()
        self._executor.shutdown(wait=True)

    def _tidied(self, keep: int) -> None:
        try:
            self.tidy(keep)
        except _StoppedError:
            pass
        except (ClaimLostError, OSError) as error:
            logger.error("CHECKPOINTS NOT TIDIED: %s", error)

    def tidy(self, keep: int) -> None:
        """Removes what is older than the newest `keep` checkpoints that are whole; each of these has been read before.

        Raises:
            ClaimLostError: the folder is somebody else's by now; nothing was removed since.
            OSError: the folder cannot be read or changed.
        """
        sync_folder(self._root)
        whole = 0
        for folder in checkpoint_folders(self._root):
            if not (folder / MANIFEST).exists():
                continue
            if whole >= max(1, keep):
                self._claims()
                logger.info("removing %s: %d newer ones are whole", folder.name, whole)
                remove(folder)
            elif self._is_whole(folder):
                whole += 1
            else:
                self._claims()
                set_aside(folder)

    def _is_whole(self, folder: Path) -> bool:
        if folder.name in self._damaged:
            return False
        age_seconds = time.monotonic() - self._verified_at_seconds.get(folder.name, float("-inf"))
        if age_seconds < _TRUSTED_SECONDS:
            return True
        for path in folder.iterdir():
            forget_cached(path)
        try:
            read_verified(folder, self._read)
        except (ValueError, OSError) as error:
            logger.error("CHECKPOINT DAMAGED: %s: %s", folder, error)
            return False
        self.found_whole(folder.name)
        return True

    def _read(self, count: int) -> None:
        if self._stops.is_set():
            raise _StoppedError
        self._pace(count)


def remove_leftovers(root: Path) -> None:
    """Removes what an interrupted save or removal has left.

    A checkpoint that lost its manifest, but not its metadata, stays where no other one has a manifest: it may be all there is.
    """
    for path in root.iterdir():
        if path.is_dir() and path.name.startswith((SAVING, _REMOVING)):
            logger.warning("removing %s: it was interrupted", path)
            shutil.rmtree(path, ignore_errors=True)
    folders = checkpoint_folders(root)
    has_others = any((folder / MANIFEST).exists() for folder in folders)
    for folder in folders:
        if not (folder / MANIFEST).exists() and (has_others or not (folder / METADATA).exists()):
            logger.warning("removing %s: its save was interrupted, it has no manifest", folder)
            remove(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its name first, so that an interrupted removal leaves no half of it behind."""
    doomed = folder.with_name(f"{_REMOVING}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Gives a checkpoint that cannot be used another name, under which somebody may look at it; returns it."""
    number = 1
    while (aside := folder.with_name(f"damaged-{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    sync_folder(folder.parent)
    logger.error("CHECKPOINT SET ASIDE: %s is now %s; remove it when nobody needs to look at it", folder, aside.name)
    return aside
