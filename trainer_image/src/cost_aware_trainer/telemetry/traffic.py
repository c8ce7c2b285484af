"""Traffic of a rank by axis of the mesh: the bytes that it sends, and the seconds that it waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch

from cost_aware_trainer.contract import Phase
from cost_aware_trainer.contract.heartbeat import Heartbeat
from cost_aware_trainer.telemetry.overlap import OverlapMeter


class Axis(StrEnum):
    """Axis of the mesh, along which a run is split."""

    DATA = "data"
    TENSOR = "tensor"
    PIPELINE = "pipeline"


PHASE_OF = {
    Axis.DATA: Phase.COMMUNICATION,
    Axis.TENSOR: Phase.TENSOR_COMMUNICATION,
    Axis.PIPELINE: Phase.PIPELINE_COMMUNICATION,
}
"""Phase of a rank's waits on each axis."""


class Traffic:
    """Counter of bytes sent and of seconds exposed since they were last taken.

    Exposed time is communication during which the rank cannot compute. On a CPU it is the wall time of a blocking
    collective. On CUDA it is measured between events on the stream that has to wait, and read only when a step ends.
    """

    def __init__(self, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat or Heartbeat(None, 0)
        self._on_cuda = device.type == "cuda"
        self.overlap = OverlapMeter(device)
        self._bytes = dict.fromkeys(Axis, 0.0)
        self._seconds = dict.fromkeys(Axis, 0.0)
        self._events: list[tuple[Axis, Any, Any]] = []

    def count(self, axis: Axis, sent_bytes: float) -> None:
        """Adds bytes that are sent in the background."""
        self._bytes[axis] += sent_bytes

    @contextmanager
    def exposed(self, axis: Axis, sent_bytes: float = 0.0) -> Iterator[None]:
        """Counts a block as a blocking collective of the training step."""
        self._bytes[axis] += sent_bytes
        if self._on_cuda:
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            started.record()
            yield
            ended.record()
            self._events.append((axis, started, ended))
        else:
            started_seconds = time.perf_counter()
            with self._heartbeat.waiting(PHASE_OF[axis].value):
                yield
            self._seconds[axis] += time.perf_counter() - started_seconds

    def take_seconds(self) -> dict[Axis, float]:
        """Takes the exposed seconds by axis, which start again at 0. On CUDA, synchronise the device before."""
        for axis, started, ended in self._events:
            self._seconds[axis] += started.elapsed_time(ended) / 1000
        self._events.clear()
        taken, self._seconds = self._seconds, dict.fromkeys(Axis, 0.0)
        return taken

    def take_bytes(self) -> dict[Axis, float]:
        """Takes the bytes sent by axis, which start again at 0."""
        taken, self._bytes = self._bytes, dict.fromkeys(Axis, 0.0)
        return taken
