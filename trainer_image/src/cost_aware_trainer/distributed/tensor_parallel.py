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

LOGITS_BYTES = 64 * 2**20
"""Size of logits in float32 up to which they are cast at once. More are cast a piece at a time."""


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

    def embed(self, tokens: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Turns tokens (samples, positions) into vectors (samples, positions / degree, hidden) of a type.

        `rows` is this rank's vocabulary, in the weights' own type.
        """
        if self.group is None:
            return F.embedding(tokens, rows).to(dtype)
        first = self.rank * rows.shape[0]
        is_mine = (tokens >= first) & (tokens < first + rows.shape[0])
        vectors = F.embedding((tokens - first).where(is_mine, 0), rows).to(dtype)
        return self.scatter_sum(vectors * is_mine.unsqueeze(-1).to(vectors.dtype))

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over all positions, in float32; equal on every rank of the axis.

        Logits are (samples, positions, vocabulary / degree) and never gathered.
        """
        return self.losses(logits, targets).sum()

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats of each position, (samples × positions), in float32.

        Logits are consumed: one backward pass writes their gradient over them, where they are too many to be held twice.
        """
        flat, targets = logits.flatten(0, 1), targets.flatten()
        if self.group is None and flat.shape[0] <= _rows_at_once(flat):
            return F.cross_entropy(flat.float(), targets, reduction="none")
        losses: Tensor = _CrossEntropy.apply(flat, targets, self)
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


def _rows_at_once(logits: Tensor) -> int:
    """Number of tokens whose logits are held in float32 at once."""
    return max(1, LOGITS_BYTES // (4 * logits.shape[1]))


class _CrossEntropy(torch.autograd.Function):
    """Losses (tokens) of logits (tokens, vocabulary / degree), in float32 for some tokens at a time.

    One maximum and one sum of two values travel for each token. The backward pass overwrites the logits with their gradient:
    with a vocabulary of 128,000 they are larger than all else that one layer holds (Wijmans et al., 2411.09009).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
        rows, first = _rows_at_once(logits), axis.rank * logits.shape[1]
        is_mine = (targets >= first) & (targets < first + logits.shape[1])
        index = (targets - first).where(is_mine, 0).unsqueeze(1)
        largest = logits.amax(dim=1).float()
        axis.all_reduce(largest, dist.ReduceOp.MAX)
        of_target = (logits.gather(1, index).squeeze(1).float() - largest) * is_mine
        pieces = zip(torch.split(logits, rows), torch.split(largest, rows), strict=True)
        exponentials = [(some.float() - top.unsqueeze(1)).exp_().sum(dim=1) for some, top in pieces]
        sums = torch.stack((torch.cat(exponentials), of_target))
        axis.all_reduce(sums)
        log_sums = sums[0].log()
        ctx.rows, ctx.is_spent = rows, False
        ctx.save_for_backward(logits, largest + log_sums, index, is_mine)
        return log_sums - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_spent:
            raise RuntimeError("losses: a second backward pass; the first has written the gradient over the logits")
        ctx.is_spent = True
        logits, *others = ctx.saved_tensors
        with torch.no_grad():
            pieces = (torch.split(tensor, ctx.rows) for tensor in (logits, *others, gradient))
            for some, log_sums, index, is_mine, factor in zip(*pieces, strict=True):
                probabilities = (some.float() - log_sums.unsqueeze(1)).exp_()
                probabilities.scatter_add_(1, index, -is_mine.unsqueeze(1).float())
                some.copy_(probabilities.mul_(factor.unsqueeze(1)))
        return logits, None, None
