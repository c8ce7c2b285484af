"""Marks in time: on the host's clock, or in a GPU's queue of work, whose times are known when the GPU has come to them."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceTime:
    """Marks on the host's clock. What lies between two of them is known at once."""

    is_late = False
    """Whether a mark's time is known only later."""

    @staticmethod
    def of(device: torch.device) -> DeviceTime:
        """Time of the work on a device."""
        return _CudaTime() if device.type == "cuda" else DeviceTime()

    def mark(self) -> Any:
        """Makes a mark at what was started last."""
        return time.perf_counter()

    def seconds(self, since: Any, until: Any) -> float:
        """Seconds between two marks. Of a time that is late, both must have passed: see `wait`."""
        return float(until - since)

    def wait(self, mark: Any) -> None:
        """Waits until a mark, and with it all before it, has passed."""


class _CudaTime(DeviceTime):
    """Marks in the current CUDA stream. Making one costs the device nothing and the host does not wait for it."""

    is_late = True

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, since: Any, until: Any) -> float:
        return float(since.elapsed_time(until)) / 1000

    def wait(self, mark: Any) -> None:
        mark.synchronize()
