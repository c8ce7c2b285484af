"""torchrun as a child process that can be killed with all of its ranks, whatever sessions they moved to.

torchrun gives every rank a session of its own. Killing torchrun's process group would leave ranks behind, which hold ports,
memory and half-written files. So the agent makes itself the adoptive parent of orphans (as pid 1 already is) and kills by
descent. The module works on Linux only and uses the standard library only.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TAIL_LINES = 200
_MESSAGE_LINES = 15
_MESSAGE_CHARACTERS = 4000
_KILL_PATIENCE_SECONDS = 10.0
_REAP_PATIENCE_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
_TORCHRUN_VERDICT = re.compile(r"elastic/multiprocessing/api\.py.*failed \(exitcode: (-?\d+)\)")
_TORCHRUN_SUMMARY = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_TORCHRUN_FORCED = re.compile(r"Unable to shutdown process (\d+) ")
_TERMINATED = str(-signal.SIGTERM)
_OWN_DEATHS = {str(-s) for s in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}
"""Signals that say that a rank died by itself. SIGABRT is none: NCCL's watchdog sends it when a peer was lost."""
_NOISE = re.compile(r"^(nanobind: | - leaked | - \.\.\. skipped remainder|See https://nanobind)")
"""Lines that extension modules write when a process ends. They say nothing about the reason."""


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process instead of pid 1's.

    Raises:
        OSError: the kernel refuses, which Linux since 3.4 does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(pid: int) -> list[int]:
    """Lists all living descendants of a process, parents before children."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for child, (parent, state) in _processes().items():
        if state != "Z":
            children[parent].append(child)
    found, queue = [], collections.deque(children[pid])
    while queue:
        child = queue.popleft()
        found.append(child)
        queue.extend(children[child])
    return found


def _processes() -> dict[int, tuple[int, str]]:
    """Reads the parent and the state letter of every process."""
    found: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        # A process may end while its entry is read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if entry.isdigit():
                # The name in parentheses may hold anything, so count from its end.
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry)] = (int(parent), state)
    return found


class Tail:
    """Passes on all that a child's ranks write to stderr, and keeps the last lines for a message.

    Text that begins with `mark` is not passed on. It says that everything before it has been read; see `settle`.
    """

    def __init__(self, stream: Iterable[str], mark: str | None = None) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._stream, self._mark = stream, mark
        self._marks: set[str] = set()
        self._marked = threading.Condition()
        self._reader = threading.Thread(target=self._pass_on, name="stderr", daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        for line in self._stream:
            text = self._take_mark(line) if self._mark else line
            if text:
                sys.stderr.write(text)
                sys.stderr.flush()
                self._lines.append(text.rstrip())
        with self._marked:
            self._mark = None
            self._marked.notify_all()

    def _take_mark(self, line: str) -> str:
        """Notes the mark of a line and returns the text before it; a mark may follow a line that was cut short."""
        text, mark, rest = line.partition(self._mark or "")
        if mark:
            with self._marked:
                self._marks.add(rest.strip())
                self._marked.notify_all()
        return text

    def settle(self, mark: str = "") -> None:
        """Gives the reader a second to read all that was written before `mark`, or before the child ended."""
        if mark:
            with self._marked:
                self._marked.wait_for(lambda: mark in self._marks or self._mark is None, _SETTLE_SECONDS)
        else:
            self._reader.join(_SETTLE_SECONDS)

    def clear(self) -> None:
        """Forgets the lines of an earlier launch."""
        self._lines.clear()

    def last_error(self) -> str:
        """Last lines that the ranks wrote before torchrun's own summary, and torchrun's verdict; bounded."""
        return last_error(self._lines)


def last_error(lines: Iterable[str]) -> str:
    """Message of a torchrun that failed, from the lines that it and its ranks wrote; see `Tail.last_error`."""
    lines = [line for line in list(lines) if not _NOISE.match(line)]
    verdict, code = next(
        ((i, found.group(1)) for i, line in enumerate(lines) if (found := _TORCHRUN_VERDICT.search(line))), (None, "")
    )
    if verdict is not None:
        cause = _cause(lines, code)
        lines = [*[line for line in lines[:verdict] if line.strip()][-_MESSAGE_LINES:], f"a rank exited with {cause}"]
    return "\n".join(lines[-_MESSAGE_LINES - 1 :])[-_MESSAGE_CHARACTERS:]


def _cause(lines: Sequence[str], verdict: str) -> str:
    """Exit code of the rank whose end caused the others'.

    torchrun's verdict is the failure with the earliest whole second. That may be a peer that lost its connection to a killed
    rank, or a rank that torchrun terminated itself. Its summary names all failures, and a rank that died by itself explains the
    others.
    """
    ended = [(found[1], found[2]) for line in lines if (found := _TORCHRUN_SUMMARY.match(line))]
    forced = {found[1] for line in lines if (found := _TORCHRUN_FORCED.search(line))}
    killed = (code for code, pid in ended if code in _OWN_DEATHS and pid not in forced)
    own = (code for code, _ in ended if code != _TERMINATED) if verdict == _TERMINATED else iter(())
    return next(killed, None) or next(own, None) or verdict


def kill_descendants(spared: int | None = None) -> None:
    """Kills every descendant of this process except `spared` at once, and waits until they are gone.

    Raises:
        RuntimeError: some are still there after ten seconds; only an uninterruptible wait in the kernel explains it.
    """
    deadline_seconds = time.monotonic() + _KILL_PATIENCE_SECONDS
    while remaining := [pid for pid in descendants(os.getpid()) if pid != spared]:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_seconds:
            raise RuntimeError(f"processes {remaining} cannot be killed")
        time.sleep(0.01)


def reap_adopted(*kept: int | None) -> None:
    """Collects the exit codes of orphans that this process adopted; those of `kept` stay with their Popen.

    A process with threads shows as ended a moment before the last of them has, and only then can be waited for.
    """
    deadline_seconds = time.monotonic() + _REAP_PATIENCE_SECONDS
    while ended := [
        p for p, (parent, state) in _processes().items() if parent == os.getpid() and state == "Z" and p not in kept
    ]:
        for pid in ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline_seconds:
            return
        time.sleep(0.01)


def tethered(command: Sequence[str]) -> list[str]:
    """Makes the command of a child that gets SIGTERM when this process dies, by SIGKILL too. Start it from the main thread."""
    return [sys.executable, "-m", "cost_aware_trainer.agent.tether", str(os.getpid()), *command]


class Torchrun:
    """Running torchrun, with the last lines that it and its ranks wrote to stderr."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603  the operator's order, authenticated by its token
            tethered(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        assert self._process.stderr is not None  # noqa: S101  it was asked for
        self._tail = Tail(self._process.stderr)

    def exit_code(self) -> int | None:
        """Exit code, or None while torchrun runs."""
        code = self._process.poll()
        if code is not None:
            self._tail.settle()
        return code

    def terminate(self) -> None:
        """Sends SIGTERM to torchrun, which passes it on to its ranks and kills them when its own patience ends."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self, spared: int | None = None) -> None:
        """Kills torchrun and every descendant of this agent except `spared` at once; raises what `kill_descendants` raises."""
        kill_descendants(spared)
        self._process.wait()
        reap_adopted(self._process.pid, spared)
        self._tail.settle()

    def last_error(self) -> str:
        """See `Tail.last_error`."""
        return self._tail.last_error()
