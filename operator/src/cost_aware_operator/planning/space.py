"""Input of a search, made from a manifest and a price book: the work, the offers of nodes, the bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_aware_operator.api.spec import (
    AllowedDegrees,
    CapacityType,
    CheckpointRedundancy,
    JobSpec,
    ModelSpec,
    Objective,
)
from cost_aware_operator.api.units import GIB, quantity
from cost_aware_operator.costs.models.layout import Recompute, StateSharding
from cost_aware_operator.costs.models.machines import USABLE_MEMORY, Machine, cpu_machine, machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.search.combinations import Bounds, Offer, Work
from cost_aware_operator.costs.tables.fees import fee
from cost_aware_operator.costs.tables.hardware import HardwareError, NumberFormat
from cost_aware_operator.costs.tables.prices import Price, PriceBook, PriceError
from cost_aware_operator.planning.presets import shape_of

GPU = "nvidia.com/gpu"
STEPS_WITHOUT_CONFIG = 1000
"""Steps assumed for dollars if only the trainer's own arguments say how many there are."""
HELD_STATES = 4.0
"""States that each rank holds with `checkpoint.redundancy`: its own and a peer's, of the newest save and the one before. A parity
holds less."""
MEMORY_SHARE = 0.95
"""Share of a rank's memory that plans may use: predicted peaks are off by 10 % on average."""
CHECKPOINT_STORAGE = {"aws": "efs", "gcp": "pd-balanced"}
"""Rows of fees.csv for the volume that checkpoints lie on."""
CPU_STATE_BYTES = 16.0
"""Bytes of a weight in fp32 with its gradient and both moments."""
FREE_CPU_MEMORY_GIB = 1e6
"""Memory assumed for a rank without a limit, GiB: more than any model needs."""


class PlanError(ValueError):
    """A manifest that no plan can meet: a condition's reason, and a text with the field, what was wrong and what to write."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Space:
    """All that a search needs."""

    work: Work
    """The training to be done."""
    offers: tuple[Offer, ...]
    """Nodes that may be bought."""
    bounds: Bounds
    """Limits of the search."""
    objective: Objective
    """Goal: fewest dollars or least time."""
    prices: Mapping[str, Price]
    """Prices by name of the offer; empty while prices are unknown."""
    notes: tuple[str, ...]
    """Sentences on what the manifest left open and what was taken for it."""


@dataclass(frozen=True)
class Abilities:
    """Abilities of a trainer; the planner offers nothing else."""

    shardings: tuple[StateSharding, ...] = tuple(StateSharding)
    """State shardings."""
    recomputes: tuple[Recompute, ...] = tuple(Recompute)
    """Kinds of recompute."""
    schedules: tuple[PipelineSchedule, ...] = tuple(PipelineSchedule)
    """Pipeline schedules."""
    filled_pipelines: bool = False
    """Whether a pipeline needs as many micro-batches as it has stages, or more."""
    whole_vocabulary_shards: bool = False
    """Whether tensor ranks must divide the vocabulary and the sequence without padding."""
    splits_model: bool = True
    """Whether tensor and pipeline degrees above 1 may be planned; those that a manifest writes always are."""


def space_of(
    spec: JobSpec,
    prices: PriceBook,
    default_resources: Mapping[str, Any] | None = None,
    abilities: Abilities | None = None,
    *,
    offers: tuple[Offer, ...] | None = None,
) -> Space:
    """All that a search for this manifest needs; `offers` stand in for those of the price book.

    Raises:
        PlanError: the model cannot be, no instance type is named or known, or a price is missing.
    """
    if spec.model is None:
        raise PlanError(
            "ModelUnknown", "spec.model: is missing: write a preset or the shape, so that costs can be predicted"
        )
    check_model(spec.model)
    shape = shape_of(spec.model)
    check_shape(shape)
    notes: list[str] = []
    steps = spec.trainer.config.steps if spec.trainer.config is not None else None
    if steps is None:
        notes.append(
            f"the trainer's own arguments say how many steps it takes; dollars are those of {STEPS_WITHOUT_CONFIG:,}"
        )
    resources = resources_of(spec, default_resources)
    paid: dict[str, Price] = {}
    if offers is None:
        offers, paid = _offers(spec, prices, resources, notes)
    held = 0.0 if spec.checkpoint.redundancy is CheckpointRedundancy.NONE else HELD_STATES
    bundled = spec.trainer.config is not None
    work = Work(shape, spec.batch.global_, steps or STEPS_WITHOUT_CONFIG, spec.checkpoint.keep, held, bundled)
    bounds = bounds_of(spec, abilities or Abilities())
    if StateSharding.DDP in bounds.shardings and all(_roomy_cpu(offer, shape) for offer in offers):
        bounds = replace(bounds, shardings=(StateSharding.DDP,))
    return Space(work, offers, bounds, spec.objective, paid, tuple(notes))


def _roomy_cpu(offer: Offer, shape: DecoderShape) -> bool:
    """Whether an offer's CPU ranks hold all states in half of their memory, and so need not share them out.

    There gloo has no reduce-scatter, and gathering layer by layer costs more than the models, which know GPUs, say.
    """
    accelerator = offer.machine.accelerator
    return accelerator.name == "CPU" and CPU_STATE_BYTES * shape.parameters / GIB < accelerator.memory_gib / 2


def resources_of(spec: JobSpec, default: Mapping[str, Any] | None = None) -> dict[str, dict[str, str]]:
    """The container's requests and limits; the operator's defaults where the manifest has none."""
    resources = spec.template.resources or default or {}
    return {k: dict(v) for k, v in resources.items() if isinstance(v, Mapping)}


def gpus_of_pod(resources: Mapping[str, Mapping[str, str]]) -> int:
    """GPUs that a pod may have; 0 if it asks for none.

    Raises:
        ValueError: not a quantity.
    """
    limits = resources.get("limits", {})
    return int(quantity(limits[GPU])) if GPU in limits else 0


def ranks_per_node_of(spec: JobSpec, default: Mapping[str, Any] | None = None) -> int:
    """Processes of a pod: as written, else one for each GPU, else one."""
    return spec.nodes.ranks_per_node or max(1, gpus_of_pod(resources_of(spec, default)))


def bounds_of(spec: JobSpec, abilities: Abilities) -> Bounds:
    """The manifest's bounds within what the trainer can run."""
    given = spec.parallelism
    allowed = (given.allowed if given is not None else None) or AllowedDegrees()

    def degree(name: str) -> tuple[int, ...]:
        exact = getattr(given, name) if given is not None else None
        if exact is not None:
            return (exact,)
        wanted: tuple[int, ...] = getattr(allowed, name)
        return wanted if abilities.splits_model or name == "data" else (1,)

    budget = spec.budget
    return Bounds(
        nodes_min=spec.nodes.min,
        nodes_max=spec.nodes.max,
        data=degree("data"),
        tensor=degree("tensor"),
        pipeline=degree("pipeline"),
        micro_batch=(spec.batch.micro,) if spec.batch.micro else (),
        shardings=abilities.shardings,
        recomputes=abilities.recomputes,
        schedules=abilities.schedules,
        max_hourly_usd=budget.max_hourly_usd if budget is not None else None,
        budget_usd=budget.total_usd if budget is not None else None,
        deadline_seconds=spec.deadline_seconds,
        memory_share=MEMORY_SHARE,
        filled_pipelines=abilities.filled_pipelines,
        whole_vocabulary_shards=abilities.whole_vocabulary_shards,
    )


