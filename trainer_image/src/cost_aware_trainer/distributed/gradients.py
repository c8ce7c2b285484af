"""Gradients of a rank's parameters: their sums over the ranks that share them, their global norm, and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_aware_trainer.distributed.collectives import ring_bytes
from cost_aware_trainer.distributed.compression.sums import BucketLayout, CompressedSum
from cost_aware_trainer.distributed.layout import Box, tensor_dimension
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.telemetry.traffic import Axis

BUCKET_BYTES = 4 * 2**20
"""Size of gradient buckets, unless the plan has another: small enough that the bundled models' gradients travel while the
backward pass still computes."""


def local(tensor: Tensor) -> Tensor:
    """Own elements of this rank in a tensor that fully_shard may have split."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass(frozen=True)
class HeldParameter:
    """Parameter of which this rank holds a part."""

    name: str
    """Name in the whole model."""
    parameter: nn.Parameter
    """Parameter of this rank's module."""
    box: Box
    """Part of the whole parameter that this rank holds."""
    is_copy: bool
    """Whether it is a tied embedding's second copy, which is trained alike, but counted and saved once."""

    @property
    def key(self) -> str:
        """Name that is unique among this rank's parameters."""
        return f"{self.name} (copy)" if self.is_copy else self.name

    @property
    def value(self) -> Tensor:
        """Values of this rank's part."""
        return local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor:
        """Gradient of this rank's part."""
        assert self.parameter.grad is not None  # noqa: S101  every parameter takes part in every step
        return local(self.parameter.grad)


@dataclass
class _Bucket:
    """Parameters whose gradients are summed at once."""

    parameters: list[nn.Parameter]
    """Parameters in the order of the buffer."""
    layout: BucketLayout = ()
    """Names and sizes of the parameters."""
    pending: int = 0
    """Gradients that are not ready yet, over all micro-batches of the step."""
    buffer: Tensor | None = None
    """Flat gradients, while their sum is under way."""
    work: Any = None
    """Handle of the sum under way."""


@dataclass
class DataSum:
    """Sum of replicas' gradients over the data axis, a bucket at a time, while the backward pass goes on.

    Torch's DistributedDataParallel does this for whole models of plain parameters. This class also serves pipeline stages,
    whose gradients are ready after the last of many interleaved backward passes, and schedules that compute weights'
    gradients outside of autograd, for which buckets are sent at the end.
    """

    mesh: Mesh
    """Mesh with the data axis."""
    micro_batches: int
    """Number of backward passes in a step."""
    compressed: CompressedSum | None = None
    """Compressed sum over the data axis; None for fp32."""
    bucket_bytes: float = BUCKET_BYTES
    """Bytes from which on a bucket is closed."""
    _buckets: list[_Bucket] = field(default_factory=list)
    _bucket_of: dict[nn.Parameter, _Bucket] = field(default_factory=dict)
    _launched: int = 0
    _is_uncompressed: bool = False
    _handles: list[Any] = field(default_factory=list)

    def watch(self, parameters: Sequence[HeldParameter]) -> None:
        """Distributes parameters over buckets, last first: gradients become ready in about the reverse order."""
        for held in reversed(parameters):
            parameter = held.parameter
            size_bytes = sum(p.numel() * p.element_size() for p in self._buckets[-1].parameters) if self._buckets else 0
            if not self._buckets or size_bytes >= self.bucket_bytes:
                self._buckets.append(_Bucket([]))
            self._buckets[-1].parameters.append(parameter)
            self._buckets[-1].layout += ((held.key, parameter.numel()),)
            self._bucket_of[parameter] = self._buckets[-1]
            handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def close(self) -> None:
        """Removes the parameters' hooks, which hold this object and its process groups out of the garbage collector's sight."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.compressed:
            self.compressed.close()
            self.compressed = None

    def begin(self, *, uncompressed: bool = False) -> None:
        """Starts a step. With `uncompressed`, on all replicas or on none, its gradients are summed as they are."""
        self._launched, self._is_uncompressed = 0, uncompressed
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters) * self.micro_batches

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        bucket.pending -= 1
        # In order, so that all replicas send the same bucket at the same time.
        while self._launched < len(self._buckets) and self._buckets[self._launched].pending == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        ended = self.mesh.traffic.overlap.begin()
        gradients = [p.grad for p in bucket.parameters if p.grad is not None]
        bucket.buffer = torch.cat([gradient.flatten() for gradient in gradients])
        if self.compressed and not self._is_uncompressed:
            self.mesh.traffic.count(Axis.DATA, self.compressed.sent_bytes(bucket.buffer.numel()))
            bucket.work = self.compressed.start(bucket.layout, bucket.buffer)
            bucket.work.then(lambda _: ended())
            return
        sent_bytes = ring_bytes(bucket.buffer.numel() * bucket.buffer.element_size(), self.mesh.lengths[Axis.DATA])
        self.mesh.traffic.count(Axis.DATA, sent_bytes)
        bucket.work = dist.all_reduce(bucket.buffer, group=self.mesh.group(Axis.DATA), async_op=True)
        bucket.work.get_future().add_done_callback(lambda _: ended())

    def finish(self) -> None:
        """Ends a step's backward passes and waits until all gradients are summed. That time is exposed."""
        self.mesh.traffic.overlap.computed()
        with self.mesh.traffic.exposed(Axis.DATA):
            while self._launched < len(self._buckets):
                self._launch()
            for bucket in self._buckets:
                bucket.work.wait()
                assert bucket.buffer is not None  # noqa: S101  it was launched
                gradients = [p.grad for p in bucket.parameters if p.grad is not None]
                parts = torch.split(bucket.buffer, [gradient.numel() for gradient in gradients])
                torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
                bucket.buffer = bucket.work = None


