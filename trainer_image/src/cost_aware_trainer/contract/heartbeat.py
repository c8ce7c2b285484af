"""Heartbeats of ranks: finds within seconds a rank that hangs or has died, and says which one, where and doing what.

Each rank keeps a record of 96 bytes, its pulse, in a file that its agent reads. It says when the rank last made progress, at
which step, in which phase, and whether it waits for others in that phase. Writing it is a store to mapped memory, cheap
enough for every phase of every step. One rank that hangs makes all others wait. So among ranks without progress the one
that does not wait is to blame.

This module imports the standard library only, because the agent imports it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_SECONDS = 20.0
"""Seconds that a rank may stay in one phase of one step before it counts as stalled."""
WAITING_FACTOR = 2.0
"""Factor on the limit for a rank that waits for others, so that the agent of the rank it waits for speaks first."""
PHASE_LIMITS_SECONDS: Mapping[str, float] = {
    "start": 600.0,
    "fetch": math.inf,
    "data": 60.0,
    "checkpoint": 600.0,
    "evaluation": 300.0,
}
"""Seconds for phases that may take longer. `start` is all that comes before the first step, except `fetch`, which copies data over
the network and has time-outs of its own."""

_RECORD = struct.Struct("<QdqqqB39s16xQ")
"""Sequence number, seconds, step, first step, process, waits, phase, and the sequence number again, which shows a torn record."""
_PREFIX = "pulse-"
_DEAD = frozenset("ZXx")
"""States of a process that has ended; `Z` is one that was not waited for yet."""
_STOPPED = frozenset("Tt")


@dataclass(frozen=True)
class Pulse:
    """Last record of a rank."""

    rank: int
    """Number of the rank in the run."""
    process: int
    """Process id of the rank."""
    at_seconds: float
    """Time of the record by the host's monotonic clock, which all of its processes share."""
    step: int
    """Step that the rank works on."""
    phase: str
    """Phase of the step."""
    waits: bool
    """Whether the rank waits for others."""
    finished: int = 1
    """Steps that this rank has finished under its present plan."""


@dataclass(frozen=True)
class Stall:
    """Rank that is to blame, or the one that has waited longest if nobody on this node is."""

    rank: int
    """Number of the rank in the run."""
    node: str
    """Node of the rank."""
    step: int
    """Step that the rank works on."""
    phase: str
    """Phase of the step."""
    silent_seconds: float
    """Seconds without progress."""
    is_dead: bool
    """Whether its process is gone."""
    waits: bool
    """Whether the rank waits for others."""

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.node}, step {self.step}, {self.phase}"
        if self.is_dead:
            return f"{where}: its process is gone"
        if self.waits:
            return f"{where}: has waited {self.silent_seconds:.0f} s for ranks of other nodes, or for the network"
        return f"{where}: has not got on for {self.silent_seconds:.0f} s"


class Heartbeat:
    """Writer of one rank's record. Without a folder it writes for nobody. Use it from one thread only."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = folder / f"{_PREFIX}{rank}" if folder else None
        self._memory: mmap.mmap | bytearray = bytearray(_RECORD.size)
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self._memory)
            with self._path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self.process = os.getpid()
        self._sequence, self._step, self._phase, self._waits = 0, 0, "start", False
        self._first_step: int | None = None
        self.beat("start")

    def begin_anew(self) -> None:
        """Counts finished steps from 0 again: those until now were under another plan."""
        self._first_step = None

    def beat(self, phase: str | None = None, step: int | None = None, *, waits: bool = False) -> None:
        """Records progress now, in a phase (39 bytes at most) and at a step; each stays as it was if not given."""
        self._sequence += 1
        if phase is not None:
            self._phase = phase
        if step is not None:
            self._step = step
            if self._first_step is None:
                self._first_step = step
        self._waits = waits
        name = self._phase.encode()[:39]
        first_step = self._step if self._first_step is None else self._first_step
        now_seconds, sequence, process = time.monotonic(), self._sequence, self.process
        _RECORD.pack_into(
            self._memory, 0, sequence, now_seconds, self._step, first_step, process, waits, name, sequence
        )

    @contextlib.contextmanager
    def waiting(self, phase: str | None = None) -> Iterator[None]:
        """Marks a block that needs other ranks: a rank inside it is not to blame."""
        outer, waits = self._phase, self._waits
        self.beat(phase, waits=True)
        yield
        self.beat(outer, waits=waits)

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Marks a block as a phase, and then returns to the phase around it."""
        outer = self._phase
        self.beat(phase)
        yield
        self.beat(outer)

    def close(self) -> None:
        """Removes the record, so that a rank that has ended as it should is not missed."""
        if self._path:
            self._path.unlink(missing_ok=True)


def read_pulses(folder: Path) -> list[Pulse]:
    """Reads the records in a folder, by rank. A record that is being written at the moment is left out."""
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        if len(content) != _RECORD.size:
            continue
        sequence, seconds, step, first_step, process, waits, phase, again = _RECORD.unpack(content)
        if sequence == again and sequence > 0:
            rank = int(path.name.removeprefix(_PREFIX))
            name = phase.rstrip(b"\0").decode(errors="replace")
            found.append(Pulse(rank, process, seconds, step, name, bool(waits), step - first_step))
    return sorted(found, key=lambda pulse: pulse.rank)


def find_stall(
    pulses: Sequence[Pulse],
    node: str,
    now_seconds: float | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    limits_seconds: Mapping[str, float] = PHASE_LIMITS_SECONDS,
) -> Stall | None:
    """Names the rank of this node that is to blame; None while all make progress.

    A rank whose process is gone comes first, then one that does not wait for others; among equals, the one that was silent
    longest. A rank that waits is named only if nobody else is, and later: the cause is then on another node, whose agent will
    name it. The first step, which may compile, has the limit of `start`. A stopped process gets no extra time for its phase.
    """
    now_seconds = time.monotonic() if now_seconds is None else now_seconds
    stalls = []
    for pulse in pulses:
        state, silent_seconds = _state(pulse.process), now_seconds - pulse.at_seconds
        is_dead, is_stopped = state in _DEAD, state in _STOPPED
        phase_seconds = limits_seconds.get(pulse.phase, 0.0)
        if pulse.finished < 1:
            phase_seconds = max(phase_seconds, limits_seconds.get("start", 0.0))
        allowed_seconds = limit_seconds if is_stopped else max(limit_seconds, phase_seconds)
        waits = pulse.waits and not is_stopped
        if is_dead or silent_seconds > allowed_seconds * (WAITING_FACTOR if waits else 1.0):
            stalls.append(Stall(pulse.rank, node, pulse.step, pulse.phase, silent_seconds, is_dead, waits))
    return min(stalls, key=lambda s: (not s.is_dead, s.waits, -s.silent_seconds), default=None)


def _state(process: int) -> str:
    """State letter of a process; `X` if there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    # the name in parentheses may hold anything; the state comes after it
    return stat.rpartition(")")[2].split()[0]
