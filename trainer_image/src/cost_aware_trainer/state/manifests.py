"""Checkpoint folders: listing, verification and removal.

A checkpoint is a folder `step-00000120`. Its `manifest.json` is written last and names every file with its SHA-256.
Without it the checkpoint does not exist.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cost_aware_trainer.data.token_files import sha256_of_file

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts that identify a run: a checkpoint with other facts is refused. Degrees and micro-batch are none of them."""

    model: dict[str, Any]
    """Shape of the model; for a session, its number of parameters."""
    seed: int
    """Seed of first weights and sample order."""
    global_samples: int
    """Samples of one step."""
    data_sha256: str
    """Hexadecimal SHA-256 of the training data; for a session, its own fingerprint of the data."""


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Facts of one whole tensor, whichever files its parts lie in."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Number type, as torch writes it."""
    checksum: str
    """Checksum of the content; see `state.checksum`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Content of one checkpoint's `manifest.json`."""

    step: int
    """Last completed step."""
    samples: int
    """Samples trained until then."""
    samples_checksum: str
    """Order-free hash of those samples."""
    attempt: int
    """Attempt that saved the checkpoint."""
    run: RunFacts
    """Facts that identify the run."""
    loss: float | None = None
    """Mean training loss of the step, nats per token."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file, by name."""
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    """Facts of each whole tensor, by name."""
    format_version: int = FORMAT_VERSION
    """Version of this format."""

    def to_document(self) -> dict[str, Any]:
        """Writes the manifest as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Reads a document of `to_document`.

        Raises:
            ValueError: it has another version, or is no manifest.
        """
        try:
            if document["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {document['format_version']}, expected {FORMAT_VERSION}")
            tensors = {
                name: TensorFacts(shape=tuple(facts["shape"]), dtype=facts["dtype"], checksum=facts["checksum"])
                for name, facts in document["tensors"].items()
            }
            return cls(**{**document, "run": RunFacts(**document["run"]), "tensors": tensors})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a checkpoint manifest: {error!r}") from None


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def checkpoint_folders(root: Path) -> list[Path]:
    """Lists all checkpoint folders under the root, whole or not, the newest first."""
    found = [path for path in root.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Writes the manifest, with which the checkpoint begins to exist: atomically, and after it is durable."""
    partial = folder / f".{MANIFEST}.partial"
    with partial.open("w") as file:
        json.dump(manifest.to_document(), file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MANIFEST)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_verified(folder: Path) -> CheckpointManifest:
    """Reads a checkpoint's manifest and compares all files with it.

    Raises:
        ValueError: the manifest is not one, or a file is missing, truncated or changed.
        OSError: a file cannot be read.
    """
    manifest = CheckpointManifest.from_document(json.loads((folder / MANIFEST).read_text()))
    if folder_name(manifest.step) != folder.name:
        raise ValueError(f"its manifest is of step {manifest.step}")
    for name, sha256 in manifest.files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        if sha256_of_file(folder / name) != sha256:
            size_bytes = (folder / name).stat().st_size
            raise ValueError(f"{name} ({size_bytes} bytes) is truncated or changed: SHA-256 differs")
    return manifest


def newest_good(root: Path) -> tuple[CheckpointManifest | None, list[str]]:
    """Finds the newest checkpoint that is whole, and the names of newer ones that are damaged. Each of these is logged."""
    damaged: list[str] = []
    for folder in checkpoint_folders(root):
        if not (folder / MANIFEST).exists():
            continue
        try:
            return read_verified(folder), damaged
        except (ValueError, OSError) as error:
            logger.error("CHECKPOINT SKIPPED: %s is damaged: %s; trying the one before it", folder, error)
            damaged.append(folder.name)
    return None, damaged


def newest_step(root: Path) -> int:
    """Step of the newest checkpoint that has a manifest; 0 if there is none. Nothing is verified."""
    steps = (folder.name.removeprefix("step-") for folder in checkpoint_folders(root) if (folder / MANIFEST).exists())
    return int(next(steps, "0"))


def remove_leftovers(root: Path) -> None:
    """Removes folders without a manifest, which are interrupted saves."""
    for folder in checkpoint_folders(root):
        if not (folder / MANIFEST).exists():
            logger.warning("removing %s: its save was interrupted, it has no manifest", folder)
            remove(folder)


def retain(root: Path, keep: int, damaged: Collection[str]) -> None:
    """Keeps the newest `keep` good checkpoints. Removes older and damaged ones, but never the only good one."""
    written = [folder for folder in checkpoint_folders(root) if (folder / MANIFEST).exists()]
    good = [folder for folder in written if folder.name not in damaged]
    if not good:
        return
    for folder in written:
        if folder not in good[: max(1, keep)]:
            remove(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its manifest first, so that an interrupted removal leaves no checkpoint behind."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
