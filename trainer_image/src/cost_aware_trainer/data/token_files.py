"""Token files. The bundled data are Python's own standard library as bytes, prepared once, read through memory maps.

    python -m cost_aware_trainer.data prepare --output DIR [--source DIR]

writes `train.bin`, `heldout.bin` (concatenated sources, a zero byte after each file) and, last, `manifest.json`.
Without a manifest nothing was prepared. Any folder with the same three files is a data set.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cost_aware_trainer.data.hashing import OnBytes, sha256_of_file, unwatched
from cost_aware_trainer.data.parts import (
    BlockTable,
    DataError,
    FilePart,
    PassingDataError,
    TokenPart,
    table_beside,
    table_path,
)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SEPARATOR = b"\0"
HELDOUT_FRACTION = 0.02
EAGER_BYTES = 2**30
"""Largest part that is compared with its hash as a whole before the first step."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders that are left out: installed packages are not the standard library. Its own tests belong to it, if they are installed."""

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True)
class SourceFile:
    """One source file of the corpus."""

    path: str
    """Path relative to the source folder."""
    bytes: int
    """Size in bytes."""
    sha256: str
    """Hexadecimal SHA-256 of the content."""
    split: Split
    """Part that holds the file."""


@dataclass(frozen=True)
class PartFacts:
    """Size and hash of `train.bin` or `heldout.bin`."""

    bytes: int
    """Size in bytes."""
    sha256: str
    """Hexadecimal SHA-256 of the content."""
    files: int
    """Number of source files in it."""


@dataclass(frozen=True)
class DataManifest:
    """Content of a data folder's `manifest.json`."""

    train: PartFacts
    """Size and hash of `train.bin`."""
    heldout: PartFacts
    """Size and hash of `heldout.bin`."""
    files: tuple[SourceFile, ...]
    """Source files of both parts."""
    format_version: int = FORMAT_VERSION
    """Version of this format."""

    def part(self, split: Split) -> PartFacts:
        """Size and hash of one part."""
        return self.train if split == "train" else self.heldout

    def to_json(self) -> str:
        """Writes the manifest as JSON: equal content gives equal text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a folder's manifest.

        Raises:
            DataError: there is none, or it is not one.
        """
        path = folder / MANIFEST
        try:
            return cls.parse(path.read_bytes(), f"{path}", _how_to_prepare(folder))
        except FileNotFoundError:
            raise DataError(f"dataFolder {folder}: no {MANIFEST}; {_how_to_prepare(folder)}") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None

    @classmethod
    def parse(cls, content: bytes, where: str, what_to_do: str = "upload the data set again") -> Self:
        """Reads a manifest's text; raises DataError, beginning with `where`, if it is not one."""
        try:
            document: dict[str, Any] = json.loads(content)
            if document["format_version"] != FORMAT_VERSION:
                raise DataError(
                    f"{where}: format version {document['format_version']}, this trainer reads {FORMAT_VERSION}"
                )
            return cls(
                train=PartFacts(**document["train"]),
                heldout=PartFacts(**document["heldout"]),
                files=tuple(SourceFile(**file) for file in document["files"]),
            )
        except DataError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where}: not a data manifest ({error!r}); {what_to_do}") from None


def _how_to_prepare(folder: Path) -> str:
    return f"run `python -m cost_aware_trainer.data prepare --output {folder}`"


def check_window(name: str, size_bytes: int, sequence_length: int) -> None:
    """Raises DataError if a part is too small for one window."""
    if size_bytes <= sequence_length:
        raise DataError(
            f"{name}: {size_bytes} bytes hold no window of sequenceLength {sequence_length} + 1; use more data or a "
            f"sequenceLength of at most {max(1, size_bytes - 1)}"
        )


