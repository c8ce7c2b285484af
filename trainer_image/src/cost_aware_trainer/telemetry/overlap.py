"""Overlap of communication and computation: the time in which gradients travel between replicas while a rank computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


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
    """Mark of its launch: seconds, or a CUDA event."""
    ended: Any = None
    """Mark of its end; None while it runs."""


class OverlapMeter:
    """Meter of a step's sums: it notes when each begins and ends, and when this rank has nothing left to compute.

    On a CPU a sum ends when the collective's own thread is done. On CUDA marks are events: a sum begins when its gradients are
    ready, even if the collectives' stream is still busy with another sum, and ends on that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[_Span] = []
        self._computed: Any = None

    def begin(self) -> Callable[[], None]:
        """Notes the launch of a sum. Call the returned function, from any thread, when the sum has ended."""
        span = _Span(self._mark())
        self._spans.append(span)

        def end() -> None:
            span.ended = self._mark()

        return end

    def computed(self) -> None:
        """Notes that this rank has computed everything and only waits from now on."""
        self._computed = self._mark()

    def take_seconds(self) -> float:
        """Seconds of sums that ran behind computation since the last call. On CUDA, synchronise the device before."""
        spans, computed = self._spans, self._computed
        self._spans, self._computed = [], None
        if not spans or computed is None:
            return 0.0
        first = spans[0].started
        until_seconds = self._seconds(first, computed)
        # the rank has waited for every sum, so one whose end is not marked yet ended after the last computation
        times = (
            (self._seconds(first, s.started), self._seconds(first, s.ended) if s.ended else until_seconds)
            for s in spans
        )
        return hidden_seconds(times, until_seconds)

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, since: Any, mark: Any) -> float:
        return float(since.elapsed_time(mark)) / 1000 if self._on_cuda else float(mark - since)
