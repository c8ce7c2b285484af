"""Checkpoints of a run with torch.distributed.checkpoint: saved in the background, verified, loaded under any degrees.

No rank waits for storage inside a collective: see `distributed.meetings`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from cost_aware_trainer.contract import CheckpointPlan, OnAllDamaged
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.meetings import Meeting, StorageError
from cost_aware_trainer.state.claims import ClaimLostError, FolderClaim, sync_folder
from cost_aware_trainer.state.manifests import (
    MANIFEST,
    CheckpointManifest,
    RunFacts,
    folder_name,
    newest_step,
    write_manifest,
)
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.resuming import CheckpointSearch
from cost_aware_trainer.state.retention import SAVING, Retention, remove, remove_leftovers, set_aside
from cost_aware_trainer.state.staging import StateCopies
from cost_aware_trainer.state.state import RESIDUAL, Checksums, StatePart, checkpointable, residual_parts
from cost_aware_trainer.state.validation import InvalidRunError
from cost_aware_trainer.state.writing import CheckpointWriter, Snapshot

_SHARED_FOLDER_PATIENCE_SECONDS = 10.0
"""Seconds that a network file system gets to show a file of another node."""
_NEVER_MENDED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
)
"""Errors of a folder that another attempt will meet again. Space may be freed, and a server may come back."""
_PASSING = "storage: "


class CheckpointError(RuntimeError):
    """Checkpoint that could not be written or read. The state in memory and older checkpoints are untouched."""


class Checkpointer:
    """Checkpoints of a run. At most one save is under way at a time."""

    def __init__(self, plan: CheckpointPlan, ranks: Ranks, facts: RunFacts, claim: FolderClaim | None = None) -> None:
        self._plan, self._ranks, self._facts = plan, ranks, facts
        self._root = Path(plan.folder)
        self._claim = claim or FolderClaim.from_environment(self._root, os.environ)
        self._search = CheckpointSearch(self._root, ranks)
        self._has_loaded_damage = False
        self._retention = Retention(self._root, self._claim.check, ranks.meetings.pace)
        self._saving: Future[int] | None = None
        self._copies: StateCopies | None = None
        self._meeting = Meeting(None, 0, 1, timedelta(0), ranks.meetings.pace)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.saved_step = 0
        """Step of the newest finished checkpoint that this rank knows."""
        self._residuals: dict[str, Tensor] = {}

    def check_folder(self) -> None:
        """Claims the folder, removes interrupted saves, and checks that every rank can write to it and sees the same one.

        Raises:
            InvalidRunError: it can never be written, the ranks' nodes do not share it, or it went to another job.
            CheckpointError: it cannot be written now, as it is full for example, or a newer attempt has it.
        """
        token = secrets.token_hex(8)
        # Rank 0 first: it makes the folder that the others then find, and makes room in it.
        self._agree(self._write(lambda: self._prepare(token)) if self._ranks.is_first else "")
        expected = self._ranks.broadcast_json(token)
        problem = "" if self._ranks.is_first else self._write(lambda: self._write_probe(token))
        self._agree(problem)
        self._agree("" if _shows(self._probe(0), expected) else self._not_shared())
        self._probe(self._ranks.rank).unlink(missing_ok=True)

    def _prepare(self, token: str) -> None:
        self._root.mkdir(exist_ok=True)
        self._claim.check_before()
        for probe in self._root.glob(".probe-*"):
            probe.unlink(missing_ok=True)
        remove_leftovers(self._root)
        self._claim.take()
        self._write_probe(token)

    def join(self, ranks: Ranks) -> None:
        """Goes on with new process groups. No save may be under way."""
        self._ranks = ranks

    def _probe(self, rank: int) -> Path:
        return self._root / f".probe-{rank}"

    def _write_probe(self, token: str) -> None:
        self._probe(self._ranks.rank).write_text(token)

    def _write(self, work: Callable[[], None]) -> str:
        """Does work in the folder; returns the problem if it fails, else an empty text."""
        try:
            work()
        except OSError as error:
            where = f"checkpoint.folder: {self._root} on rank {self._ranks.rank} cannot be written"
            if error.errno in _NEVER_MENDED:
                return f"{where}: {error.strerror}; mount a writable volume there; its parent folder must exist"
            free = _free(self._root)
            return f"{_PASSING}{where}: {error.strerror} ({free}); make room or enlarge the volume, it is tried again"
        except ClaimLostError as error:
            return f"{_PASSING}{error}"
        except InvalidRunError as error:
            return str(error)
        return ""

    def _not_shared(self) -> str:
        return (
            f"checkpoint.folder: {self._root} on rank {self._ranks.rank} does not show what rank 0 wrote there; "
            "use one volume that all nodes mount (ReadWriteMany)"
        )

    def _agree(self, problem: str) -> None:
        try:
            first = self._ranks.meet("folder").agree(problem)
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        if first.startswith(_PASSING):
            raise CheckpointError(first.removeprefix(_PASSING))
        if first:
            raise InvalidRunError(first)

    def resume(
        self,
        parts: list[StatePart] | Callable[[CheckpointManifest], list[StatePart]],
        checksums: Checksums,
        shapes: dict[str, tuple[int, ...]],
    ) -> CheckpointManifest | None:
        """Loads the newest good checkpoint into `parts`; every rank must call it.

        Args:
            parts: this rank's parts of the state, or what makes them for a checkpoint.
            checksums: checksums of the whole tensors.
            shapes: shapes of the whole model's parameters, by name.

        Returns:
            the manifest of the loaded checkpoint, equal on all ranks; None if there is none, or none that is whole: then
            `begin_anew` decides whether the run may start.

        Raises:
            InvalidRunError: it belongs to another run.
            CheckpointError: the storage does not answer.
        """
        try:
            for manifest in self._search.candidates(self._facts, shapes):
                mine = parts if isinstance(parts, list) else parts(manifest)
                has_residuals = any(name.startswith(RESIDUAL) for name in manifest.tensors)
                residuals = residual_parts(mine) if has_residuals else []
                name = folder_name(manifest.step)
                damage = self._search.load(manifest, mine + residuals, checksums)
                if damage:
                    self._has_loaded_damage = True
                    self._search.note(name, damage)
                    continue
                self._residuals = {part.parameter: part.values for part in residuals}
                self.saved_step = manifest.step
                self._retention.found_whole(name)
                return manifest
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        finally:
            for damaged in self._search.damaged:
                self._retention.found_damaged(damaged.name)
        return None

    def begin_anew(self) -> None:
        """Lets a run start at its first step. Every rank must call it before it does.

        Raises:
            InvalidRunError: there are checkpoints, all of them are damaged, and nobody said that it may (`checkpoint.onAllDamaged`).
            CheckpointError: it may, with the next attempt: this one's state is half loaded, or the folder could not be changed.
        """
        damaged = self._search.damaged
        if not damaged:
            return
        names = "; ".join(f"{one.name}: {one.why}" for one in damaged[:3])
        if self._plan.on_all_damaged is OnAllDamaged.STOP:
            raise InvalidRunError(
                f"checkpoint.folder: all {len(damaged)} checkpoints in {self._root} are damaged ({names}); nothing was changed. Put "
                "a whole one back, move them away, or write checkpoint.onAllDamaged: Restart to begin at the first step"
            )
        self._agree(self._write(self._set_damaged_aside) if self._ranks.is_first else "")
        if self._has_loaded_damage:
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {self._root} were damaged and are set aside ({names}); the next attempt starts "
                "at the first step"
            )

    def _set_damaged_aside(self) -> None:
        self._claim.check()
        for damaged in self._search.damaged:
            set_aside(self._root / damaged.name)

    def take_residuals(self) -> dict[str, Tensor]:
        """Takes the residuals of this rank's parts from the loaded checkpoint, by parameter, once; empty if it holds none."""
        taken, self._residuals = self._residuals, {}
        return taken

    def newest_step(self) -> int:
        """Step of the newest finished checkpoint on the volume, whole or damaged; equal on all ranks; 0 if there is none."""
        try:
            return int(self._ranks.told_by_first("newest", partial(newest_step, self._root)))
        except StorageError as error:
            raise CheckpointError(str(error)) from error

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._saving is not None and not self._saving.done()

    def start_save(self, progress: RunProgress, attempt: int, parts: list[StatePart], checksums: Checksums) -> None:
        """Copies the state and begins to write it, after an earlier save has ended. Every rank must call it.

        Raises:
            CheckpointError: an earlier save failed.
        """
        self.wait()
        step = progress.step
        manifest = CheckpointManifest(
            step=step,
            samples=step * self._facts.global_samples,
            samples_checksum=progress.samples_checksum,
            loss=progress.loss,
            attempt=attempt,
            run=self._facts,
        )
        # A folder of this attempt's own: whoever else writes for this step writes elsewhere.
        folder = self._root / f"{SAVING}{folder_name(step)}-attempt-{attempt}-{self._claim.job_uid[:8]}"
        self._meeting = self._ranks.meetings.call("written")
        self._copies = StateCopies.of(self._ranks.device)
        snapshot, writer = Snapshot(self._copies), CheckpointWriter(folder, self._meeting)
        try:
            saving = async_save(
                checkpointable(parts),
                storage_writer=writer,
                process_group=self._ranks.background,
                async_stager=snapshot,
                no_dist=self._ranks.size == 1,
            )
        except OSError as error:
            raise CheckpointError(self._why(step, error)) from error
        assert isinstance(saving, AsyncSaveResponse)  # noqa: S101  the snapshot is a future
        written = saving.upload_completion
        self._saving = self._executor.submit(self._finish, written, manifest, writer, snapshot, parts, checksums)

    def hold(self) -> None:
        """Call it before the state changes: the device then finishes the copy of a save first. The host does not wait."""
        if self._copies:
            self._copies.hold()
            self._copies = None

    def _finish(
        self,
        written: Future[Any],
        manifest: CheckpointManifest,
        writer: CheckpointWriter,
        snapshot: Snapshot,
        parts: list[StatePart],
        checksums: Checksums,
    ) -> int:
        """Finishes a save in the background: waits for all ranks' files and adds up checksums; then rank 0 publishes it."""
        folder = Path(writer.path)
        try:
            written.result()
            tensors = checksums.facts(snapshot.state, parts)
            hashed = self._ranks.meetings.call("hashed")
            hashed.agree(tells=json.dumps(writer.hashes))
            problem = ""
            if self._ranks.is_first:
                files = {name: sha256 for told in hashed.told() for name, sha256 in json.loads(told).items()}
                problem = self._published(folder, dataclasses.replace(manifest, files=files, tensors=tensors), writer)
            problem = self._ranks.meetings.call("published").agree(problem)
        except (Exception, CheckpointException) as error:
            # DCP gathers all ranks' errors in an exception that is not an Exception.
            # Any error of the storage, on any thread, becomes one message that names the step and the folder.
            problem = self._why(manifest.step, error)
            if self._ranks.is_first:
                # it may be what fills the volume
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(problem) from error
        if problem:
            raise CheckpointError(problem)
        return manifest.step

    def _published(self, folder: Path, manifest: CheckpointManifest, writer: CheckpointWriter) -> str:
        """Writes metadata and manifest and gives the checkpoint its name, on rank 0; returns what went wrong."""
        final = self._root / folder_name(manifest.step)
        try:
            writer.write_metadata()
            files = {**manifest.files, **writer.hashes}
            write_manifest(folder, dataclasses.replace(manifest, files=files))
            self._claim.check(manifest.attempt)
            if final.exists():
                # damaged, or of an attempt that is not this one's
                (set_aside if (final / MANIFEST).exists() else remove)(final)
            folder.rename(final)
            sync_folder(self._root)
        except (OSError, ClaimLostError, InvalidRunError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            return self._why(manifest.step, error)
        self._retention.start(self._plan.keep)
        return ""

    def poll(self) -> None:
        """Notes a save that has finished; does not wait for one that has not.

        Raises:
            CheckpointError: it failed.
        """
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Waits until no save is under way, and calls `beat` while it gets on; raises what `poll` raises."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            moved_at_seconds = 0.0
            while not futures.wait([saving], timeout=1.0).done:
                if self._meeting.moved_at_seconds > moved_at_seconds:
                    moved_at_seconds = self._meeting.moved_at_seconds
                    beat()
            self.saved_step = saving.result()

    def close(self) -> None:
        """Waits for the background thread. Its errors are raised by `poll` and `wait`.

        If the run ends because a collective has failed, other ranks are gone, and what is being saved cannot be finished.
        """
        error = sys.exception()
        if isinstance(error, dist.DistError) or type(error) is RuntimeError:
            self._ranks.meetings.abandon()
        self._executor.shutdown(wait=True)
        self._retention.close()

    def _why(self, step: int, error: BaseException) -> str:
        causes = getattr(error, "failures", None)
        if isinstance(causes, dict) and causes:
            rank, (cause, _) = next(iter(causes.items()))
            return f"rank {rank}: {self._why(step, cause)}"
        if isinstance(error, ClaimLostError):
            return f"the checkpoint of step {step} was not published: {error}"
        return (
            f"the checkpoint of step {step} could not be written to {self._root} ({_free(self._root)}): {error}; "
            "older checkpoints are untouched: enlarge the volume or lower checkpoint.keep"
        )


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free"
    except OSError:
        return "the folder is gone"


def _shows(path: Path, text: str) -> bool:
    """Whether a file has this content; waits for network file systems to show it."""
    deadline_seconds = time.monotonic() + _SHARED_FOLDER_PATIENCE_SECONDS
    while time.monotonic() < deadline_seconds:
        if path.exists() and path.read_text() == text:
            return True
        time.sleep(0.1)
    return False