@dataclass(frozen=True)
class Corpus:
    """Opened data set."""

    manifest: DataManifest
    """Manifest of the data folder."""
    train: TokenPart
    """Bytes to train on."""
    heldout: TokenPart
    """Bytes of held-out evaluations."""
    sequence_length: int
    """Tokens of one sample."""

    @classmethod
    def open(cls, folder: Path, sequence_length: int, *, verify_hashes: bool, on_bytes: OnBytes = unwatched) -> Self:
        """Opens and checks a data folder: sizes always, and what is read block by block, when it is first used.

        With `verify_hashes` parts of up to `EAGER_BYTES` are compared with their hashes as a whole, at once, and larger ones without
        a table of blocks in the background.

        Raises:
            DataError: a part is missing, shorter than its manifest says, changed, or too small for one window.
        """
        manifest = DataManifest.read(folder)
        parts: dict[Split, TokenPart] = {}
        for split in SPLITS:
            path, facts = _part_path(folder, split), manifest.part(split)
            is_small = facts.bytes <= EAGER_BYTES
            check_part(folder, split, manifest, verify_hash=verify_hashes and is_small, on_bytes=on_bytes)
            check_window(str(path), facts.bytes, sequence_length)
            table = table_beside(path, facts.sha256)
            part = FilePart(path, facts.bytes, table, on_bytes)
            if verify_hashes and table is None and not is_small:
                part.verify_behind(facts.sha256)
            parts[split] = part
        return cls(manifest, parts["train"], parts["heldout"], sequence_length)

    @property
    def windows(self) -> int:
        """Number of training samples: windows of sequence_length inputs and one more byte, the last target."""
        return (len(self.train) - 1) // self.sequence_length

    def train_windows(self, windows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Reads training windows as (samples, sequence_length + 1) tokens."""
        return self._gather(self.train, windows.astype(np.int64) * self.sequence_length)

    def heldout_windows(self, count: int) -> NDArray[np.int64]:
        """Start bytes of up to `count` held-out windows, evenly spread, equal at every evaluation of every rank."""
        available = (len(self.heldout) - 1) // self.sequence_length
        count = min(count, available)
        return (np.arange(count, dtype=np.int64) * available // count) * self.sequence_length

    def heldout_tokens(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Reads held-out windows as (samples, sequence_length + 1) tokens."""
        return self._gather(self.heldout, starts)

    def close(self) -> None:
        """Ends what runs beside the reading."""
        self.train.close()
        self.heldout.close()

    def _gather(self, part: TokenPart, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        return part.windows(starts, self.sequence_length + 1).astype(np.int64)


def _part_path(folder: Path, split: Split) -> Path:
    return folder / f"{split}.bin"


def check_part(
    folder: Path, split: Split, manifest: DataManifest, *, verify_hash: bool, on_bytes: OnBytes = unwatched
) -> None:
    """Compares one part with its manifest.

    Raises:
        DataError: missing, of another size, or (with `verify_hash`) of another content.
    """
    path, facts = _part_path(folder, split), manifest.part(split)
    try:
        size_bytes = path.stat().st_size
        if size_bytes != facts.bytes:
            raise DataError(
                f"{path}: {size_bytes} bytes, its manifest says {facts.bytes}; the copy is incomplete or was replaced: "
                f"remove the folder's {MANIFEST} and {_how_to_prepare(folder)}"
            )
        if verify_hash and sha256_of_file(path, on_bytes) != facts.sha256:
            raise DataError(
                f"{path}: its SHA-256 is not the manifest's; remove {MANIFEST} and {_how_to_prepare(folder)}"
            )
    except FileNotFoundError as error:
        raise DataError(f"{path}: {error.strerror}; {_how_to_prepare(folder)}") from None
    except OSError as error:
        raise PassingDataError(f"{path}: {error.strerror}") from None


def split_of(path: str) -> Split:
    """Part of a source file, by a hash of its relative path: equal in every release and place."""
    word = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
    return "heldout" if word < HELDOUT_FRACTION * 2**64 else "train"


def source_paths(source: Path) -> list[str]:
    """Lists the Python sources under a folder as relative POSIX paths, sorted."""
    found: list[str] = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [(Path(folder) / name).relative_to(source).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def prepare(output: Path, source: Path) -> bool:
    """Prepares a data folder. Returns True if it was written now, False if a good one was there.

    Raises:
        DataError: the source has no Python files, or only ones of a single split.
        OSError: the folder cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    if _is_prepared(output):
        return False
    paths = source_paths(source)
    if {split_of(path) for path in paths} != set(SPLITS):
        raise DataError(
            f"--source {source}: {len(paths)} .py files are too few to train on and to hold out; name a larger folder"
        )
    (output / MANIFEST).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=output) as scratch:
        manifest = _write_parts(Path(scratch), source, paths)
        (Path(scratch) / MANIFEST).write_text(manifest.to_json())
        write_tables(Path(scratch))
        for name in ("train.bin", "heldout.bin", "train.blocks", "heldout.blocks", MANIFEST):
            (Path(scratch) / name).chmod(0o644)
            (Path(scratch) / name).replace(output / name)
    return True


def write_tables(folder: Path) -> None:
    """Writes the tables of blocks of a data folder.

    Raises:
        DataError: a part is not what the folder's manifest says.
        OSError: the folder cannot be read or written.
    """
    manifest = DataManifest.read(folder)
    for split in SPLITS:
        path = _part_path(folder, split)
        table = BlockTable.of_file(path)
        if table.sha256 != manifest.part(split).sha256:
            raise DataError(f"{path}: its SHA-256 is not the manifest's; {_how_to_prepare(folder)}")
        table.write(table_path(path))


def _is_prepared(output: Path) -> bool:
    """Whether a good data set is there. Prints what is wrong with a bad one, before it is replaced."""
    if not (output / MANIFEST).exists():
        return False
    try:
        manifest = DataManifest.read(output)
        for split in SPLITS:
            check_part(output, split, manifest, verify_hash=True)
    except DataError as error:
        print(f"preparing again: {error}", file=sys.stderr)
        return False
    return True


def _write_parts(folder: Path, source: Path, paths: list[str]) -> DataManifest:
    files: list[SourceFile] = []
    hashes = {split: hashlib.sha256() for split in SPLITS}
    with _part_path(folder, "train").open("wb") as train, _part_path(folder, "heldout").open("wb") as heldout:
        for done, path in enumerate(paths, start=1):
            split = split_of(path)
            content = (source / path).read_bytes()
            (train if split == "train" else heldout).write(content + SEPARATOR)
            hashes[split].update(content + SEPARATOR)
            files.append(SourceFile(path, len(content), hashlib.sha256(content).hexdigest(), split))
            _show_progress(done, len(paths))
        for part in (train, heldout):
            part.flush()
            os.fsync(part.fileno())
    facts = {
        split: PartFacts(
            bytes=sum(file.bytes + len(SEPARATOR) for file in files if file.split == split),
            sha256=hashes[split].hexdigest(),
            files=sum(file.split == split for file in files),
        )
        for split in SPLITS
    }
    return DataManifest(train=facts["train"], heldout=facts["heldout"], files=tuple(files))


def _show_progress(done: int, total: int) -> None:
    """Shows a bar on a terminal, otherwise a line at every tenth of the way."""
    if sys.stderr.isatty():
        filled = 40 * done // total
        print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total} files", end="", file=sys.stderr)
        if done == total:
            print(file=sys.stderr)
    elif done == total or done * 10 // total != (done - 1) * 10 // total:
        print(f"{done}/{total} files", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns 0 if the data set is there, 1 if it could not be prepared."""
    parser = argparse.ArgumentParser(
        prog="python -m cost_aware_trainer.data", description="Prepares the bundled data set."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="write train.bin, heldout.bin and manifest.json")
    command.add_argument("--output", type=Path, required=True, help="the data folder to write")
    stdlib = Path(sysconfig.get_path("stdlib"))
    command.add_argument("--source", type=Path, default=stdlib, help="a folder of .py files")
    command = commands.add_parser("blocks", help="write tables of blocks beside the files of a data folder")
    command.add_argument("--data", type=Path, required=True, help="the data folder")
    options = parser.parse_args(arguments)
    if options.command == "blocks":
        return _table(options.data)
    try:
        written = prepare(options.output, options.source)
        manifest = DataManifest.read(options.output)
    except (DataError, OSError) as error:
        print(f"not prepared: {error}", file=sys.stderr)
        return 1
    print(
        f"{'prepared' if written else 'already prepared'}: {options.output}: {manifest.train.bytes} bytes of "
        f"{manifest.train.files} files to train on, {manifest.heldout.bytes} of {manifest.heldout.files} held out"
    )
    return 0


def _table(folder: Path) -> int:
    try:
        write_tables(folder)
    except (DataError, OSError) as error:
        print(f"no tables: {error}", file=sys.stderr)
        return 1
    print(f"tables of blocks: {folder}")
    return 0
