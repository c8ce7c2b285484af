"""Layout of the model over the ranks: pure arithmetic on the plan, with equal results on every rank.

A rank's number is `(pipeline × data_degree + data) × tensor_degree + tensor`. Tensor-parallel peers, which exchange the
most, are neighbours and share a node if they fit. Pipeline stages, which exchange the least, are far apart. A part of a
tensor is a box (offsets and sizes) of the whole tensor. Initialisation, checkpoints, checksums and resharding all work
on boxes, so none of them depends on how a rank got its part.
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
    """Place of a rank on the three axes, each counted from 0."""

    data: int
    """Place on the data axis: the number of its replica."""
    tensor: int
    """Place on the tensor axis."""
    pipeline: int
    """Place on the pipeline axis."""

    @classmethod
    def of(cls, rank: int, degrees: DegreesPlan) -> Self:
        """Computes the place of a rank."""
        rest, tensor = divmod(rank, degrees.tensor)
        pipeline, data = divmod(rest, degrees.data)
        return cls(data, tensor, pipeline)

    def rank(self, degrees: DegreesPlan) -> int:
        """Number of the rank at this place."""
        return (self.pipeline * degrees.data + self.data) * degrees.tensor + self.tensor


@dataclass(frozen=True)
class Box:
    """Part of a tensor."""

    offsets: Shape
    """First index in each dimension."""
    sizes: Shape
    """Number of indices in each dimension."""

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def common(self, other: Box) -> Box | None:
        """Box that both cover; None if there is none."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        mine, others = self.ends, other.ends
        sizes = tuple(min(a, b) - start for a, b, start in zip(mine, others, starts, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> Shape:
        """First index after the box in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Indices of the box in the whole tensor, or in its part `origin`."""
        base = origin.offsets if origin else (0,) * len(self.offsets)
        return tuple(slice(o - b, o - b + s) for o, b, s in zip(self.offsets, base, self.sizes, strict=True))


def tensor_dimension(name: str) -> int | None:
    """Dimension of a parameter that the tensor axis splits: 0 for rows, 1 for columns, None for neither."""
    if name.endswith(_ROWS):
        return 0
    return 1 if name.endswith(_COLUMNS) else None


def box_of(name: str, shape: Shape, coordinates: Coordinates, degrees: DegreesPlan, sharding: Sharding) -> Box:
    """Box of a parameter that a rank holds, given that its stage holds the parameter.

    The tensor axis splits evenly. The data axis then splits the remaining rows as torch.chunk does, so the box of the last
    data ranks may be empty.
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
    """Number of pipeline stages of the whole run."""
    return plan.degrees.pipeline * plan.strategy.interleave


def stage_layers(plan: RunPlan) -> tuple[int, ...]:
    """Number of layers of each stage: as the plan says, or evenly, with one more for each of the first stages if there is a remainder.

    The last stage also has the head, so it is not the one that gets more.
    """
    if plan.strategy.stage_layers:
        return plan.strategy.stage_layers
    each, remainder = divmod(plan.model.layers, stage_count(plan))
    return tuple(each + (stage < remainder) for stage in range(stage_count(plan)))


@dataclass(frozen=True)
class ModelStage:
    """Pipeline stage of the model."""

    index: int
    """Number of the stage, from 0."""
    layers: range
    """Global indices of its layers."""
    is_first: bool
    """Whether the stage begins with the embedding."""
    is_last: bool
    """Whether the stage ends with the head."""

    def holds(self, name: str, *, is_tied: bool) -> bool:
        """Whether a parameter belongs to this stage. A tied embedding belongs to the first and to the last."""
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self.layers
        if name.startswith("embedding."):
            return self.is_first or (is_tied and self.is_last)
        return self.is_last


def all_stages(plan: RunPlan) -> list[ModelStage]:
    """Lists the run's stages in the order in which data flow through them."""
    stages: list[ModelStage] = []
    first_layer, count = 0, stage_count(plan)
    for index, layers in enumerate(stage_layers(plan)):
        stages.append(ModelStage(index, range(first_layer, first_layer + layers), index == 0, index == count - 1))
        first_layer += layers
    return stages


def pipeline_rank_of(stage: int, plan: RunPlan) -> int:
    """Pipeline rank that holds a stage: ranks take turns, or go there and back for the V-shaped schedule."""
    lap, place = divmod(stage, plan.degrees.pipeline)
    goes_back = plan.strategy.schedule is Schedule.ZERO_BUBBLE_V and lap % 2 == 1
    return plan.degrees.pipeline - 1 - place if goes_back else place


def stages_of(pipeline_rank: int, plan: RunPlan) -> list[ModelStage]:
    """Lists the stages of one pipeline rank."""
    return [stage for stage in all_stages(plan) if pipeline_rank_of(stage.index, plan) == pipeline_rank]


def boxes_of(rank: int, plan: RunPlan, shapes: Mapping[str, Shape]) -> dict[str, Box]:
    """Boxes that a rank holds, by parameter, given the whole model's shapes. Empty boxes are left out."""
    place = Coordinates.of(rank, plan.degrees)
    stages = stages_of(place.pipeline, plan)
    boxes = {
        name: box_of(name, shape, place, plan.degrees, plan.strategy.sharding)
        for name, shape in shapes.items()
        if any(stage.holds(name, is_tied=plan.model.tied_embeddings) for stage in stages)
    }
    return {name: box for name, box in boxes.items() if box.elements}
