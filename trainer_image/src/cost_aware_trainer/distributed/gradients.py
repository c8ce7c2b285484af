"""Gradients of a rank's parameters: their sums over the ranks that share them, and their global norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_aware_trainer.distributed.collectives import ring_bytes
from cost_aware_trainer.distributed.layout import Box, tensor_dimension
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.telemetry.traffic import Axis


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


def held_whole(model: nn.Module) -> list[HeldParameter]:
    """Lists a model's parameters, each whole on every rank."""
    return [
        HeldParameter(name, parameter, Box((0,) * parameter.ndim, tuple(parameter.shape)), is_copy=False)
        for name, parameter in model.named_parameters()
    ]


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


def squared_norm(mesh: Mesh, parameters: Sequence[HeldParameter], *, is_sharded: bool) -> Tensor:
    """Share of this rank in the squared norm of the whole model's gradient, on its device. Each element counts on one rank only."""
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
        return torch.zeros((), dtype=torch.float64, device=mesh.ranks.device)
    return torch.stack(torch._foreach_norm(mine)).double().square().sum()
