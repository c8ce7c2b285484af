"""What a manifest asks for that no plan can give it, found before one is searched for: the field, what is wrong, what to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.api.units import quantity
from cost_aware_operator.costs.models.layout import Recompute, StateSharding
from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.tables.prices import PriceBook
from cost_aware_operator.planning.space import Abilities, ranks_per_node_of, resources_of, unknown_instance_type

OWN_PROGRAM = Abilities((StateSharding.DDP,), (Recompute.NONE,), (PipelineSchedule.ONE_F_ONE_B,), splits_model=False)
"""What a user's own program is taken to run: data parallelism, unless its manifest says more."""
TRAINER = Abilities(
    schedules=(PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED),
    filled_pipelines=True,
    whole_vocabulary_shards=True,
)
"""What the bundled trainer runs. Its zero-bubble schedules do without sharding and recompute, and are left to be asked for."""


@dataclass(frozen=True)
class Refusal:
    """Why no plan exists."""

    reason: str
    """Reason of the condition, one CamelCase word."""
    message: str
    """The field, what was wrong and what to write instead."""


@dataclass(frozen=True)
class PlanInput:
    """All that a plan depends on."""

    spec: JobSpec
    """The manifest's spec."""
    prices: PriceBook
    """The price book."""
    default_resources: Mapping[str, Any] | None = None
    """The operator's resources for containers whose manifest gives none."""


def refused(given: PlanInput) -> Refusal | None:
    """The first check that has something to say; None where a plan may be searched for."""
    for check in (_check_instance_types, _check_resources, _check_degrees, _check_batch):
        refusal = check(given)
        if refusal is not None:
            return refusal
    return None


def abilities_of(spec: JobSpec) -> Abilities:
    """What the manifest's program can run."""
    return TRAINER if spec.trainer.config is not None and spec.model is not None else OWN_PROGRAM


def node_counts(given: PlanInput) -> list[int]:
    """Node counts whose ranks, with the micro-batch where it is given, divide the batch; smallest first."""
    spec = given.spec
    ranks, micro = ranks_per_node_of(spec, given.default_resources), spec.batch.micro or 1
    degrees = spec.parallelism
    model = (degrees.tensor or 1) * (degrees.pipeline or 1) if degrees is not None else 1
    wanted = degrees.data if degrees is not None else None
    counts = range(spec.nodes.min, spec.nodes.max + 1)
    data = {n: n * ranks // model for n in counts if n * ranks % model == 0}
    return [n for n, d in data.items() if spec.batch.global_ % (d * micro) == 0 and wanted in (None, d)]


def _check_instance_types(given: PlanInput) -> Refusal | None:
    for i, name in enumerate(given.spec.nodes.instance_types):
        if not given.prices.knows(name):
            where = f"spec.nodes.instanceTypes[{i}]"
            return Refusal("UnknownInstanceType", unknown_instance_type(where, name, given.prices))
    return None


def _check_resources(given: PlanInput) -> Refusal | None:
    for kind in ("requests", "limits"):
        for name, value in resources_of(given.spec, given.default_resources).get(kind, {}).items():
            try:
                number = quantity(value)
            except ValueError as error:
                return Refusal("InvalidResources", f"spec.template.resources.{kind}.{name}: {error}")
            if number < 0:
                return Refusal(
                    "InvalidResources",
                    f"spec.template.resources.{kind}.{name}: {value!r} is negative; write a positive one",
                )
    return None


def _check_degrees(given: PlanInput) -> Refusal | None:
    spec = given.spec
    degrees = spec.parallelism
    if degrees is None or degrees.data is None:
        return None
    open_degrees = [n for n in ("tensor", "pipeline") if getattr(degrees, n) is None]
    product, ranks = degrees.product_of_given, ranks_per_node_of(spec, given.default_resources)
    possible = [n * ranks for n in range(spec.nodes.min, spec.nodes.max + 1)]
    splits = bool(open_degrees) and abilities_of(spec).splits_model
    if product in possible or (splits and any(p % product == 0 for p in possible)):
        return None
    nearest = max(1, min(possible, key=lambda r: abs(r - product)) * degrees.data // product)
    return Refusal(
        "DegreesMismatch",
        f"spec.parallelism: the product of the degrees is {product}, but spec.nodes gives {possible[0]}"
        + (f" to {possible[-1]}" if len(possible) > 1 else "")
        + f" ranks in steps of {ranks}: write data: {nearest}, or change spec.nodes",
    )


def _check_batch(given: PlanInput) -> Refusal | None:
    spec = given.spec
    degrees = spec.parallelism
    tensor, pipeline = (degrees.tensor, degrees.pipeline) if degrees is not None else (None, None)
    fixed = not abilities_of(spec).splits_model or (tensor is not None and pipeline is not None)
    data = degrees.data if degrees is not None else None
    micro = spec.batch.micro or 1
    if node_counts(given) or (not fixed and data is None and spec.batch.global_ % micro == 0):
        return None
    ranks = ranks_per_node_of(spec, given.default_resources)
    replicas = data or max(1, spec.nodes.min * ranks // ((tensor or 1) * (pipeline or 1)))
    unit = replicas * micro
    if spec.batch.global_ % unit == 0 and not fixed:
        return None
    nearest = max(unit, round(spec.batch.global_ / unit) * unit)
    return Refusal(
        "BatchNotDivisible",
        f"spec.batch.global: {spec.batch.global_} is not divisible by data x batch.micro for any node count from "
        f"{spec.nodes.min} to {spec.nodes.max} ({ranks} ranks a node, micro-batch {micro}): "
        f"write {nearest}, or change spec.nodes or spec.batch.micro",
    )
