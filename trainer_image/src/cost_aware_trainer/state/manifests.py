"""Checkpoint folders and their manifests: listing and verification.

A checkpoint is a folder `step-00000120`. Its `manifest.json` is written last and names every file with its SHA-256.
Without it the checkpoint does not exist. It covers itself by a checksum too; manifests of earlier versions have none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cost_aware_trainer.data.hashing import OnBytes, sha256_of_file, unwatched

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
CHECKSUM = "manifest_sha256"
"""Key of the manifest's own checksum."""
COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module that it wraps."""
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
        """Writes the manifest as JSON values, with a checksum over all of them."""
        document = dataclasses.asdict(self)
        return {**document, CHECKSUM: _checksum(document)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Reads a document of `to_document`.

        Raises:
            ValueError: it has another version, is no manifest, or is not what was written.
        """
        try:
            document = dict(document)
            checksum = document.pop(CHECKSUM, None)
            if checksum is not None and checksum != _checksum(document):
                raise ValueError("its manifest is changed: its own checksum differs")
            if document["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {document['format_version']}, expected {FORMAT_VERSION}")
            if any(Path(name).name != name for name in document["files"]):
                raise ValueError("its manifest names files outside of its folder")
            tensors = {
                name: TensorFacts(shape=tuple(facts["shape"]), dtype=facts["dtype"], checksum=facts["checksum"])
                for name, facts in document["tensors"].items()
            }
            return cls(**{**document, "run": RunFacts(**document["run"]), "tensors": tensors})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a checkpoint manifest: {error!r}") from None


def _checksum(document: dict[str, Any]) -> str:
    """Hexadecimal SHA-256 of a manifest's values, however they are laid out in the file."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def plain(name: str) -> str:
    """Name of a tensor as its module has it, whether torch.compile wraps the module or not."""
    return name.replace(COMPILED, "")


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


def read_manifest(folder: Path) -> CheckpointManifest:
    """Reads a checkpoint's manifest.

    Raises:
        ValueError: it is not one, is damaged, or belongs to another folder.
        OSError: it cannot be read.
    """
    document = json.loads((folder / MANIFEST).read_bytes())
    manifest = CheckpointManifest.from_document(document)
    if folder_name(manifest.step) != folder.name:
        raise ValueError(f"its manifest is of step {manifest.step}")
    return manifest


def verify_file(folder: Path, name: str, sha256: str, on_bytes: OnBytes = unwatched) -> None:
    """Compares a file of a checkpoint with its manifest; raises what `read_manifest` raises."""
    if not (folder / name).is_file():
        raise ValueError(f"{name} is missing")
    if sha256_of_file(folder / name, on_bytes) != sha256:
        size_bytes = (folder / name).stat().st_size
        raise ValueError(f"{name} ({size_bytes} bytes) is truncated or changed: SHA-256 differs")


def read_verified(folder: Path, on_bytes: OnBytes = unwatched) -> CheckpointManifest:
    """Reads a checkpoint's manifest and compares all files with it; raises what `read_manifest` raises."""
    manifest = read_manifest(folder)
    for name, sha256 in manifest.files.items():
        verify_file(folder, name, sha256, on_bytes)
    return manifest


def newest_step(root: Path) -> int:
    """Step of the newest checkpoint that has a manifest; 0 if there is none. Nothing is verified."""
    steps = (folder.name.removeprefix("step-") for folder in checkpoint_folders(root) if (folder / MANIFEST).exists())
    return int(next(steps, "0"))
