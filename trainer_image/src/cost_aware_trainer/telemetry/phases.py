"""Time of a step by phase: one clock that is always in exactly one phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cost_aware_trainer.contract import Phase
from cost_aware_trainer.telemetry.device_time import DeviceTime


@dataclass(frozen=True)
class Lap:
    """Time of one step, or of its part until now."""

    step_seconds: float
    """Seconds of the whole step."""
    phase_seconds: dict[Phase, float]
    """Seconds of each phase. They add up to the whole."""

    def move(self, source: Phase, target: Phase, seconds: float) -> float:
        """Moves `seconds` from `source` to `target`, at most all that `source` has; returns what was moved."""
        moved = max(0.0, min(seconds, self.phase_seconds[source]))
        self.phase_seconds[source] -= moved
        self.phase_seconds[target] += moved
        return moved


@dataclass(frozen=True)
class LapMarks:
    """Marks of a step that has ended on the host, and perhaps not yet on the device."""

    device_time: DeviceTime
    """Time in which the marks lie."""
    switches: list[tuple[Phase, Any]]
    """Each phase with the mark at which it began."""
    end: Any
    """Mark of the step's end."""

    def wait(self) -> None:
        """Waits until the step has ended on the device too."""
        self.device_time.wait(self.end)

    def lap(self) -> Lap:
        """Reads the marks, which must have passed."""
        seconds = dict.fromkeys(Phase, 0.0)
        ends = [mark for _, mark in self.switches[1:]] + [self.end]
        for (phase, since), until in zip(self.switches, ends, strict=True):
            seconds[phase] += self.device_time.seconds(since, until)
        return Lap(sum(seconds.values()), seconds)


class PhaseClock:
    """Clock that books every moment on one phase. Time outside all marked phases is compute.

    Args:
        device_time: where it makes its marks: on CUDA kernels are booked on the phase that started them, and nobody waits for them.
        on_phase: called with every phase that begins.
    """

    def __init__(
        self, device_time: DeviceTime | None = None, on_phase: Callable[[Phase], None] = lambda _: None
    ) -> None:
        self.device_time = device_time or DeviceTime()
        """Time in which its marks lie."""
        self._on_phase = on_phase
        self._phase = Phase.COMPUTE
        self._switches: list[tuple[Phase, Any]] = [(self._phase, self.device_time.mark())]

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Books the block on `phase`, then returns to the phase around it."""
        outer = self._phase
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def so_far(self) -> Lap:
        """Time of the present step until now. Not where the device works behind the host."""
        return LapMarks(self.device_time, list(self._switches), self.device_time.mark()).lap()

    def end_lap(self) -> LapMarks:
        """Ends a step and starts the next."""
        end, switches = self.device_time.mark(), self._switches
        self._switches = [(self._phase, end)]
        self._on_phase(self._phase)
        return LapMarks(self.device_time, switches, end)

    def _switch(self, phase: Phase) -> None:
        self._phase = phase
        self._switches.append((phase, self.device_time.mark()))
        self._on_phase(phase)
