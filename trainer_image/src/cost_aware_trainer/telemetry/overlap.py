"""Overlap of communication and computation: the time in which gradients travel between replicas while a rank computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cost_aware_trainer.telemetry.device_time import DeviceTime


def hidden_seconds(spans: Iterable[tuple[float, float]], until_seconds: float) -> float:
    """Seconds before `until_seconds` that at least one span covers. Spans are (start, end), in the order of their starts."""
    total, covered = 0.0, float("-inf")
    for start, end in spans:
        low, high = max(start, covered), min(end, until_seconds)
        total += max(0.0, high - low)
        covered = max(covered, high)
    return total


@dataclass
class _Span:
    """Time of one sum."""

    started: Any
    """Mark of its launch."""
    ended: Any = None
    """Mark of its end; None while it runs."""


@dataclass
class Overlap:
    """Sums of one step: when each began and ended, and when this rank had nothing left to compute.

    On a CPU a sum ends when the collective's own thread is done. On CUDA a sum begins when its gradients are ready, even if the
    collectives' stream is still busy with another sum, and ends on that stream.
    """

    device_time: DeviceTime
    """Time in which the marks lie."""
    _spans: list[_Span] = field(default_factory=list)
    _computed: Any = None

    def begin(self) -> Callable[[], None]:
        """Notes the launch of a sum. Call the returned function, from any thread, when the sum has ended."""
        span = _Span(self.device_time.mark())
        self._spans.append(span)

        def end() -> None:
            span.ended = self.device_time.mark()

        return end

    def computed(self) -> None:
        """Notes that this rank has computed everything and only waits from now on."""
        self._computed = self.device_time.mark()

    def seconds(self) -> float:
        """Seconds of sums that ran behind computation. The step's marks must have passed."""
        spans, computed = self._spans, self._computed
        if not spans or computed is None:
            return 0.0
        first, between = spans[0].started, self.device_time.seconds
        for span in spans:
            if span.ended:
                # it lies in the sum's own stream, which may be a moment behind the one that waited for the sum
                self.device_time.wait(span.ended)
        until_seconds = between(first, computed)
        # the rank has waited for every sum, so one whose end is not marked yet ended after the last computation
        times = ((between(first, s.started), between(first, s.ended) if s.ended else until_seconds) for s in spans)
        return hidden_seconds(times, until_seconds)
