"""Parts of a data set as files: read window by window, and verified block by block when a block is first used.

A table of blocks lies beside the file (`train.blocks` beside `train.bin`), so that nobody has to read a large file as a whole before
the first step. What a rank has verified it verifies again if the file was written to since. Files are read and not mapped: a file that
is cut then gives an error that names it, and not a signal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cost_aware_trainer.data.hashing import OnBytes, unwatched

logger = logging.getLogger(__name__)

SMALLEST_BLOCK_BYTES = 256 * 2**10
MOST_BLOCKS = 2**20
_DIGEST_BYTES = 32
_LONGEST_HEADER_BYTES = 4096


class DataError(ValueError):
    """Data folder that cannot be used. The text says which file, what is wrong, and how to get a good one."""


class PassingDataError(DataError):
    """Data that cannot be read now. Another attempt may find them."""


class TokenPart(Protocol):
    """Bytes of one part, on disk or in a store."""

    def __len__(self) -> int:
        """Size in bytes."""

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Reads `length` bytes from each start on, as (starts, length); raises DataError if that fails."""

    def close(self) -> None:
        """Ends what runs beside the reading."""


def block_bytes_of(size_bytes: int) -> int:
    """Size of the blocks of a file: a power of two, so that there are at most `MOST_BLOCKS`."""
    block_bytes = SMALLEST_BLOCK_BYTES
    while block_bytes * MOST_BLOCKS < size_bytes:
        block_bytes *= 2
    return block_bytes


@dataclass(frozen=True)
class BlockTable:
    """SHA-256 of each block of a file."""

    size_bytes: int
    """Size of the file."""
    sha256: str
    """Hexadecimal SHA-256 of the whole file, as the data set's manifest has it."""
    block_bytes: int
    """Size of a block; the last one may be shorter."""
    digests: bytes
    """SHA-256 of the blocks, one after the other."""

    def __getitem__(self, block: int) -> bytes:
        return self.digests[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]

    @classmethod
    def of_file(cls, path: Path, on_bytes: OnBytes = unwatched) -> BlockTable:
        """Reads a whole file and makes its table."""
        size_bytes = path.stat().st_size
        block_bytes, whole, digests = block_bytes_of(size_bytes), hashlib.sha256(), bytearray()
        with path.open("rb") as file:
            while block := file.read(block_bytes):
                whole.update(block)
                digests += hashlib.sha256(block).digest()
                on_bytes(len(block))
        return cls(size_bytes, whole.hexdigest(), block_bytes, bytes(digests))

    def write(self, path: Path) -> None:
        """Writes the table, atomically, with a checksum of its own."""
        header = {"size_bytes": self.size_bytes, "sha256": self.sha256, "block_bytes": self.block_bytes}
        content = json.dumps(header, sort_keys=True).encode() + b"\n" + self.digests
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_bytes(content + hashlib.sha256(content).digest())
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> BlockTable:
        """Reads a table.

        Raises:
            ValueError: it is damaged.
            OSError: it cannot be read.
        """
        content = path.read_bytes()
        content, checksum = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        header, newline, digests = content.partition(b"\n")
        if hashlib.sha256(content).digest() != checksum or not newline or len(header) > _LONGEST_HEADER_BYTES:
            raise ValueError("its own checksum differs")
        return cls(**json.loads(header), digests=digests)


def table_path(path: Path) -> Path:
    """Path of a file's table."""
    return path.with_suffix(".blocks")


