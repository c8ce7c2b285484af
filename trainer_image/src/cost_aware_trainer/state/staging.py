"""Copies of a state in CPU memory, which training does not wait for: made at once on a CPU, behind the next step on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class StateCopies:
    """Copies of tensors to CPU memory, made at once."""

    is_late = False
    """Whether copies may still be under way when they have been started."""

    @staticmethod
    def of(device: torch.device) -> StateCopies:
        """Copies of a device's tensors."""
        return _CudaCopies(device) if device.type == "cuda" else StateCopies()

    def copy_of(self, values: Tensor) -> Tensor:
        """Starts one copy."""
        return values.to("cpu", copy=True)

    def all_started(self) -> None:
        """Notes that no other copy follows."""

    def hold(self) -> None:
        """Makes the device finish the copies before it does what is started from now on. The host does not wait."""

    def wait(self) -> None:
        """Waits on the host until all copies are made."""


class _CudaCopies(StateCopies):
    """Copies to pinned memory on a stream of their own, beside the next step's passes, which only read the state."""

    is_late = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy_of(self, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return super().copy_of(values)
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            copy.copy_(values, non_blocking=True)
        # memory of a tensor that is dropped meanwhile is not given to another one before the copy is made
        values.record_stream(self._stream)
        return copy

    def all_started(self) -> None:
        self._copied.record(self._stream)

    def hold(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def wait(self) -> None:
        self._copied.synchronize()


def staged(state: Mapping[str, Tensor], copies: StateCopies) -> dict[str, Tensor]:
    """Starts a copy of a state, with the fields of its source. They are made when `copies` says so."""
    started: dict[str, Tensor] = {}
    for name, values in state.items():
        copy = copies.copy_of(values.detach())
        for field in _FIELDS:
            if hasattr(values, field):
                setattr(copy, field, getattr(values, field))
        started[name] = copy
    copies.all_started()
    return started
