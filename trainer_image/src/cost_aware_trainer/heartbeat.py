"""Finds a rank that hangs or has died within seconds, and says which one, where and doing what.

Each rank keeps a record of 96 bytes in a file that its agent reads: when it last got on, at which step, in which phase, and
whether it waits for others in that phase. Writing one is a store to mapped memory, cheap enough for every phase of every
step. One rank that hangs makes all others wait; so, of ranks that have not got on, the one that does not wait is to blame.

Standard library only: the agent imports it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_SECONDS = 20.0
"""How long a rank may stay in one phase of one step before it counts as stalled."""
PHASE_LIMITS_SECONDS: Mapping[str, float] = {"checkpoint": 300.0, "evaluation": 120.0, "start": 300.0}
"""Phases that may take longer. `start` is all that comes before the first step."""

_RECORD = struct.Struct("<QdqqB39s24xQ")
"""Sequence number, seconds, step, process, waits, phase, and the sequence number again: a torn record shows."""
_PREFIX = "pulse-"


@dataclass(frozen=True)
class Pulse:
    """What a rank last said; seconds are of the host's monotonic clock, the same in all of its processes."""

    rank: int
    process: int
    seconds: float
    step: int
    phase: str
    waits: bool


@dataclass(frozen=True)
class Stall:
    """A rank that is to blame, or the one that has waited longest when nobody here is."""

    rank: int
    node: str
    step: int
    phase: str
    seconds: float
    is_dead: bool
    waits: bool

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.node}, step {self.step}, {self.phase}"
        if self.is_dead:
            return f"{where}: its process is gone"
        if self.waits:
            return f"{where}: has waited {self.seconds:.0f} s for ranks of other nodes, or for the network"
        return f"{where}: has not got on for {self.seconds:.0f} s"


class Heart:
    """A rank's side. Not for several threads."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{_PREFIX}{rank}"
        self._path.write_bytes(bytes(_RECORD.size))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._sequence, self._step, self._phase = 0, 0, "start"
        self.beat("start")

    def beat(self, phase: str, step: int | None = None, *, waits: bool = False) -> None:
        """Says that this rank gets on, in a phase (39 bytes at most), at a step or the one before."""
        self._sequence += 1
        self._phase, self._step = phase, self._step if step is None else step
        name = phase.encode()[:39]
        record = (self._sequence, time.monotonic(), self._step, os.getpid(), waits, name, self._sequence)
        self._memory[:] = _RECORD.pack(*record)

    @contextlib.contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Around what needs other ranks: whoever is in such a block is not to blame."""
        outer = self._phase
        self.beat(phase, waits=True)
        yield
        self.beat(outer)

    def close(self) -> None:
        """Takes the record away, so that a rank that has ended as it should is not missed."""
        self._memory.close()
        self._path.unlink(missing_ok=True)


def read_pulses(folder: Path) -> list[Pulse]:
    """The records of a folder's ranks, by rank; one that is being written at the moment is left out."""
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        if len(content) != _RECORD.size:
            continue
        sequence, seconds, step, process, waits, phase, again = _RECORD.unpack(content)
        if sequence == again and sequence > 0:
            rank = int(path.name.removeprefix(_PREFIX))
            found.append(Pulse(rank, process, seconds, step, phase.rstrip(b"\0").decode(errors="replace"), bool(waits)))
    return sorted(found, key=lambda pulse: pulse.rank)


def find_stall(
    pulses: Sequence[Pulse],
    node: str,
    now_seconds: float | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    limits_seconds: Mapping[str, float] = PHASE_LIMITS_SECONDS,
) -> Stall | None:
    """The rank of this node to name, or None while all get on.

    A rank whose process is gone comes first, then one that does not wait for others, each the longest silent one; one that
    waits is named only if nobody else is: then the cause is on another node, whose agent will name it.
    """
    now = time.monotonic() if now_seconds is None else now_seconds
    stalls = []
    for pulse in pulses:
        silent_seconds, is_dead = now - pulse.seconds, not _lives(pulse.process)
        if is_dead or silent_seconds > limits_seconds.get(pulse.phase, limit_seconds):
            stalls.append(Stall(pulse.rank, node, pulse.step, pulse.phase, silent_seconds, is_dead, pulse.waits))
    return min(stalls, key=lambda s: (not s.is_dead, s.waits, -s.seconds), default=None)


def _lives(process: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # after the name in parentheses, which may hold anything, comes the state
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
