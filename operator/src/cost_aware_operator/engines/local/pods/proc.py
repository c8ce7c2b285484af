"""Processes of this host, by descent and by pod, and how they are killed for certain. Linux and the standard library only."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from cost_aware_operator.engines.local.pods.launch import ENV_POD_FOLDER, ProcessIdentity

KILL_PATIENCE_SECONDS = 10.0
"""Seconds after which processes that do not die of SIGKILL are left to the kernel."""
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process: none of them is lost out of sight."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants_of(pid: int) -> list[int]:
    """All living descendants of a process, parents first."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for child in _pids():
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children[int(parent)].append(child)
    found, queue = [], collections.deque(children[pid])
    while queue:
        child = queue.popleft()
        found.append(child)
        queue.extend(children[child])
    return found


def pids_of_pod(folder: Path) -> list[int]:
    """All living processes that were started with a pod's environment, whoever their parent is."""
    marker = f"{ENV_POD_FOLDER}={folder}".encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and ProcessIdentity.of(pid):
                found.append(pid)
    return found


def signal_process(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Sends a signal to a process if it is still the one that is meant, and says whether it was."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        # the descriptor holds on to one process; whether it is the right one is looked at after it was opened
        if not identity.is_alive:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def kill_pod(folder: Path, parent: int | None = None) -> list[int]:
    """Kills all processes of a pod, and all descendants of a process if one is named; returns those that do not die."""
    deadline_seconds = time.monotonic() + KILL_PATIENCE_SECONDS
    while left := _left(folder, parent):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_seconds:
            return left
        time.sleep(0.01)
    return []


def _left(folder: Path, parent: int | None) -> list[int]:
    descended = descendants_of(parent) if parent is not None else []
    return [pid for pid in dict.fromkeys([*descended, *pids_of_pod(folder)]) if pid != os.getpid()]


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