def table_beside(path: Path, sha256: str) -> BlockTable | None:
    """Table that lies beside a file of this hash; None if there is none.

    Raises:
        DataError: it is damaged, or of another file.
    """
    try:
        table = BlockTable.read(table_path(path))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{table_path(path)}: {error}; {how_to_table(path.parent)}") from None
    except OSError as error:
        raise PassingDataError(f"{table_path(path)}: {error.strerror}") from None
    if table.sha256 != sha256 or len(table.digests) != _DIGEST_BYTES * -(-table.size_bytes // table.block_bytes):
        raise DataError(f"{table_path(path)}: it is of another {path.name}; {how_to_table(path.parent)}")
    return table


def how_to_table(folder: Path) -> str:
    """Says how a table is made again."""
    return f"run `python -m cost_aware_trainer.data blocks --data {folder}`"


class FilePart(TokenPart):
    """Part in a file."""

    def __init__(
        self, path: Path, size_bytes: int, table: BlockTable | None = None, on_bytes: OnBytes = unwatched
    ) -> None:
        """Opens the file. Without a table each block has to stay as it is when it is first used."""
        self._path, self._size_bytes, self._table, self._on_bytes = path, size_bytes, table, on_bytes
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        self._descriptor = self._file.fileno()
        self._block_bytes = table.block_bytes if table else block_bytes_of(size_bytes)
        self._seen: dict[int, bytes] = {}
        self._verified: set[int] = set()
        self._stamp = self._stat()
        self._lock = threading.Lock()
        self._check: WholeCheck | None = None

    def __len__(self) -> int:
        return self._size_bytes

    def verify_behind(self, sha256: str) -> None:
        """Begins to compare the whole file with its hash, in the background."""
        self._check = WholeCheck(self._path, sha256, self._on_bytes)

    def close(self) -> None:
        """See `TokenPart`."""
        if self._check:
            self._check.close()

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """See `TokenPart`."""
        if self._check:
            self._check.raise_problem()
        found = np.empty((len(starts), length), dtype=np.uint8)
        with self._lock:
            stamp = self._stat()
            if stamp != self._stamp:
                logger.warning("%s was written to while it is read: its blocks are verified again", self._path)
                self._stamp = stamp
                self._verified.clear()
            for row, start in zip(found, starts.tolist(), strict=True):
                for block in range(start // self._block_bytes, (start + length - 1) // self._block_bytes + 1):
                    if block not in self._verified:
                        self._verify(block)
                self._read(start, row.data)
        return found

    def _stat(self) -> tuple[int, int]:
        try:
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise PassingDataError(f"{self._path}: {error.strerror}") from None
        if found.st_size < self._size_bytes:
            raise DataError(
                f"{self._path}: {found.st_size} bytes, {self._size_bytes} were there: it was cut while it was read; put the "
                "whole file back"
            )
        return found.st_size, found.st_mtime_ns

    def _verify(self, block: int) -> None:
        first = block * self._block_bytes
        content = bytearray(min(self._block_bytes, self._size_bytes - first))
        self._read(first, memoryview(content))
        self._on_bytes(len(content))
        digest = hashlib.sha256(content).digest()
        expected = self._table[block] if self._table else self._seen.setdefault(block, digest)
        if digest != expected:
            was = "its table of blocks says" if self._table else "they were before"
            raise DataError(
                f"{self._path}: bytes {first} to {first + len(content)} are not what {was}: the file was overwritten or is "
                "damaged; put the right one back"
            )
        self._verified.add(block)

    def _read(self, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            at = start + done
            try:
                count = os.preadv(self._descriptor, [into[done:]], at)
            except OSError as error:
                raise PassingDataError(f"{self._path}: byte {at}: {error.strerror}") from None
            if count == 0:
                raise DataError(
                    f"{self._path}: ends at byte {at}: it was cut while it was read; put the whole file back"
                )
            done += count


class WholeCheck:
    """Comparison of a large file with its hash while a run already reads it, for data sets without a table of blocks."""

    def __init__(self, path: Path, sha256: str, on_bytes: OnBytes) -> None:
        self._path, self._sha256, self._on_bytes = path, sha256, on_bytes
        self._problem = ""
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verify-data", daemon=True)
        self._thread.start()

    def raise_problem(self) -> None:
        """Raises DataError if the file is not what its hash says."""
        if self._problem:
            raise DataError(self._problem)

    def close(self) -> None:
        """Ends the comparison."""
        self._stops.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            table = BlockTable.of_file(self._path, self._read)
        except (_CheckEndedError, OSError):
            # whoever needs bytes that cannot be read says so
            return
        if table.sha256 != self._sha256:
            self._problem = f"{self._path}: its SHA-256 is not the manifest's; put the right file back"
            return
        try:
            table.write(table_path(self._path))
        except OSError as error:
            logger.info("%s was verified; its table of blocks cannot be kept there: %s", self._path, error)

    def _read(self, count: int) -> None:
        if self._stops.is_set():
            raise _CheckEndedError
        self._on_bytes(count)


class _CheckEndedError(Exception):
    """The run ends."""