def check_model(model: ModelSpec) -> None:
    """Checks that a manifest's model is a preset or a whole shape, as the API server does too.

    Raises:
        PlanError: naming the field.
    """
    needed = ("layers", "hidden", "heads", "ffn", "sequenceLength", "vocabulary")
    given = model.model_dump(by_alias=True, exclude_defaults=True)
    if model.preset is None:
        missing = [name for name in needed if name not in given]
        if missing:
            raise PlanError(
                "InvalidModel", f"spec.model.{missing[0]}: is missing: write a preset, or all of {', '.join(needed)}"
            )
    elif len(given) > 1:
        extra = sorted(set(given) - {"preset"})[0]
        raise PlanError("InvalidModel", f"spec.model.{extra}: does not go with preset: write one or the other")


def check_shape(shape: DecoderShape) -> None:
    """Checks that such a decoder can exist.

    Raises:
        PlanError: naming the field and the nearest value that would do.
    """
    pairs = (("hidden", shape.hidden, "heads", shape.heads), ("heads", shape.heads, "kvHeads", shape.kv_heads))
    for whole, size, name, part in pairs:
        if size % part:
            nearest = min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - part))
            raise PlanError(
                "InvalidModel",
                f"spec.model.{name}: {part} does not divide spec.model.{whole} ({size}): write {nearest}",
            )


