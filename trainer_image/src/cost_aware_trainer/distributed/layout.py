"""Which rank holds which part of the model: pure arithmetic on the plan, the same answer on every rank.

A rank's number is `(pipeline × data_degree + data) × tensor_degree + tensor`: tensor-parallel peers, which talk the
most, are neighbours, and so share a node wherever they fit; pipeline stages, which talk the least, are far apart.
Parts of tensors are boxes (offsets and sizes) of the whole tensor. Initialisation, checkpoints, checksums and
resharding all work on boxes, so none of them depends on how a rank came by its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from cost_aware_trainer.contract import DegreesPlan, RunPlan, Schedule, Sharding

Shape = tuple[int, ...]

_ROWS = ("query.weight", "key.weight", "value.weight", "gate.weight", "up.weight", "embedding.weight", "head.weight")
_COLUMNS = ("attention.output.weight", "feed_forward.down.weight")


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on the three axes."""

    data: int
    tensor: int
    pipeline: int

    @classmethod
    def of(cls, rank: int, degrees: DegreesPlan) -> Self:
        """The place of a rank."""
        rest, tensor = divmod(rank, degrees.tensor)
        pipeline, data = divmod(rest, degrees.data)
        return cls(data, tensor, pipeline)

    def rank(self, degrees: DegreesPlan) -> int:
        """The rank at this place."""
        return (self.pipeline * degrees.data + self.data) * degrees.tensor + self.tensor


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it starts and how large it is, by dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def elements(self) -> int:
        """How many elements it has; 1 for a scalar."""
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def common(self, other: Box) -> Box | None:
        """The part that both cover, or None."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        mine, others = self.ends, other.ends
        sizes = tuple(min(a, b) - start for a, b, start in zip(mine, others, starts, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> Shape:
        """The first indices behind it."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Indices of the box in the whole tensor, or in the part `origin` of it."""
        base = origin.offsets if origin else (0,) * len(self.offsets)
        return tuple(slice(o - b, o - b + s) for o, b, s in zip(self.offsets, base, self.sizes, strict=True))


def tensor_dimension(name: str) -> int | None:
    """The dimension of a parameter that the tensor axis splits: rows, columns, or neither."""
    if name.endswith(_ROWS):
        return 0
    return 1 if name.endswith(_COLUMNS) else None


def box_of(name: str, shape: Shape, coordinates: Coordinates, degrees: DegreesPlan, sharding: Sharding) -> Box:
    """A rank's part of a parameter, given that its stage holds it; empty for a data rank that comes out short.

    The tensor axis splits evenly. The data axis then splits the rows of what is left as torch.chunk does.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    dimension = tensor_dimension(name)
    if dimension is not None:
        sizes[dimension] //= degrees.tensor
        offsets[dimension] = coordinates.tensor * sizes[dimension]
    if sharding is not Sharding.NONE and degrees.data > 1:
        rows, each = sizes[0], -(-sizes[0] // degrees.data)
        first = min(rows, coordinates.data * each)
        offsets[0] += first
        sizes[0] = min(rows, first + each) - first
    return Box(tuple(offsets), tuple(sizes))


def stage_count(plan: RunPlan) -> int:
    """Pipeline stages of the whole run."""
    return plan.degrees.pipeline * plan.strategy.interleave


def stage_layers(plan: RunPlan) -> tuple[int, ...]:
    """How many layers each stage has: as the plan says, or evenly, the first stages taking one more of the remainder.

    The last stage also has the head, so it is not the one to get more.
    """
    if plan.strategy.stage_layers:
        return plan.strategy.stage_layers
    each, remainder = divmod(plan.model.layers, stage_count(plan))
    return tuple(each + (stage < remainder) for stage in range(stage_count(plan)))


@dataclass(frozen=True)
class ModelStage:
    """One pipeline stage: its number, its layers' global indices, and which ends of the model it has."""

    index: int
    layers: range
    is_first: bool
    is_last: bool

    def holds(self, name: str, *, is_tied: bool) -> bool:
        """Whether a parameter belongs to this stage; a tied embedding belongs to the first and to the last."""
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self.layers
        if name.startswith("embedding."):
            return self.is_first or (is_tied and self.is_last)
        return self.is_last


def all_stages(plan: RunPlan) -> list[ModelStage]:
    """The run's stages in the order in which data flow through them."""
    stages: list[ModelStage] = []
    first_layer, count = 0, stage_count(plan)
    for index, layers in enumerate(stage_layers(plan)):
        stages.append(ModelStage(index, range(first_layer, first_layer + layers), index == 0, index == count - 1))
        first_layer += layers
    return stages


def pipeline_rank_of(stage: int, plan: RunPlan) -> int:
    """The pipeline rank that holds a stage: in turns, or there and back for the V-shaped schedule."""
    lap, place = divmod(stage, plan.degrees.pipeline)
    goes_back = plan.strategy.schedule is Schedule.ZERO_BUBBLE_V and lap % 2 == 1
    return plan.degrees.pipeline - 1 - place if goes_back else place


def stages_of(pipeline_rank: int, plan: RunPlan) -> list[ModelStage]:
    """The stages of one pipeline rank."""
    return [stage for stage in all_stages(plan) if pipeline_rank_of(stage.index, plan) == pipeline_rank]


def boxes_of(rank: int, plan: RunPlan, shapes: Mapping[str, Shape]) -> dict[str, Box]:
    """All parts that a rank holds, by parameter, given the whole model's shapes. Empty parts are left out."""
    place = Coordinates.of(rank, plan.degrees)
    stages = stages_of(place.pipeline, plan)
    boxes = {
        name: box_of(name, shape, place, plan.degrees, plan.strategy.sharding)
        for name, shape in shapes.items()
        if any(stage.holds(name, is_tied=plan.model.tied_embeddings) for stage in stages)
    }
    return {name: box for name, box in boxes.items() if box.elements}
