"""Wall time of a step by phase: one clock that is always in exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cost_aware_trainer.contract import Phase


@dataclass(frozen=True)
class Lap:
    """Wall time of one step."""

    step_seconds: float
    """Seconds of the whole step."""
    phase_seconds: dict[Phase, float]
    """Seconds of each phase. They add up to the whole."""


class PhaseClock:
    """Clock that books every moment on one phase. Time outside all marked phases is compute.

    Args:
        now_seconds: the clock that is read.
        synchronise: called before each reading: on CUDA, kernels must be booked on the phase that started them.
        on_phase: called with every phase that begins.
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
        """Moves `seconds` of this lap from `source` to `target`, at most all that `source` has."""
        self._switch(self._phase)
        moved = max(0.0, min(seconds, self._seconds[source]))
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def booked_seconds(self, phase: Phase) -> float:
        """Seconds of a phase in this lap, up to its last end or the last call of `settle`."""
        return self._seconds[phase]

    def settle(self) -> None:
        """Books everything until now and waits for the device, so that its own measurements can be read."""
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
