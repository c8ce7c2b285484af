"""A run's state by name: weights, AdamW's moments and step counts, each as the box of a whole tensor that a rank holds.

Names and whole shapes depend on the model alone. So does a tensor's checksum: it is a sum over elements, each hashed with
its place in the whole tensor, so ranks sum up their parts and every layout arrives at the same number without any rank
ever seeing a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from cost_aware_trainer.data.samples import checksum_text
from cost_aware_trainer.distributed.gradients import Held, local
from cost_aware_trainer.distributed.layout import Box, Shape, tensor_dimension
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.state.manifests import TensorFacts
from cost_aware_trainer.telemetry.traffic import Axis

MOMENTS = ("exp_avg", "exp_avg_sq")
RESIDUAL = "residual."
"""Before a parameter's name: what compression still owes it, in checkpoints of runs that were stopped while they compressed."""
_GOLDEN = 0x9E3779B97F4A7C15
_ELEMENT = 0xD6E8FEB86659FD93
_CHUNK_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StatePart:
    """One tensor of the state as far as this rank holds it: `values` is box `box` of a whole tensor of `shape`."""

    name: str
    values: Tensor
    box: Box
    shape: Shape
    parameter: str
    is_copy: bool


def whole_shapes(parameters: Mapping[str, Shape]) -> dict[str, Shape]:
    """All tensors of a model's state, `model.…` and `optimizer.…`, with their whole shapes."""
    shapes: dict[str, Shape] = {f"model.{name}": shape for name, shape in parameters.items()}
    for name, shape in parameters.items():
        shapes |= {f"optimizer.state.{name}.{moment}": shape for moment in MOMENTS}
        shapes[f"optimizer.state.{name}.step"] = ()
    return shapes


def allocate_moments(optimizer: torch.optim.Optimizer, held: list[Held]) -> None:
    """Gives every parameter the state that its first step would: so that loading finds something to fill."""
    for item in held:
        state = optimizer.state[item.parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(item.parameter, memory_format=torch.preserve_format)


def parts_of(
    held: Sequence[Held], optimizer: torch.optim.Optimizer, parameters: Mapping[str, Shape]
) -> list[StatePart]:
    """This rank's part of the state, in place: writing to `values` changes the run."""
    parts: list[StatePart] = []
    scalar = Box((), ())
    for item in held:
        state, name = optimizer.state[item.parameter], item.name
        shape = parameters[name]
        parts.append(StatePart(f"model.{name}", item.value, item.box, shape, name, item.is_copy))
        for moment in MOMENTS:
            values = local(state[moment])
            parts.append(StatePart(f"optimizer.state.{name}.{moment}", values, item.box, shape, name, item.is_copy))
        parts.append(StatePart(f"optimizer.state.{name}.step", state["step"], scalar, (), name, item.is_copy))
    return parts


def residual_parts(parts: list[StatePart], residuals: Mapping[str, Tensor] | None = None) -> list[StatePart]:
    """The parts of what compression owes, one for each of the weights in `parts`: as given by parameter, or zeros to be filled."""
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
    """The state as torch.distributed.checkpoint reads it: local tensors that say which box of what they are."""
    state: dict[str, Tensor] = {}
    for part in parts:
        # A rank with both copies of a tied embedding saves, and loads, one.
        if part.name not in state:
            state[part.name] = _described(part.values.detach(), part.box, part.shape)
    return state


def _described(values: Tensor, box: Box, shape: Shape) -> Tensor:
    """A tensor with the fields of torch's CheckpointableTensor; scalars and empty parts included."""
    if not shape:
        return values
    is_held = values.numel() > 0
    values.global_shape = shape  # type: ignore[attr-defined]
    values.global_offsets = (box.offsets,) if is_held else ()  # type: ignore[attr-defined]
    values.local_offsets = ((0,) * len(shape),) if is_held else ()  # type: ignore[attr-defined]
    values.local_sizes = (box.sizes,) if is_held else ()  # type: ignore[attr-defined]
    return values


def staged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in CPU memory that later steps do not change, described as its source is."""
    copies: dict[str, Tensor] = {}
    for name, values in state.items():
        copy = values.detach().to("cpu", copy=True)
        for field in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
            if hasattr(values, field):
                setattr(copy, field, getattr(values, field))
        copies[name] = copy
    return copies


def copy_twins(parts: list[StatePart]) -> None:
    """After loading: a rank's second copy of a tied embedding takes over what the first one has."""
    firsts: dict[str, Tensor] = {}
    for part in parts:
        if part.name in firsts:
            part.values.copy_(firsts[part.name])
        else:
            firsts[part.name] = part.values


def checksum(values: Tensor, box: Box, shape: Shape) -> int:
    """The part's share of its whole tensor's checksum, modulo 2^64."""
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
    """Places in the flattened whole tensor of `count` elements of a flattened box, from its element `first` on."""
    rest = torch.arange(first, first + count, device=device)
    places, stride = torch.zeros_like(rest), 1
    for offset, size, whole in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        places += (rest % size + offset) * stride
        rest = rest // size
        stride *= whole
    return places


def _signed(word: int) -> int:
    """A 64-bit word as torch's int64 writes it."""
    return word - (1 << 64) if word >> 63 else word


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose shifts keep the sign and so have to be masked."""
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
        """Facts of all tensors of the run, on every rank; `state` holds staged values. Safe on a background thread."""
        owes = any(part.name in self._residual_shapes for part in parts)
        shapes = self._shapes | (self._residual_shapes if owes else {})
        names = {name: index for index, name in enumerate(shapes)}
        sums = torch.zeros(len(names), dtype=torch.int64)
        for part in parts:
            if self._speaks_for(part):
                sums[names[part.name]] = _signed(checksum(state[part.name], part.box, part.shape))
        if self._mesh.ranks.background is not None:
            dist.all_reduce(sums, group=self._mesh.ranks.background)
        return {
            name: TensorFacts(shape=shape, dtype="torch.float32", checksum=checksum_text(int(sums[names[name]])))
            for name, shape in shapes.items()
        }

    def _speaks_for(self, part: StatePart) -> bool:
        """Whether this rank's part is the one of several equal ones that counts."""
        place, is_scalar = self._mesh.place, part.shape == ()
        splits = not is_scalar and tensor_dimension(part.parameter) is not None
        shards = not is_scalar and self._is_sharded
        return not part.is_copy and (place.tensor == 0 or splits) and (place.data == 0 or shards)

    def wrong(self, parts: list[StatePart], facts: Mapping[str, TensorFacts]) -> Iterator[str]:
        """Names of tensors of which this rank, with the peers that hold the rest, has another content than `facts` say."""
        sums = [_signed(checksum(p.values, p.box, p.shape)) for p in parts]
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
