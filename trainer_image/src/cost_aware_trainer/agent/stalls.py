"""Watch over the ranks' heartbeats, which decides when a rank counts as stalled."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from cost_aware_trainer.contract.heartbeat import LIMIT_SECONDS, Pulse, Stall, find_stall, read_pulses

_LOOK_SECONDS = 1.0
_BLIND_SECONDS = 5.0
"""Longest seconds between two looks. A longer time means that this node itself stood still, and its ranks with it."""
_STEPS = 10.0
"""Median steps that a rank may stay in one phase, if that is longer than the limit."""
_REMEMBERED = 50
_OWN_PROGRAM_FACTOR = 15.0
"""Factor on the limit for a user's own program, because nothing is known of what it does between its steps."""
_DEAD_PATIENCE_SECONDS = 60.0
"""Seconds to wait for torchrun after a rank has died. It ends soon by itself and knows more of the death; this is for a torchrun
that does not."""


class StallWatch:
    """Watch that looks about once a second at the pulses of one attempt's ranks on this node."""

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
        """Forgets how long steps take, because the ranks go on under another plan."""
        self._step_seconds.clear()
        self._last = None

    def look(self, now_seconds: float | None = None) -> Stall | None:
        """Returns a stall to act on, if there is one. Looks at most once a second; a call in between returns None."""
        now_seconds = time.monotonic() if now_seconds is None else now_seconds
        before_seconds, limit_seconds = self._looked_at_seconds, self.limit_seconds()
        if before_seconds is not None and now_seconds - before_seconds < _LOOK_SECONDS:
            return None
        if before_seconds is not None and now_seconds - before_seconds > _BLIND_SECONDS:
            self._spared_until_seconds, self._last = now_seconds + limit_seconds, None
        self._looked_at_seconds = now_seconds
        pulses = read_pulses(self.folder)
        self._note_steps(pulses, now_seconds)
        if now_seconds < self._spared_until_seconds:
            return None
        stall = find_stall(pulses, self._node, now_seconds, limit_seconds)
        is_dead = stall is not None and stall.is_dead
        if not is_dead:
            self._dead_since_seconds = None
        elif self._dead_since_seconds is None:
            self._dead_since_seconds = now_seconds
        if self._dead_since_seconds is not None and now_seconds - self._dead_since_seconds < _DEAD_PATIENCE_SECONDS:
            return None
        return stall

    def limit_seconds(self) -> float:
        """Seconds that a rank may stay in an ordinary phase, given how long its steps took."""
        if not self._step_seconds:
            return self._limit_seconds
        return max(self._limit_seconds, _STEPS * statistics.median(self._step_seconds))

    def _note_steps(self, pulses: Sequence[Pulse], now_seconds: float) -> None:
        """Learns the time of a step from the progress of the slowest rank."""
        step = min((pulse.step for pulse in pulses), default=0)
        if step < 1:
            return
        if self._last is None or step < self._last[0]:
            self._last = step, now_seconds
        elif step > self._last[0]:
            first_step, since_seconds = self._last
            self._step_seconds.append((now_seconds - since_seconds) / (step - first_step))
            self._last = step, now_seconds
