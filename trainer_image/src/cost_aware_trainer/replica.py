"""The data-parallel replica of a model: gradients summed over ranks, and how long that held the ranks up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cost_aware_trainer.collectives import Ranks, ring_bytes

BUCKET_MEBIBYTES = 4
"""Small enough that the bundled models' gradients travel while the backward pass still computes."""


class Replica:
    """A model under DDP whose hook *sums* gradients: the loss is already divided by the global batch.

    Exposed communication is what remains when the last bucket of gradients is ready: from there to the end of the
    backward pass nothing is left to compute. Waiting for a slower peer is part of it.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self.module: nn.Module = model
        self._last_bucket_seconds: float | None = None
        self._last_bucket_event: Any = None
        self.communicated_bytes = 0.0
        """Bytes that this rank sent for gradients since the start (ring formula)."""
        if ranks.size > 1:
            device_ids = [ranks.local_rank] if ranks.device.type == "cuda" else None
            parallel = DistributedDataParallel(
                model, device_ids=device_ids, bucket_cap_mb=BUCKET_MEBIBYTES, gradient_as_bucket_view=True
            )
            # A lambda, because DDP compares annotations with its own types, and here they are strings.
            parallel.register_comm_hook(None, lambda _, bucket: self._sum_bucket(bucket))
            self.module = parallel

    def _sum_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's communication hook; called on the autograd thread as each bucket becomes ready."""
        buffer = bucket.buffer()
        if bucket.is_last():
            self._last_bucket_seconds = time.perf_counter()
            if self._ranks.device.type == "cuda":
                self._last_bucket_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._last_bucket_event.record()
        self.communicated_bytes += ring_bytes(buffer.numel() * buffer.element_size(), self._ranks.size)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None  # noqa: S101  async_op always returns one to members of the group
        summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients are exchanged only with the last."""
        silent = isinstance(self.module, DistributedDataParallel) and not is_last
        with self.module.no_sync() if silent else nullcontext():  # type: ignore[operator]
            yield

    def backward(self, loss: Tensor) -> float:
        """The backward pass; returns the seconds of exposed communication in it."""
        self._last_bucket_seconds = None
        loss.backward()  # type: ignore[no-untyped-call]
        if self._last_bucket_seconds is None:
            return 0.0
        if self._ranks.device.type != "cuda":
            return time.perf_counter() - self._last_bucket_seconds
        ended: Any = torch.cuda.Event(enable_timing=True)
        ended.record()
        ended.synchronize()
        milliseconds: float = self._last_bucket_event.elapsed_time(ended)
        return milliseconds / 1000
