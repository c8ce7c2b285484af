"""State of a run by name: weights, AdamW's moments and step counts, each as the box of a whole tensor that a rank holds.

Names and whole shapes depend on the model alone. A tensor's checksum does not depend on the layout either: it is a sum over
elements, each hashed with its place in the whole tensor. Ranks sum up their parts, and every layout arrives at the same number
without any rank ever seeing a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from cost_aware_trainer.data.samples import checksum_text
from cost_aware_trainer.distributed.gradients import HeldParameter, local
from cost_aware_trainer.distributed.layout import Box, Shape, tensor_dimension
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.state.manifests import TensorFacts
from cost_aware_trainer.telemetry.traffic import Axis

MOMENTS = ("exp_avg", "exp_avg_sq")
RESIDUAL = "residual."
"""Prefix of a parameter's name for its residual of compression, in checkpoints of runs that were stopped while they compressed."""
_GOLDEN = 0x9E3779B97F4A7C15
_ELEMENT = 0xD6E8FEB86659FD93
_CHUNK_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StatePart:
    """Part of one tensor of the state that this rank holds."""

    name: str
    """Name of the tensor in the state."""
    values: Tensor
    """Values of the part."""
    box: Box
    """Place of the part in the whole tensor."""
    shape: Shape
    """Shape of the whole tensor."""
    parameter: str
    """Name of the parameter to which it belongs."""
    is_copy: bool
    """Whether it belongs to a tied embedding's second copy."""


def whole_shapes(parameters: Mapping[str, Shape]) -> dict[str, Shape]:
    """Lists all tensors of a model's state, `model.…` and `optimizer.…`, with their whole shapes."""
    shapes: dict[str, Shape] = {f"model.{name}": shape for name, shape in parameters.items()}
    for name, shape in parameters.items():
        shapes |= {f"optimizer.state.{name}.{moment}": shape for moment in MOMENTS}
        shapes[f"optimizer.state.{name}.step"] = ()
    return shapes


