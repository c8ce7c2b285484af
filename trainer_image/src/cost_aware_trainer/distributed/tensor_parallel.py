"""Tensor axis: sequence-parallel activations between layers, split matrices within them (2205.05198).

Between layers each rank holds `positions / degree` positions of every sample. Before a pair of column-split and
row-split matrices the positions are gathered. After the pair the partial sums are reduced and scattered at once. Weights
are plain local tensors, and every collective is spelt out here, so that each can be counted and timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cost_aware_trainer.telemetry.traffic import Axis, Traffic


@dataclass(frozen=True)
class TensorAxis:
    """Place of this rank on the tensor axis, and the collectives along it."""

    group: dist.ProcessGroup | None
    """Group of the axis; None if nothing is split, and then nothing is sent."""
    rank: int
    """Place of this rank on the axis."""
    degree: int
    """Number of ranks on the axis."""
    traffic: Traffic
    """Counter of bytes and waits."""

    def gather(self, x: Tensor) -> Tensor:
        """Gathers (samples, positions / degree, …) to (samples, positions, …). Gradients are summed and scattered."""
        return x if self.group is None else _Gather.apply(x, self)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Sums partial sums (samples, positions, …) and scatters them as (samples, positions / degree, …). Gradients are gathered."""
        return x if self.group is None else _ScatterSum.apply(x, self)

    def embed(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Turns tokens (samples, positions) into vectors (samples, positions / degree, hidden). `rows` is this rank's vocabulary."""
        if self.group is None:
            return F.embedding(tokens, rows)
        first = self.rank * rows.shape[0]
        is_mine = (tokens >= first) & (tokens < first + rows.shape[0])
        vectors = F.embedding((tokens - first).where(is_mine, 0), rows)
        return self.scatter_sum(vectors * is_mine.unsqueeze(-1).to(vectors.dtype))

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over all positions, in float32; equal on every rank of the axis.

        Logits are (samples, positions, vocabulary / degree) and never gathered.
        """
        flat = logits.float().flatten(0, 1)
        if self.group is None:
            return F.cross_entropy(flat, targets.flatten(), reduction="sum")
        losses: Tensor = _CrossEntropy.apply(flat, targets.flatten(), self)
        return losses.sum()

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats of each position, (samples × positions), without gradients."""
        flat = logits.float().flatten(0, 1)
        if self.group is None:
            return F.cross_entropy(flat, targets.flatten(), reduction="none")
        losses: Tensor = _CrossEntropy.apply(flat, targets.flatten(), self)
        return losses

    def all_reduce(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduces in place over the axis."""
        if self.group is not None:
            with self.traffic.exposed(Axis.TENSOR, 2 * self._share() * x.numel() * x.element_size()):
                dist.all_reduce(x, op=operation, group=self.group)

    def _share(self) -> float:
        return (self.degree - 1) / self.degree

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather_positions(self, x: Tensor) -> Tensor:
        """Forward pass of `gather`, outside of autograd."""
        samples, positions = x.shape[:2]
        gathered = x.new_empty((self.degree, *x.shape))
        with self.traffic.exposed(Axis.TENSOR, self._share() * gathered.numel() * x.element_size()):
            dist.all_gather_into_tensor(gathered.flatten(0, 1), x.contiguous(), group=self.group)
        return gathered.movedim(0, 1).reshape(samples, self.degree * positions, *x.shape[2:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scatter_positions(self, x: Tensor) -> Tensor:
        """Forward pass of `scatter_sum`, outside of autograd."""
        samples, positions = x.shape[:2]
        parts = x.reshape(samples, self.degree, positions // self.degree, *x.shape[2:]).movedim(1, 0).contiguous()
        with self.traffic.exposed(Axis.TENSOR, self._share() * x.numel() * x.element_size()):
            if dist.get_backend(self.group) == "gloo":
                # gloo scatters with one reduction for each rank; exchanging the parts takes a third of the time
                received = torch.empty_like(parts)
                dist.all_to_all_single(received.flatten(0, 1), parts.flatten(0, 1), group=self.group)
                return received.sum(dim=0)
            scattered = torch.empty_like(parts[0])
            dist.reduce_scatter_tensor(scattered, parts.flatten(0, 1), group=self.group)
        return scattered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        gathered: Tensor = axis.gather_positions(x)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        axis: TensorAxis = ctx.axis
        return axis.scatter_positions(gradient), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        scattered: Tensor = axis.scatter_positions(x)
        return scattered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        axis: TensorAxis = ctx.axis
        return axis.gather_positions(gradient), None


class _CrossEntropy(torch.autograd.Function):
    """Losses (tokens) of logits (tokens, vocabulary / degree). One maximum and one sum of two values travel for each token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
        first = axis.rank * logits.shape[1]
        largest = logits.amax(dim=1)
        axis.all_reduce(largest, dist.ReduceOp.MAX)
        exponentials = (logits - largest.unsqueeze(1)).exp()
        is_mine = (targets >= first) & (targets < first + logits.shape[1])
        index = (targets - first).where(is_mine, 0).unsqueeze(1)
        of_target = (logits.gather(1, index).squeeze(1) - largest) * is_mine
        sums = torch.stack((exponentials.sum(dim=1), of_target))
        axis.all_reduce(sums)
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(1), index, is_mine)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, index, is_mine = ctx.saved_tensors
        wanted = torch.zeros_like(probabilities).scatter_(1, index, is_mine.unsqueeze(1).to(probabilities.dtype))
        return (probabilities - wanted) * gradient.unsqueeze(1), None, None
