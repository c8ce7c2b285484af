"""Sum of replicas' gradients over the data axis, a bucket at a time, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_aware_trainer.distributed.collectives import ring_bytes
from cost_aware_trainer.distributed.compression.sums import BucketLayout, CompressedSum
from cost_aware_trainer.distributed.gradients import HeldParameter
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.telemetry.traffic import Axis

BUCKET_BYTES = 4 * 2**20
"""Size of gradient buckets, unless the plan has another: small enough that the bundled models' gradients travel while the
backward pass still computes."""


class GradientError(RuntimeError):
    """Gradient that cannot be summed rightly. The message names the parameter."""


@dataclass(eq=False)
class _Watched:
    """Parameter whose gradient is waited for."""

    held: HeldParameter
    """Parameter, with its name."""
    expected: int
    """Times that its gradient is accumulated in a step."""
    bucket: int = 0
    """Number of its bucket."""
    fired: int = 0
    """Times that its gradient was accumulated in this step."""

    @property
    def gradient(self) -> Tensor | None:
        return self.held.parameter.grad

    @property
    def is_plain(self) -> bool:
        """Whether its elements lie in the order of their indices, as those of a bucket do."""
        return self.held.parameter.is_contiguous()


@dataclass
class _Bucket:
    """Parameters whose gradients are summed at once."""

    parameters: list[_Watched]
    """Parameters in the order of the buffer."""
    layout: BucketLayout = ()
    """Names and sizes of the parameters."""
    pending: int = 0
    """Parameters whose gradients are not ready yet."""
    buffer: Tensor | None = None
    """Flat gradients, while their sum is under way; after them, if use differs, one element for each parameter."""
    work: Any = None
    """Handle of the sum under way."""

    def parts(self) -> list[tuple[_Watched, Tensor]]:
        """Lists each parameter with its part of the buffer."""
        assert self.buffer is not None  # noqa: S101  it was launched
        sizes = [watched.held.parameter.numel() for watched in self.parameters]
        parts = torch.split(self.buffer[: sum(sizes)], sizes)
        return [(w, part.view(w.held.parameter.shape)) for w, part in zip(self.parameters, parts, strict=True)]

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        parameter = self.parameters[0].held.parameter
        return parameter.dtype, parameter.device


@dataclass
class DataSum:
    """Sum of replicas' gradients over the data axis, a bucket at a time, while the backward pass goes on.

    Torch's DistributedDataParallel does this for whole models of plain parameters. This class also serves pipeline stages,
    whose gradients are ready after the last of many interleaved backward passes, and schedules that compute weights'
    gradients outside of autograd, for which buckets are sent at the end.

    With `use_differs` the model is a stranger. Replicas may use different parameters: one that this rank did not use counts
    as zeros, and a sign that travels with each gradient says on which parameters somebody has worked. A parameter that
    nobody used keeps no gradient, as under DistributedDataParallel with `find_unused_parameters`. How often a gradient is
    accumulated in a step is counted in the first one, whose buckets are all sent at its end: activation checkpointing with
    `use_reentrant=True` runs a backward pass of its own for each use of a shared module.
    """

    mesh: Mesh
    """Mesh with the data axis."""
    micro_batches: int
    """Number of backward passes in a step."""
    compressed: CompressedSum | None = None
    """Compressed sum over the data axis; None for fp32."""
    bucket_bytes: float = BUCKET_BYTES
    """Bytes from which on a bucket is closed."""
    use_differs: bool = False
    """Whether ranks and steps may use different parameters; not together with compression."""
    _buckets: list[_Bucket] = field(default_factory=list)
    _watched: dict[Tensor, _Watched] = field(default_factory=dict)
    _launched: int = 0
    _is_uncompressed: bool = False
    _is_counting: bool = False
    _handles: list[Any] = field(default_factory=list)

    def watch(self, parameters: Sequence[HeldParameter]) -> None:
        """Distributes parameters over buckets, last first: gradients become ready in about the reverse order."""
        self._is_counting = self.use_differs
        for held in reversed(parameters):
            watched = _Watched(held, self.micro_batches)
            if not self._buckets or not self._has_room(self._buckets[-1], held.parameter):
                self._buckets.append(_Bucket([]))
            bucket, watched.bucket = self._buckets[-1], len(self._buckets) - 1
            bucket.parameters.append(watched)
            bucket.layout += ((held.key, held.parameter.numel()),)
            self._watched[held.parameter] = watched
            handle = held.parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _has_room(self, bucket: _Bucket, parameter: nn.Parameter) -> bool:
        """Whether a bucket takes one more: it is not full, and all its gradients are of one type on one device."""
        if self.use_differs and bucket.kind != (parameter.dtype, parameter.device):
            return False
        return (
            sum(w.held.parameter.numel() * w.held.parameter.element_size() for w in bucket.parameters)
            < self.bucket_bytes
        )

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
            bucket.pending = len(bucket.parameters)
            for watched in bucket.parameters:
                watched.fired = 0

    def _on_gradient(self, parameter: Tensor) -> None:
        watched = self._watched[parameter]
        watched.fired += 1
        if watched.fired > watched.expected:
            self._check_not_sent(watched)
        if watched.fired != watched.expected:
            return
        self._buckets[watched.bucket].pending -= 1
        if self._is_counting:
            return
        # In order, so that all replicas send the same bucket at the same time.
        while self._launched < len(self._buckets) and self._buckets[self._launched].pending == 0:
            self._launch()

    def _check_not_sent(self, watched: _Watched) -> None:
        if watched.bucket < self._launched:
            raise GradientError(
                f"{watched.held.name}: its gradient grew {watched.fired} times in this step and was summed over the ranks "
                f"after {watched.expected}, as often as in any step before; activation checkpointing with "
                "use_reentrant=True uses a module more often from step to step: write use_reentrant=False"
            )

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        ended = self.mesh.traffic.overlap.begin()
        bucket.buffer = self._joined(bucket)
        for watched, part in bucket.parts():
            if watched.gradient is not None and watched.is_plain:
                # the buffer is its gradient from now on, so that no gradient is held twice
                watched.held.parameter.grad = part
        if self.compressed and not self._is_uncompressed:
            self.mesh.traffic.count(Axis.DATA, self.compressed.sent_bytes(bucket.buffer.numel()))
            bucket.work = self.compressed.start(bucket.layout, bucket.buffer)
            bucket.work.then(lambda _: ended())
            return
        sent_bytes = ring_bytes(bucket.buffer.numel() * bucket.buffer.element_size(), self.mesh.lengths[Axis.DATA])
        self.mesh.traffic.count(Axis.DATA, sent_bytes)
        bucket.work = dist.all_reduce(bucket.buffer, group=self.mesh.group(Axis.DATA), async_op=True)
        bucket.work.get_future().add_done_callback(lambda _: ended())

    def _joined(self, bucket: _Bucket) -> Tensor:
        """Joins a bucket's gradients to one flat tensor, and, if use differs, a 1 for each that there is and a 0 for each other."""
        parts = []
        for watched in bucket.parameters:
            gradient = watched.gradient
            if gradient is None:
                parts.append(torch.zeros_like(watched.held.parameter).flatten())
            elif gradient.layout is not torch.strided:
                raise GradientError(
                    f"{watched.held.name}: its gradient is sparse, which ranks do not sum; write sparse=False in its module"
                )
            else:
                parts.append(gradient.flatten())
        if self.use_differs:
            is_used = [watched.gradient is not None for watched in bucket.parameters]
            parts.append(
                parts[0].new_ones(len(is_used))
                if all(is_used)
                else parts[0].new_tensor([float(used) for used in is_used])
            )
        return torch.cat(parts)

    def finish(self) -> None:
        """Ends a step's backward passes and waits until all gradients are summed. That time is exposed.

        Raises:
            GradientError: a gradient cannot be summed.
        """
        self.mesh.traffic.overlap.computed()
        with self.mesh.traffic.exposed(Axis.DATA):
            while self._launched < len(self._buckets):
                self._launch()
            for bucket in self._buckets:
                bucket.work.wait()
                self._spread(bucket)
                bucket.buffer = bucket.work = None
        if self.use_differs:
            self._is_counting = False
            for watched in self._watched.values():
                watched.expected = max(watched.expected, watched.fired)

    def _spread(self, bucket: _Bucket) -> None:
        """Gives each parameter its part of a bucket's sum. One that no rank has used keeps no gradient."""
        assert bucket.buffer is not None  # noqa: S101  it was launched
        parts = bucket.parts()
        unused = [number for number, (watched, _) in enumerate(parts) if watched.gradient is None]
        signs = bucket.buffer[-len(parts) :].real.tolist() if unused and self.use_differs else [1.0] * len(parts)
        for (watched, part), sign in zip(parts, signs, strict=True):
            if watched.gradient is None and sign > 0:
                watched.held.parameter.grad = part if watched.is_plain else torch.empty_like(watched.held.parameter)
            if watched.gradient is not None and not watched.is_plain:
                watched.gradient.copy_(part)