def allocate_moments(optimizer: torch.optim.Optimizer, parameters: Sequence[HeldParameter]) -> None:
    """Gives every parameter the optimizer state that its first step would give it, so that loading can fill it."""
    for held in parameters:
        state = optimizer.state[held.parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=held.value.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(held.parameter, memory_format=torch.preserve_format)


def parts_of(
    parameters: Sequence[HeldParameter], optimizer: torch.optim.Optimizer, shapes: Mapping[str, Shape]
) -> list[StatePart]:
    """Lists this rank's parts of the state, in place: writing to `values` changes the run."""
    parts: list[StatePart] = []
    scalar = Box((), ())
    for held in parameters:
        state, name = optimizer.state[held.parameter], held.name
        shape = shapes[name]
        parts.append(StatePart(f"model.{name}", held.value, held.box, shape, name, held.is_copy))
        for moment in MOMENTS:
            values = local(state[moment])
            parts.append(StatePart(f"optimizer.state.{name}.{moment}", values, held.box, shape, name, held.is_copy))
        parts.append(StatePart(f"optimizer.state.{name}.step", state["step"], scalar, (), name, held.is_copy))
    return parts


def residual_parts(parts: list[StatePart], residuals: Mapping[str, Tensor] | None = None) -> list[StatePart]:
    """Makes the parts of residuals, one for each of the weights in `parts`: the given values by parameter, or zeros to be filled."""
    return [
        replace(
            part,
            name=f"{RESIDUAL}{part.parameter}",
            values=torch.zeros_like(part.values) if residuals is None else residuals[part.parameter],
        )
        for part in parts
        if part.name == f"model.{part.parameter}"
    ]


def checkpointable(parts: list[StatePart]) -> dict[str, Tensor]:
    """Prepares the state for torch.distributed.checkpoint: local tensors with their place in the whole."""
    state: dict[str, Tensor] = {}
    for part in parts:
        # A rank with both copies of a tied embedding saves, and loads, one.
        if part.name not in state:
            state[part.name] = _described(part.values.detach(), part.box, part.shape)
    return state


def _described(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """Gives a tensor the fields of torch's CheckpointableTensor; works for scalars and empty parts too."""
    if not shape:
        return values
    is_held = values.numel() > 0
    values.global_shape = shape  # type: ignore[attr-defined]
    values.global_offsets = (box.offsets,) if is_held else ()  # type: ignore[attr-defined]
    values.local_offsets = ((0,) * len(shape),) if is_held else ()  # type: ignore[attr-defined]
    values.local_sizes = (box.sizes,) if is_held else ()  # type: ignore[attr-defined]
    return values


def copy_twins(parts: list[StatePart]) -> None:
    """Copies, after loading, a rank's first copy of a tied embedding to its second one."""
    firsts: dict[str, Tensor] = {}
    for part in parts:
        if part.name in firsts:
            part.values.copy_(firsts[part.name])
        else:
            firsts[part.name] = part.values


def checksum(values: Tensor, box: Box, shape: Shape) -> int:
    """Share of a part in its whole tensor's checksum, modulo 2^64."""
    if not values.numel():
        return 0
    flat = values.detach().contiguous().flatten()
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = 0
    for first in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[first : first + _CHUNK_ELEMENTS].long()
        indices = _places(first, chunk.numel(), box, shape, chunk.device)
        hashed = _mix((indices + 1) * _signed(_GOLDEN) + (chunk + 1) * _signed(_ELEMENT))
        total += int(hashed.sum())
    return total & ((1 << 64) - 1)


def _places(first: int, count: int, box: Box, shape: Shape, device: torch.device) -> Tensor:
    """Places, in the flattened whole tensor, of `count` elements of a flattened box from its element `first` on."""
    rest = torch.arange(first, first + count, device=device)
    places, stride = torch.zeros_like(rest), 1
    for offset, size, whole in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        places += (rest % size + offset) * stride
        rest = rest // size
        stride *= whole
    return places


def _signed(word: int) -> int:
    """Converts a 64-bit word to the number that torch's int64 has for it."""
    return word - (1 << 64) if word >> 63 else word


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64. Its shifts keep the sign, so they are masked."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


class Checksums:
    """Checksums of whole tensors from the parts that ranks hold."""

    def __init__(self, mesh: Mesh, parameters: Mapping[str, Shape], *, is_sharded: bool) -> None:
        self._mesh, self._is_sharded = mesh, is_sharded
        self._shapes = whole_shapes(parameters)
        self._residual_shapes = {f"{RESIDUAL}{name}": shape for name, shape in parameters.items()}

    def facts(self, state: Mapping[str, Tensor], parts: list[StatePart]) -> dict[str, TensorFacts]:
        """Computes facts of all tensors of the run, on every rank; `state` holds staged values. Safe on a background thread."""
        carries_residuals = any(part.name in self._residual_shapes for part in parts)
        shapes = self._shapes | (self._residual_shapes if carries_residuals else {})
        names = {name: index for index, name in enumerate(shapes)}
        sums = torch.zeros(len(names), dtype=torch.int64)
        # some ranks have much to add up and others nothing
        meeting = self._mesh.ranks.meetings.call("facts")
        for part in parts:
            if self._speaks_for(part):
                sums[names[part.name]] = _signed(checksum(state[part.name], part.box, part.shape))
                meeting.progressed(part.values.nbytes)
        meeting.agree()
        if self._mesh.ranks.background is not None:
            dist.all_reduce(sums, group=self._mesh.ranks.background)
        return {
            name: TensorFacts(shape=shape, dtype="torch.float32", checksum=checksum_text(int(sums[names[name]])))
            for name, shape in shapes.items()
        }

    def _speaks_for(self, part: StatePart) -> bool:
        """Whether this rank's part counts, among several equal ones."""
        place, is_scalar = self._mesh.place, part.shape == ()
        splits = not is_scalar and tensor_dimension(part.parameter) is not None
        shards = not is_scalar and self._is_sharded
        return not part.is_copy and (place.tensor == 0 or splits) and (place.data == 0 or shards)

    def wrong(self, parts: list[StatePart], facts: Mapping[str, TensorFacts]) -> Iterator[str]:
        """Yields names of tensors whose content, on this rank and the peers that hold the rest, is not that of `facts`."""
        meeting, sums = self._mesh.ranks.meet("checksums"), []
        for part in parts:
            sums.append(_signed(checksum(part.values, part.box, part.shape)))
            meeting.progressed(part.values.nbytes)
        meeting.agree()
        total = torch.tensor(sums, dtype=torch.int64, device=self._mesh.ranks.device)
        for axis, is_split in (
            (Axis.TENSOR, [p.shape != () and tensor_dimension(p.parameter) is not None for p in parts]),
            (Axis.DATA, [p.shape != () and self._is_sharded for p in parts]),
        ):
            group, chosen = self._mesh.group(axis), torch.tensor(is_split, device=total.device)
            if group is not None and bool(chosen.any()):
                summed = total.clone()
                dist.all_reduce(summed, group=group)
                total = torch.where(chosen, summed, total)
        for part, value in zip(parts, total.tolist(), strict=True):
            expected = facts.get(part.name)
            if expected is None or expected.shape != part.shape or expected.checksum != checksum_text(value):
                yield part.name