def sum_shared(mesh: Mesh, parameters: Sequence[HeldParameter], gradients: Sequence[Tensor]) -> None:
    """Sums gradients (of `parameters`, in their order) that ranks of other axes share, in place.

    Norms see only this rank's positions, so their gradients are partial over the tensor axis. Each copy of a tied embedding
    sees one of its two uses.
    """
    pairs = list(zip(parameters, gradients, strict=True))
    shared = [gradient for held, gradient in pairs if tensor_dimension(held.name) is None]
    if shared and (group := mesh.group(Axis.TENSOR)) is not None:
        _sum_together(mesh, shared, group, Axis.TENSOR, mesh.lengths[Axis.TENSOR])
    ends = [gradient for held, gradient in pairs if held.name == "embedding.weight"]
    if mesh.ends is not None:
        _sum_together(mesh, ends, mesh.ends, Axis.PIPELINE, 2)
    elif len(ends) == 2:
        ends[0].add_(ends[1])
        ends[1].copy_(ends[0])


def _sum_together(mesh: Mesh, tensors: list[Tensor], group: dist.ProcessGroup, axis: Axis, ranks: int) -> None:
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    with mesh.traffic.exposed(axis, ring_bytes(joined.numel() * joined.element_size(), ranks)):
        dist.all_reduce(joined, group=group)
    for tensor, part in zip(tensors, torch.split(joined, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def squared_norm(mesh: Mesh, parameters: Sequence[HeldParameter], *, is_sharded: bool) -> float:
    """Share of this rank in the squared norm of the whole model's gradient. Each element counts on one rank only."""
    place = mesh.place
    mine = [
        held.gradient
        for held in parameters
        if not held.is_copy
        and (place.tensor == 0 or tensor_dimension(held.name) is not None)
        and (place.data == 0 or is_sharded)
        and held.gradient.numel()
    ]
    if not mine:
        return 0.0
    return float(torch.stack(torch._foreach_norm(mine)).double().square().sum())


def clip(parameters: Sequence[HeldParameter], norm: float, largest_norm: float) -> None:
    """Scales all gradients down to the largest norm allowed, if the global norm is larger."""
    if norm > largest_norm:
        torch._foreach_mul_([held.gradient for held in parameters], largest_norm / (norm + 1e-6))
