"""A pod's folder: what it is started with, which process keeps it, and how it ended. Standard library only: its keeper reads it.

pods/UID/  launch.json  keeper.json  ended.json  lock  log  log.1  termination  volumes/
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENV_POD_FOLDER = "CATJ_POD_FOLDER"
"""Variable by which every process of a pod is known, whoever its parent is now."""
EXIT_UNKNOWN = 137
"""Exit code of a pod whose own nobody knows, as a kubelet writes it."""
REASON_UNKNOWN = "ContainerStatusUnknown"
"""Reason of such an end."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that no later one of its id is taken for."""

    pid: int
    """Its id."""
    start_ticks: int
    """When it started, in ticks since the boot."""
    boot: str
    """The boot that it belongs to."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The living process of an id; None where there is none."""
        try:
            # the name in parentheses may hold anything, so count from its end
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] == "Z" else cls(pid, int(fields[19]), boot)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return ProcessIdentity.of(self.pid) == self


@dataclass(frozen=True)
class PodLaunch:
    """All that a pod is started with. It is written before the start and never again."""

    uid: str
    """Its uid."""
    name: str
    """Its name."""
    namespace: str
    """Its namespace."""
    node: str
    """Its node's name."""
    job_uid: str
    """Uid of the training job that it belongs to; empty if not told."""
    address: str
    """Its own address."""
    rendezvous_port: int
    """First port of its job's rendezvous."""
    grace_seconds: float
    """Seconds from the request to end to SIGKILL, unless the request says otherwise."""
    command: tuple[str, ...]
    """The agent's command; its keeper adds `--lifeline-fd`."""
    environment: Mapping[str, str]
    """The agent's environment."""
    mounts: Mapping[str, str]
    """Folders of this host by the path in the container."""
    working_folder: str
    """Folder in which the agent runs."""
    temporary_folder: str
    """A folder of the pod's own with a short path, as sockets need it; its keeper makes and removes it."""
    devices: tuple[str, ...] = ()
    """GPUs dealt to it."""
    ends_folder: str = ""
    """Folder in which its agent leaves word of its end; empty where it leaves none."""
    log_bytes: int = 10 * 2**20
    """Bytes after which its log begins anew."""


@dataclass(frozen=True)
class KeeperRecord:
    """The processes of a pod that was started."""

    keeper: ProcessIdentity
    """The process that keeps it."""
    agent: ProcessIdentity
    """Its first process."""
    started_at: float
    """When it was started, in seconds of Unix time."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a pod's process ended."""

    exit_code: int
    """Its exit code; 128 and the signal's number where one killed it."""
    started_at: float | None
    """When it started, in seconds of Unix time; None if it never did."""
    finished_at: float
    """When it ended, in seconds of Unix time."""
    reason: str = field(default="")
    """Why, where the exit code is not the process's own."""
    message: str = field(default="")
    """More about it."""


class PodFolder:
    """The folder of one pod."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log, self.older_log = path / "log", path / "log.1"
        self.termination, self.volumes = path / "termination", path / "volumes"
        self._launch, self._keeper, self._ended = (path / f"{n}.json" for n in ("launch", "keeper", "ended"))

    def launch(self) -> PodLaunch | None:
        """What the pod is started with; None where that was never decided."""
        found = _read(self._launch)
        if found is None:
            return None
        lists = {name: tuple(found[name]) for name in ("command", "devices")}
        return PodLaunch(**(found | lists))

    def write_launch(self, launch: PodLaunch) -> None:
        """Decides what the pod is started with."""
        _write(self._launch, dataclasses.asdict(launch))

    def keeper(self) -> KeeperRecord | None:
        """The pod's processes; None before it was started."""
        found = _read(self._keeper)
        if found is None:
            return None
        return KeeperRecord(
            ProcessIdentity(**found["keeper"]), ProcessIdentity(**found["agent"]), float(found["started_at"])
        )

    def write_keeper(self, record: KeeperRecord) -> None:
        """Says which processes are the pod's."""
        _write(self._keeper, dataclasses.asdict(record))

    def end(self) -> ProcessEnd | None:
        """How the pod ended; None while it may run."""
        found = _read(self._ended)
        return None if found is None else ProcessEnd(**found)

    def write_end(self, end: ProcessEnd) -> None:
        """Says how the pod ended. From then on it is never started."""
        _write(self._ended, dataclasses.asdict(end))

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Holds the pod's lock and says whether it could be had at once. The kernel frees it when its holder dies."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def last_seen_seconds(self) -> float:
        """The last moment at which the pod is known to have done something, in seconds of Unix time."""
        times = [file.stat().st_mtime for file in (self.log, self._keeper, self._launch) if file.exists()]
        return min(time.time(), max(times, default=time.time()))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


def _write(file: Path, content: object) -> None:
    """Writes whole or not at all, and for this user alone: an environment may hold secrets."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)
