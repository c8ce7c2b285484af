"""The checkpoint from which a run goes on: the newest one that all ranks have verified and loaded together."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.state.manifests import (
    MANIFEST,
    CheckpointManifest,
    RunFacts,
    checkpoint_folders,
    folder_name,
    plain,
    read_manifest,
    verify_file,
)
from cost_aware_trainer.state.metadata import SafeReader
from cost_aware_trainer.state.retention import METADATA
from cost_aware_trainer.state.state import Checksums, StatePart, checkpointable, copy_twins
from cost_aware_trainer.state.validation import InvalidRunError
from cost_aware_trainer.state.writing import WatchedFileSystem

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Damage:
    """Checkpoint that cannot be used."""

    name: str
    """Name of its folder."""
    why: str
    """What is wrong with it."""


class CheckpointSearch:
    """Search for the newest checkpoint that is whole. Every rank makes the same calls."""

    def __init__(self, root: Path, ranks: Ranks) -> None:
        self._root, self._ranks = root, ranks
        self.damaged: list[Damage] = []
        """Checkpoints that were found to be damaged, the newest first; equal on all ranks."""

    def candidates(self, facts: RunFacts, shapes: dict[str, tuple[int, ...]]) -> Iterator[CheckpointManifest]:
        """Yields manifests of checkpoints whose files are whole, the newest first.

        Raises:
            InvalidRunError: a checkpoint belongs to another run.
            StorageError: the storage does not answer.
        """
        for name in self._ranks.told_by_first("checkpoints", partial(_names, self._root)):
            answer = self._ranks.told_by_first("manifest", partial(self._read, name, facts, shapes))
            if answer["damage"]:
                self.note(name, answer["damage"])
                continue
            manifest = CheckpointManifest.from_document(answer["manifest"])
            damage = self._verify(manifest)
            if damage:
                self.note(name, damage)
            elif answer["difference"]:
                raise InvalidRunError(f"checkpoint.folder: {self._root}: {answer['difference']}")
            else:
                yield manifest

    def note(self, name: str, why: str) -> None:
        """Notes a damaged checkpoint."""
        self.damaged.append(Damage(name, why))
        if self._ranks.is_first:
            logger.error("CHECKPOINT SKIPPED: %s is damaged: %s; trying the one before it", self._root / name, why)

    def _read(self, name: str, facts: RunFacts, shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
        """Reads a manifest, on rank 0."""
        try:
            manifest = read_manifest(self._root / name)
        except (ValueError, OSError) as error:
            return {"damage": str(error) or repr(error)}
        problem = difference(manifest, facts, shapes)
        return {"damage": "", "manifest": manifest.to_document(), "difference": problem}

    def _verify(self, manifest: CheckpointManifest) -> str:
        """Compares the files with the manifest, each rank its share of them; returns what is wrong."""
        folder, meeting = self._root / folder_name(manifest.step), self._ranks.meet("verified")
        names = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
        jobs = [partial(verify_file, folder, name, manifest.files[name], meeting.progressed) for name in names]
        return meeting.agree(_problem(lambda: meeting.run(jobs)))

    def load(self, manifest: CheckpointManifest, parts: list[StatePart], checksums: Checksums) -> str:
        """Fills `parts` from a checkpoint; returns why it cannot be used, on all ranks. `parts` then hold anything."""
        folder, meeting = self._root / folder_name(manifest.step), self._ranks.meet("loaded")

        def read() -> None:
            reader = SafeReader(folder)
            reader.fs = WatchedFileSystem(meeting.progressed)
            with warnings.catch_warnings():
                # each rank reads what it needs by itself
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(checkpointable(parts), storage_reader=reader, no_dist=True)

        problem = meeting.agree(_problem(read))
        if problem:
            return f"it could not be loaded: {problem}"
        copy_twins(parts)
        wrong = next(checksums.wrong(parts, manifest.tensors), "")
        wrong = self._ranks.first_problem(wrong)
        return f"{wrong} was loaded with another content than was saved" if wrong else ""


def _problem(work: Callable[[], None]) -> str:
    """Does a rank's share of the work; returns what went wrong, whatever it was: a damaged file can raise anything."""
    try:
        work()
    except CheckpointException as error:
        causes = [f"{cause!r}" for cause, _ in error.failures.values()]
        return "; ".join(causes)[:900] or repr(error)
    except Exception as error:
        return (str(error) or repr(error))[:900]
    return ""


def _names(root: Path) -> list[str]:
    """Lists checkpoints, the newest first, and those that have lost their manifest but not their metadata."""
    return [path.name for path in checkpoint_folders(root) if (path / MANIFEST).exists() or (path / METADATA).exists()]


def difference(manifest: CheckpointManifest, facts: RunFacts, shapes: dict[str, tuple[int, ...]]) -> str:
    """Says why a checkpoint does not belong to this run, shape by shape and fact by fact; empty if it does."""
    tensors = manifest.tensors.items()
    saved = {plain(name.removeprefix("model.")): tensor.shape for name, tensor in tensors if name.startswith("model.")}
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
