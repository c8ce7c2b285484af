"""The agent's eye on its ranks' heartbeats: when it is time to say that one has stalled."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from cost_aware_trainer.contract.heartbeat import LIMIT_SECONDS, Pulse, Stall, find_stall, read_pulses

_LOOK_SECONDS = 1.0
_BLIND_SECONDS = 5.0
"""A longer time between two looks means that this node itself stood still, and its ranks with it."""
_STEPS = 10.0
"""A rank may stay in one phase for so many median steps, where that is longer than the limit."""
_REMEMBERED = 50
_OWN_PROGRAM_FACTOR = 15.0
"""What happens between the steps of a program of the user's own is not known: it gets so many times the limit."""
_DEAD_PATIENCE_SECONDS = 60.0
"""torchrun itself ends soon after a rank of its own has died, and knows more of it; this is for a torchrun that does not."""


class StallWatch:
    """Looks about once a second at the pulses of one attempt's ranks on this node."""

    def __init__(
        self, folder: Path, node: str, limit_seconds: float = LIMIT_SECONDS, *, is_own_program: bool = False
    ) -> None:
        self.folder, self._node = folder, node
        self._limit_seconds = limit_seconds * (_OWN_PROGRAM_FACTOR if is_own_program else 1.0)
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: tuple[int, float] | None = None
        self._looked_at_seconds: float | None = None
        self._spared_until_seconds = 0.0
        self._dead_since_seconds: float | None = None

    def begin_anew(self) -> None:
        """Forgets how long steps take: the ranks go on under another plan."""
        self._step_seconds.clear()
        self._last = None

    def look(self, now_seconds: float | None = None) -> Stall | None:
        """A stall to act on, if there is one; between two looks a second apart there is none."""
        now = time.monotonic() if now_seconds is None else now_seconds
        before, limit_seconds = self._looked_at_seconds, self.limit_seconds()
        if before is not None and now - before < _LOOK_SECONDS:
            return None
        if before is not None and now - before > _BLIND_SECONDS:
            self._spared_until_seconds, self._last = now + limit_seconds, None
        self._looked_at_seconds = now
        pulses = read_pulses(self.folder)
        self._note_steps(pulses, now)
        if now < self._spared_until_seconds:
            return None
        stall = find_stall(pulses, self._node, now, limit_seconds)
        is_dead = stall is not None and stall.is_dead
        if not is_dead:
            self._dead_since_seconds = None
        elif self._dead_since_seconds is None:
            self._dead_since_seconds = now
        if self._dead_since_seconds is not None and now - self._dead_since_seconds < _DEAD_PATIENCE_SECONDS:
            return None
        return stall

    def limit_seconds(self) -> float:
        """How long a rank may stay in an ordinary phase, by what is known of its steps."""
        if not self._step_seconds:
            return self._limit_seconds
        return max(self._limit_seconds, _STEPS * statistics.median(self._step_seconds))

    def _note_steps(self, pulses: Sequence[Pulse], now: float) -> None:
        """Learns how long a step takes from how far the slowest rank has come."""
        step = min((pulse.step for pulse in pulses), default=0)
        if step < 1:
            return
        if self._last is None or step < self._last[0]:
            self._last = step, now
        elif step > self._last[0]:
            first, since = self._last
            self._step_seconds.append((now - since) / (step - first))
            self._last = step, now
