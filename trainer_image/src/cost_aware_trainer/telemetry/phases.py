"""Where a step's wall time goes: one clock that is always in exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cost_aware_trainer.contract import Phase


@dataclass(frozen=True)
class Lap:
    """One step's wall time in seconds, in whole and by phase."""

    step_seconds: float
    phase_seconds: dict[Phase, float]


class PhaseClock:
    """Books every moment on one phase; what no phase claims is compute.

    `synchronise` is called before each reading: on CUDA, kernels must be booked where they were started. `on_phase` hears of
    every phase that begins.
    """

    def __init__(
        self,
        now_seconds: Callable[[], float] = time.perf_counter,
        synchronise: Callable[[], None] = lambda: None,
        on_phase: Callable[[Phase], None] = lambda _: None,
    ) -> None:
        self._now_seconds, self._synchronise, self._on_phase = now_seconds, synchronise, on_phase
        self._phase = Phase.COMPUTE
        self._since_seconds = self._lap_started_seconds = now_seconds()
        self._seconds = dict.fromkeys(Phase, 0.0)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Books the block on `phase`, then returns to the phase around it."""
        outer = self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Books `seconds` of what `source` has been given in this lap on `target` instead, at most all of it."""
        self._switch(self._phase)
        moved = max(0.0, min(seconds, self._seconds[source]))
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def booked(self, phase: Phase) -> float:
        """Seconds that a phase has been given in this lap, until it was last left or settled."""
        return self._seconds[phase]

    def settle(self) -> None:
        """Books everything until now, and waits for the device, so that what it measured can be read."""
        self._switch(self._phase)

    def lap(self) -> Lap:
        """Ends a step and starts the next."""
        self._switch(self._phase)
        started_seconds, self._lap_started_seconds = self._lap_started_seconds, self._since_seconds
        seconds, self._seconds = self._seconds, dict.fromkeys(Phase, 0.0)
        return Lap(self._since_seconds - started_seconds, seconds)

    def _switch(self, phase: Phase) -> Phase:
        self._synchronise()
        now_seconds = self._now_seconds()
        self._seconds[self._phase] += now_seconds - self._since_seconds
        self._since_seconds = now_seconds
        outer, self._phase = self._phase, phase
        self._on_phase(phase)
        return outer
