"""Traffic of a rank by axis of the mesh: the bytes that it sends, and the seconds that it waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from cost_aware_trainer.contract import Phase
from cost_aware_trainer.contract.heartbeat import Heartbeat
from cost_aware_trainer.telemetry.device_time import DeviceTime
from cost_aware_trainer.telemetry.overlap import Overlap


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


@dataclass
class Waits:
    """Waits of one step for its traffic."""

    device_time: DeviceTime
    """Time in which the marks lie."""
    overlap: Overlap
    """Sums of gradients that travelled while the rank computed."""
    exposed: list[tuple[Axis, Any, Any]] = field(default_factory=list)
    """Axis, start and end of each communication during which the rank could not compute."""

    def seconds(self) -> dict[Axis, float]:
        """Seconds exposed on each axis. The step's marks must have passed."""
        seconds = dict.fromkeys(Axis, 0.0)
        for axis, started, ended in self.exposed:
            seconds[axis] += self.device_time.seconds(started, ended)
        return seconds


class Traffic:
    """Counter of bytes sent and of waits since they were last taken.

    Exposed time is communication during which the rank cannot compute. On a CPU it is the wall time of a blocking
    collective. On CUDA it lies between marks in the stream that has to wait.
    """

    def __init__(self, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat or Heartbeat(None, 0)
        self._device_time = DeviceTime.of(device)
        self._bytes = dict.fromkeys(Axis, 0.0)
        self._waits = Waits(self._device_time, Overlap(self._device_time))

    @property
    def overlap(self) -> Overlap:
        """Sums of the present step."""
        return self._waits.overlap

    def count(self, axis: Axis, sent_bytes: float) -> None:
        """Adds bytes that are sent in the background."""
        self._bytes[axis] += sent_bytes

    @contextmanager
    def exposed(self, axis: Axis, sent_bytes: float = 0.0) -> Iterator[None]:
        """Counts a block as a blocking collective of the training step."""
        self._bytes[axis] += sent_bytes
        started = self._device_time.mark()
        # on CUDA the host only starts the collective, and waits later
        with nullcontext() if self._device_time.is_late else self._heartbeat.waiting(PHASE_OF[axis].value):
            yield
        self._waits.exposed.append((axis, started, self._device_time.mark()))

    def take_waits(self) -> Waits:
        """Takes the waits, which start anew."""
        taken, self._waits = self._waits, Waits(self._device_time, Overlap(self._device_time))
        return taken

    def take_bytes(self) -> dict[Axis, float]:
        """Takes the bytes sent by axis, which start again at 0."""
        taken, self._bytes = self._bytes, dict.fromkeys(Axis, 0.0)
        return taken