def _offers(
    spec: JobSpec, prices: PriceBook, resources: Mapping[str, Mapping[str, str]], notes: list[str]
) -> tuple[tuple[Offer, ...], dict[str, Price]]:
    names = spec.nodes.instance_types
    if not names:
        raise PlanError(
            "InstanceTypesMissing",
            "spec.nodes.instanceTypes: is empty: write one instance type or more, for example [p5.48xlarge], so that "
            "prices and hardware are known",
        )
    offers: list[Offer] = []
    paid: dict[str, Price] = {}
    for index, name in enumerate(names):
        where = f"spec.nodes.instanceTypes[{index}]"
        if not prices.knows(name):
            raise PlanError("UnknownInstanceType", unknown_instance_type(where, name, prices))
        try:
            node = machine_of(spec, name, resources)
        except HardwareError as error:
            raise PlanError("HardwareUnknown", f"{where}: {error}") from None
        found = _priced(spec.nodes.capacity_type, name, prices)
        if not found:
            kind = {CapacityType.SPOT: "spot", CapacityType.ON_DEMAND: "on-demand"}.get(spec.nodes.capacity_type, "")
            raise PlanError(
                "PriceUnknown",
                f"{where}: {name} has no {kind} price in the price book: write its price in a price file, or another type",
            )
        for spot, price in found:
            label = f"{name}{' spot' if spot else ''}"
            management_hourly_usd, storage_usd_per_gib_month = fees_of(prices, name, notes)
            offers.append(
                Offer(
                    label,
                    node,
                    price.hourly_usd,
                    precision_of(spec, node),
                    spot,
                    management_hourly_usd,
                    storage_usd_per_gib_month,
                )
            )
            paid[label] = price
    if all(offer.machine.accelerator.name == "CPU" for offer in offers):
        notes.append("template.resources asks for no GPU, so ranks are taken to compute on CPU cores")
    return tuple(offers), paid


def fees_of(prices: PriceBook, instance_type: str, notes: list[str]) -> tuple[float, float]:
    """Dollars an hour of the control plane, and dollars of a GiB kept for a month, at the type's provider.

    A fee that no table has counts 0 and is named in `notes`.
    """
    instance = prices.instances.get(instance_type)
    provider = instance.provider if instance is not None else "an unlisted provider"
    try:
        return fee(provider, "control-plane").usd, fee(provider, CHECKPOINT_STORAGE.get(provider, "")).usd
    except PriceError:
        note = f"dollars leave out control plane and storage of {provider}: fees.csv has no price of them"
        if note not in notes:
            notes.append(note)
        return 0.0, 0.0


def unknown_instance_type(where: str, name: str, prices: PriceBook) -> str:
    """Message for a type that the price book does not have, with what to write instead."""
    similar = prices.similar(name)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "the price book lists the known ones."
    return f"{where}: {name!r} is not in the price book; {hint} Write a known type, or give its price in a price file."


def machine_of(spec: JobSpec, instance_type: str | None, resources: Mapping[str, Mapping[str, str]]) -> Machine:
    """One pod's hardware: the type's GPUs, or the container's share of cores where it asks for no GPU.

    Raises:
        HardwareError: the table lacks the type or a figure of it.
    """
    gpus = gpus_of_pod(resources)
    on_gpu = instance_type is not None and (gpus > 0 or not (resources.get("limits") or resources.get("requests")))
    if on_gpu and instance_type is not None:
        node = machine(instance_type)
        ranks = spec.nodes.ranks_per_node or gpus or node.gpus_per_node
        return node if ranks == node.gpus_per_node else Machine(
            node.accelerator, ranks, node.link_gbytes_per_s, node.network_gbit_per_s
        )  # fmt: skip
    ranks = spec.nodes.ranks_per_node or 1
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    cores = limits.get("cpu") or requests.get("cpu")
    memory = quantity(limits["memory"]) / GIB / ranks if "memory" in limits else FREE_CPU_MEMORY_GIB
    # a container has all of its limit: what the driver keeps of a GPU does not apply
    return cpu_machine(
        instance_type, ranks, max(1.0, quantity(cores) / ranks) if cores else 1.0, memory / USABLE_MEMORY
    )


def precision_of(spec: JobSpec, node: Machine) -> NumberFormat:
    """Type in which products are computed: as written, else bf16 if the accelerator has it, fp32 on CPUs.

    Without bf16, the bundled trainer computes in fp32; a program of the user's own is taken to use fp16.
    """
    config = spec.trainer.config
    if config is not None and config.precision is not None:
        return NumberFormat(config.precision.value)
    peaks = node.accelerator.peak_tflops
    if node.accelerator.name == "CPU" or (config is not None and NumberFormat.BF16 not in peaks):
        return NumberFormat.FP32
    return next(p for p in (NumberFormat.BF16, NumberFormat.FP16, NumberFormat.FP32) if p in peaks)


def _priced(capacity: CapacityType, name: str, prices: PriceBook) -> list[tuple[bool, Price]]:
    kinds = {CapacityType.ON_DEMAND: (False,), CapacityType.SPOT: (True,), CapacityType.ANY: (False, True)}[capacity]
    found = ((spot, prices.price(name, spot=spot)) for spot in kinds)
    return [(spot, price) for spot, price in found if price is not None]
