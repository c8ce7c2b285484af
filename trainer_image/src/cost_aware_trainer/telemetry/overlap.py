"""How long gradients travel between replicas while a rank computes: what the scheduling of buckets achieves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


def hidden_seconds(spans: Iterable[tuple[float, float]], until: float) -> float:
    """The length of what at least one span covers before `until`; spans are (start, end), in the order of their starts."""
    total, covered = 0.0, float("-inf")
    for start, end in spans:
        low, high = max(start, covered), min(end, until)
        total += max(0.0, high - low)
        covered = max(covered, high)
    return total


@dataclass
class _Span:
    started: Any
    ended: Any = None


class OverlapMeter:
    """Notes when each sum of a step begins and ends, and when there is nothing left to compute behind it.

    On a CPU the end is when the collective's own thread is done. On CUDA marks are events: a sum begins when its gradients are
    ready, even where the collectives' stream is still busy with another one, and ends on that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[_Span] = []
        self._computed: Any = None

    def begin(self) -> Callable[[], None]:
        """A sum is launched; what it returns is to be called when it has ended, from any thread."""
        span = _Span(self._mark())
        self._spans.append(span)

        def end() -> None:
            span.ended = self._mark()

        return end

    def computed(self) -> None:
        """From here on this rank only waits."""
        self._computed = self._mark()

    def take_seconds(self) -> float:
        """Seconds of sums behind computation since the last call. On CUDA the device must have been synchronised."""
        spans, computed = self._spans, self._computed
        self._spans, self._computed = [], None
        if not spans or computed is None:
            return 0.0
        first = spans[0].started
        until = self._seconds(first, computed)
        # a thread that has not come to say that its sum has ended is later than the rank that has waited for it
        times = ((self._seconds(first, s.started), self._seconds(first, s.ended) if s.ended else until) for s in spans)
        return hidden_seconds(times, until)

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, since: Any, mark: Any) -> float:
        return float(since.elapsed_time(mark)) / 1000 if self._on_cuda else float(mark - since)
