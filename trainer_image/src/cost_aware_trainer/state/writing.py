"""Writing and reading of a checkpoint's files: hashed while they are written, and shown to whoever waits piece by piece."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from cost_aware_trainer.data.hashing import PIECE_BYTES, OnBytes
from cost_aware_trainer.distributed.meetings import Meeting
from cost_aware_trainer.state.staging import StateCopies, staged

_WRITE_BUFFER_BYTES, _READ_BUFFER_BYTES = 2**20, 2**15
"""Sizes of buffers. Reading jumps from tensor to tensor, and what was read ahead is lost."""
_SYNCED_BYTES = 8 * PIECE_BYTES
"""Bytes after which a file that is being written is made durable, so that what is told as written does not wait in memory."""


class Snapshot(AsyncStager):
    """Stager that copies a state to CPU memory, so that training may go on, and keeps the copy for its checksums."""

    _synchronize_after_execute = False

    def __init__(self, copies: StateCopies) -> None:
        self._copies = copies
        self.state: dict[str, Tensor] = {}

    def synchronize_staging(self) -> None:
        """Does nothing: whoever writes waits for `stage`'s future."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Starts a copy that later steps do not change, if they are held until it is made (`StateCopies.hold`)."""
        self.state = staged(state_dict, self._copies)
        waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        made = waiting.submit(self._made)
        waiting.shutdown(wait=False)
        return made

    def _made(self) -> dict[str, Any]:
        self._copies.wait()
        return self.state


class HashedFile(io.FileIO):
    """File that is hashed while it is written."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path, "wb")
        self.digest = hashlib.sha256()
        """Hash of what was written."""
        self._on_bytes, self._unsynced_bytes = on_bytes, 0

    def write(self, data: Any) -> int:
        """Writes at most one piece, as files may."""
        piece = memoryview(data).cast("B")[:PIECE_BYTES]
        count = super().write(piece)
        self.digest.update(piece[:count])
        self._unsynced_bytes += count
        if self._unsynced_bytes >= _SYNCED_BYTES:
            os.fdatasync(self.fileno())
            self._unsynced_bytes = 0
        self._on_bytes(count)
        return count


class ShownFile(io.FileIO):
    """File whose reading is shown."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path, "rb")
        self._on_bytes = on_bytes

    def readinto(self, buffer: Any) -> int:
        """Reads at most one piece, as files may."""
        count = super().readinto(memoryview(buffer).cast("B")[:PIECE_BYTES]) or 0
        self._on_bytes(count)
        return count


class WatchedFileSystem(FileSystem):
    """File system of DCP's readers and writers that hashes what is written and shows what is read and written."""

    def __init__(self, on_bytes: OnBytes) -> None:
        self._on_bytes = on_bytes
        self.hashes: dict[str, str] = {}
        """Hexadecimal SHA-256 of each file that was written here, by name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Opens a file for reading or for writing."""
        path = Path(path)
        if mode == "rb":
            with io.BufferedReader(ShownFile(path, self._on_bytes), _READ_BUFFER_BYTES) as stream:
                yield stream
            return
        with HashedFile(path, self._on_bytes) as file:
            with io.BufferedWriter(cast("io.RawIOBase", file), _WRITE_BUFFER_BYTES) as buffered:
                yield buffered
            self.hashes[path.name] = file.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Renames a file that was written here."""
        super().rename(path, new_path)
        self.hashes[Path(new_path).name] = self.hashes.pop(Path(path).name)


class CheckpointWriter(FileSystemWriter):
    """Writer of one checkpoint's files. DCP's collectives come before any storage is touched, or after all ranks have met."""

    def __init__(self, folder: Path, meeting: Meeting) -> None:
        """Takes the meeting that ranks come to when they have written."""
        super().__init__(folder)
        self.fs: WatchedFileSystem = WatchedFileSystem(meeting.progressed)
        self._meeting = meeting
        self._finished: tuple[Metadata, list[list[WriteResult]]] | None = None

    @property
    def hashes(self) -> dict[str, str]:
        """Hexadecimal SHA-256 of each file that this rank has written, by name."""
        return self.fs.hashes

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leaves the plan as it is. The folder is made when it is written to: DCP's next step is a collective."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Writes this rank's file, then waits until all ranks have written theirs."""
        try:
            self.fs.mkdir(self.path)
            written = super().write_data(plan, planner)
        except BaseException as error:
            self._meeting.agree(str(error) or repr(error))
            raise
        self._meeting.agree()
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keeps the metadata for `write_metadata`: the others wait for this in a collective."""
        self._finished = metadata, results

    def write_metadata(self) -> None:
        """Writes `.metadata`, on rank 0."""
        assert self._finished is not None  # noqa: S101  DCP has called `finish` on rank 0
        super().finish(*self._finished)
