"""Checkpoints of a run with torch.distributed.checkpoint: saved in the background, verified, loaded under any degrees."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from cost_aware_trainer.contract import CheckpointPlan
from cost_aware_trainer.data.token_files import sha256_of_file
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.state.manifests import (
    CheckpointManifest,
    RunFacts,
    TensorFacts,
    folder_name,
    newest_good,
    newest_step,
    remove,
    remove_leftovers,
    retain,
    write_manifest,
)
from cost_aware_trainer.state.metadata import SafeReader
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.state import (
    RESIDUAL,
    Checksums,
    StatePart,
    checkpointable,
    copy_twins,
    residual_parts,
    staged,
)
from cost_aware_trainer.state.validation import InvalidRunError

logger = logging.getLogger(__name__)

_SHARED_FOLDER_PATIENCE_SECONDS = 10.0
"""Seconds that a network file system gets to show a file of another node."""


class CheckpointError(RuntimeError):
    """Checkpoint that could not be written or read. The state in memory and older checkpoints are untouched."""


class Snapshot(AsyncStager):
    """Stager that copies a state to CPU memory at once, so that training may go on, and keeps the copy for hashing."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` has copied everything when it returns."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Makes a copy that later steps do not change."""
        self.state = staged(state_dict)
        return self.state


class Checkpointer:
    """Checkpoints of a run. At most one save is under way at a time."""

    def __init__(self, plan: CheckpointPlan, ranks: Ranks, facts: RunFacts) -> None:
        self._plan, self._ranks, self._facts = plan, ranks, facts
        self._root = Path(plan.folder)
        self._damaged: list[str] = []
        self._saving: Future[int] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.saved_step = 0
        """Step of the newest finished checkpoint that this rank knows."""
        self._residuals: dict[str, Tensor] = {}

    def check_folder(self) -> None:
        """Checks that every rank can write to the folder, and that all see the same one; removes interrupted saves.

        Raises:
            InvalidRunError: it cannot be created or written, or the ranks' nodes do not share it.
        """
        token = secrets.token_hex(8)
        # Rank 0 first: it makes the folder that the others then find.
        self._agree(self._write_probe(token) if self._ranks.is_first else "")
        self._agree("" if self._ranks.is_first else self._write_probe(token))
        expected = self._ranks.broadcast_json(token)
        self._agree("" if _shows(self._probe(0), expected) else self._not_shared())
        self._probe(self._ranks.rank).unlink(missing_ok=True)
        if self._ranks.is_first:
            remove_leftovers(self._root)

    def join(self, ranks: Ranks) -> None:
        """Goes on with new process groups. No save may be under way."""
        self._ranks = ranks

    def _probe(self, rank: int) -> Path:
        return self._root / f".probe-{rank}"

    def _write_probe(self, token: str) -> str:
        """Writes this rank's probe file; returns the problem if that fails, else an empty text."""
        try:
            if self._ranks.is_first:
                self._root.mkdir(exist_ok=True)
            self._probe(self._ranks.rank).write_text(token)
        except OSError as error:
            return (
                f"checkpoint.folder: {self._root} on rank {self._ranks.rank} cannot be written: {error.strerror}; "
                "mount a writable volume there; its parent folder must exist"
            )
        return ""

    def _not_shared(self) -> str:
        return (
            f"checkpoint.folder: {self._root} on rank {self._ranks.rank} does not show what rank 0 wrote there; "
            "use one volume that all nodes mount (ReadWriteMany)"
        )

    def _agree(self, problem: str) -> None:
        first = self._ranks.first_problem(problem)
        if first:
            raise InvalidRunError(first)

    def resume(
        self, parts: list[StatePart], checksums: Checksums, shapes: dict[str, tuple[int, ...]]
    ) -> CheckpointManifest | None:
        """Loads the newest good checkpoint into `parts`; every rank must call it.

        Args:
            parts: this rank's parts of the state.
            checksums: checksums of the whole tensors.
            shapes: shapes of the whole model's parameters, by name.

        Returns:
            the manifest of the loaded checkpoint, None if there is none; equal on all ranks.

        Raises:
            InvalidRunError: it belongs to another run.
            CheckpointError: it was whole, but could not be loaded.
        """
        answer: dict[str, Any] = {"manifest": None, "problem": ""}
        if self._ranks.is_first:
            found, self._damaged = newest_good(self._root)
            if found:
                answer = {"manifest": found.to_document(), "problem": difference(found, self._facts, shapes)}
        answer = self._ranks.broadcast_json(answer)
        if answer["problem"]:
            raise InvalidRunError(f"checkpoint.folder: {self._root}: {answer['problem']}")
        if answer["manifest"] is None:
            return None
        manifest = CheckpointManifest.from_document(answer["manifest"])
        residuals = residual_parts(parts) if any(name.startswith(RESIDUAL) for name in manifest.tensors) else []
        self._load(manifest, parts + residuals, checksums)
        self._residuals = {part.parameter: part.values for part in residuals}
        self.saved_step = manifest.step
        return manifest

    def take_residuals(self) -> dict[str, Tensor]:
        """Takes the residuals of this rank's parts from the loaded checkpoint, by parameter, once; empty if it holds none."""
        taken, self._residuals = self._residuals, {}
        return taken

    def _load(self, manifest: CheckpointManifest, parts: list[StatePart], checksums: Checksums) -> None:
        folder = self._root / folder_name(manifest.step)
        alone = self._ranks.size == 1
        try:
            load(
                checkpointable(parts),
                storage_reader=SafeReader(folder),
                process_group=self._ranks.background,
                no_dist=alone,
            )
        except CheckpointException as error:
            raise CheckpointError(f"{folder} is whole, but could not be loaded: {error}") from error
        copy_twins(parts)
        wrong = next(checksums.wrong(parts, manifest.tensors), "")
        problem = self._ranks.first_problem(wrong)
        if problem:
            raise CheckpointError(f"{folder}: {problem} was loaded with another content than was saved")

    def newest_step(self) -> int:
        """Step of the newest finished checkpoint on the volume, whole or damaged; equal on all ranks; 0 if there is none."""
        step = newest_step(self._root) if self._ranks.is_first else 0
        return int(self._ranks.broadcast_json(step))

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
        folder = self._root / folder_name(step)
        if self._ranks.is_first and folder.exists():
            remove(folder)
        manifest = CheckpointManifest(
            step=step,
            samples=step * self._facts.global_samples,
            samples_checksum=progress.samples_checksum,
            loss=progress.loss,
            attempt=attempt,
            run=self._facts,
        )
        snapshot = Snapshot()
        try:
            written = async_save(
                checkpointable(parts),
                storage_writer=FileSystemWriter(folder),
                process_group=self._ranks.background,
                async_stager=snapshot,
                no_dist=self._ranks.size == 1,
            )
        except OSError as error:
            raise CheckpointError(self._why(step, error)) from error
        assert isinstance(written, Future)  # noqa: S101  the snapshot is staged at once
        facts = partial(checksums.facts, snapshot.state, parts)
        self._saving = self._executor.submit(self._finish, written, manifest, facts)

    def _finish(
        self, written: Future[Any], manifest: CheckpointManifest, facts: Callable[[], dict[str, TensorFacts]]
    ) -> int:
        """Finishes a save in the background: waits for all ranks' files and adds up checksums; then rank 0 writes the manifest."""
        folder = self._root / folder_name(manifest.step)
        try:
            written.result()
            tensors = facts()
            if self._ranks.is_first:
                files = {path.name: sha256_of_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
                write_manifest(folder, dataclasses.replace(manifest, files=files, tensors=tensors))
                retain(self._root, self._plan.keep, self._damaged)
        except (Exception, CheckpointException) as error:
            # DCP gathers all ranks' errors in an exception that is not an Exception.
            # Any error of the storage, on any thread, becomes one message that names the step and the folder.
            raise CheckpointError(self._why(manifest.step, error)) from error
        return manifest.step

    def poll(self) -> None:
        """Notes a save that has finished; does not wait for one that has not.

        Raises:
            CheckpointError: it failed.
        """
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Waits until no save is under way; raises what `poll` raises."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self.saved_step = saving.result()

    def close(self) -> None:
        """Waits for the background thread. Its errors are raised by `poll` and `wait`."""
        self._executor.shutdown(wait=True)

    def _why(self, step: int, error: BaseException) -> str:
        causes = getattr(error, "failures", None)
        if isinstance(causes, dict) and causes:
            rank, (cause, _) = next(iter(causes.items()))
            return f"rank {rank}: {self._why(step, cause)}"
        try:
            free = f"{shutil.disk_usage(self._root).free / 2**20:.0f} MiB are free"
        except OSError:
            free = "the folder is gone"
        return (
            f"the checkpoint of step {step} could not be written to {self._root} ({free}): {error}; "
            "older checkpoints are untouched: enlarge the volume or lower checkpoint.keep"
        )


def _shows(path: Path, text: str) -> bool:
    """Whether a file has this content; waits for network file systems to show it."""
    deadline_seconds = time.monotonic() + _SHARED_FOLDER_PATIENCE_SECONDS
    while time.monotonic() < deadline_seconds:
        if path.exists() and path.read_text() == text:
            return True
        time.sleep(0.1)
    return False


def difference(manifest: CheckpointManifest, facts: RunFacts, shapes: dict[str, tuple[int, ...]]) -> str:
    """Says why a checkpoint does not belong to this run, shape by shape and fact by fact; empty if it does."""
    tensors = manifest.tensors.items()
    saved = {name.removeprefix("model."): tensor.shape for name, tensor in tensors if name.startswith("model.")}
    where, remedy = folder_name(manifest.step), "restore the plan's model, or name an empty folder"
    different = [
        f"{name} is {saved.get(name, 'absent')} there and {shapes.get(name, 'absent')} in the plan"
        for name in sorted(saved.keys() | shapes.keys())
        if saved.get(name) != shapes.get(name)
    ]
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        return f"{where} is a checkpoint of another model: {'; '.join(different[:5])}{more}; {remedy}"
    for field in dataclasses.fields(RunFacts):
        before, now = getattr(manifest.run, field.name), getattr(facts, field.name)
        if before != now:
            return f"{where} was trained with {field.name} {before}, the plan has {now}; {remedy}"
    return ""
