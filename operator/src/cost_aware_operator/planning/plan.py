"""The plan of a data-parallel run: the fewest nodes that fit, for the fewest dollars.

Adding nodes of one kind never lowers the dollars of a step: compute dollars stay the same and communication is added. So the
cheapest plan is the smallest node count that divides the batch and fits memory; `nodes.min` asks for more speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.api.spec import CapacityType, JobSpec
from cost_aware_operator.api.units import GIB, quantity
from cost_aware_operator.costs.model_parallel import DecoderShape, ModelParallelCostAnalyzer
from cost_aware_operator.costs.prices import PriceBook
from cost_aware_operator.planning.presets import shape_of

MICRO_BATCH_CAP = 64
"""An absent batch.micro is never planned larger: beyond this the matrix products are as efficient as they get."""


@dataclass(frozen=True)
class Plan:
    """Degrees and sizes of a run."""

    data: int
    nodes: int
    ranks_per_node: int
    micro_batch: int
    memory_gib: float | None
    hourly_usd: float | None
    explanation: str
    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Refusal:
    """Why no plan exists: a condition's reason, and a message with the field, what was wrong and what to write instead."""

    reason: str
    message: str


@dataclass(frozen=True)
class PlanInput:
    """All that a plan depends on."""

    spec: JobSpec
    prices: PriceBook
    default_resources: dict[str, object] | None = None


def make_plan(given: PlanInput) -> Plan | Refusal:
    """The cheapest plan, or why there is none. Checks run in this order; the first that fails is the answer."""
    spec = given.spec
    for check in (_check_instance_types, _check_resources, _check_degrees, _check_batch):
        refusal = check(given)
        if refusal is not None:
            return refusal
    shape = shape_of(spec.model) if spec.model is not None else None
    limit_gib, limited_by = _memory_limit_gib(given)
    refusals: list[Refusal] = []
    for nodes in _node_counts(spec):
        answer = _fit(given, nodes, shape, limit_gib, limited_by)
        if isinstance(answer, Plan):
            return answer
        refusals.append(answer)
    return refusals[-1]


def _node_counts(spec: JobSpec) -> list[int]:
    """Node counts whose ranks, with the micro-batch where it is given, divide the global batch; smallest first."""
    ranks, micro = spec.nodes.ranks_per_node, spec.batch.micro or 1
    wanted = spec.parallelism.data if spec.parallelism is not None else None
    counts = range(spec.nodes.min, spec.nodes.max + 1)
    return [n for n in counts if spec.batch.global_ % (n * ranks * micro) == 0 and wanted in (None, n * ranks)]


def _check_instance_types(given: PlanInput) -> Refusal | None:
    for i, name in enumerate(given.spec.nodes.instance_types):
        if not given.prices.knows(name):
            similar = given.prices.similar(name)
            hint = f"did you mean {' or '.join(similar)}?" if similar else "the price book lists the known ones."
            return Refusal(
                "UnknownInstanceType",
                f"spec.nodes.instanceTypes[{i}]: {name!r} is not in the price book; {hint} "
                "Write a known type, or give its price in the operator's price ConfigMap.",
            )
    return None


def _check_resources(given: PlanInput) -> Refusal | None:
    for kind in ("requests", "limits"):
        for name, value in _resources(given).get(kind, {}).items():
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
    if spec.parallelism is None or spec.parallelism.data is None:
        return None
    product, ranks = spec.parallelism.product_of_given, spec.nodes.ranks_per_node
    possible = [n * ranks for n in range(spec.nodes.min, spec.nodes.max + 1)]
    if product in possible:
        return None
    nearest = min(possible, key=lambda r: abs(r - product))
    return Refusal(
        "DegreesMismatch",
        f"spec.parallelism: the product of the degrees is {product}, but spec.nodes gives {possible[0]}"
        + (f" to {possible[-1]}" if len(possible) > 1 else "")
        + f" ranks in steps of {ranks}: write data: {nearest}, or change spec.nodes",
    )


def _check_batch(given: PlanInput) -> Refusal | None:
    spec = given.spec
    micro = spec.batch.micro or 1
    if _node_counts(spec):
        return None
    unit = spec.nodes.min * spec.nodes.ranks_per_node * micro
    nearest = max(unit, round(spec.batch.global_ / unit) * unit)
    return Refusal(
        "BatchNotDivisible",
        f"spec.batch.global: {spec.batch.global_} is not divisible by ranks x batch.micro for any node count from "
        f"{spec.nodes.min} to {spec.nodes.max} ({spec.nodes.ranks_per_node} ranks a node, micro-batch {micro}): "
        f"write {nearest}, or change spec.nodes or spec.batch.micro",
    )


def _resources(given: PlanInput) -> dict[str, dict[str, str]]:
    resources = given.spec.template.resources or given.default_resources or {}
    return {k: dict(v) for k, v in resources.items() if isinstance(v, dict)}


def _memory_limit_gib(given: PlanInput) -> tuple[float | None, str]:
    """What one rank may use, in GiB, and what says so: the smallest GPU of the allowed types, or the container's share."""
    spec = given.spec
    limits = _resources(given).get("limits", {})
    if "nvidia.com/gpu" in limits:
        sizes = {
            instance.name: instance.accelerator_memory_gib
            for name in spec.nodes.instance_types
            if (instance := given.prices.instances.get(name)) is not None
            and instance.accelerator_memory_gib is not None
        }
        if not sizes:
            return None, "no instance type is named"
        smallest = min(sizes, key=lambda n: sizes[n] or 0.0)
        return sizes[smallest], f"a GPU of {smallest}"
    if "memory" not in limits:
        return None, "no memory limit is set"
    share = quantity(limits["memory"]) / GIB / spec.nodes.ranks_per_node
    return share, f"spec.template.resources.limits.memory ({limits['memory']} for {spec.nodes.ranks_per_node} ranks)"


def _fit(
    given: PlanInput, nodes: int, shape: DecoderShape | None, limit_gib: float | None, limited_by: str
) -> Plan | Refusal:
    """The largest micro-batch that divides and fits on this many nodes."""
    spec = given.spec
    data = nodes * spec.nodes.ranks_per_node
    share = spec.batch.global_ // data
    candidates = [spec.batch.micro] if spec.batch.micro else _divisors(share, MICRO_BATCH_CAP)
    analyzer = ModelParallelCostAnalyzer()
    for micro in candidates:
        memory = analyzer.memory_gib(shape, micro).total if shape is not None else None
        if memory is None or limit_gib is None or memory <= limit_gib:
            return Plan(
                data=data,
                nodes=nodes,
                ranks_per_node=spec.nodes.ranks_per_node,
                micro_batch=micro,
                memory_gib=None if memory is None else round(memory, 3),
                hourly_usd=_hourly_usd(given, nodes),
                explanation=_explanation(spec, nodes, micro, memory, limit_gib, limited_by),
            )
    smallest = candidates[-1]
    if shape is None or limit_gib is None:
        raise AssertionError("without a shape or a limit every micro-batch fits")
    need = analyzer.memory_gib(shape, smallest)
    return Refusal(
        "MemoryExceeded",
        f"spec.model: {shape.parameters / 1e6:,.1f} M parameters need {need.total:.2f} GiB a rank at micro-batch {smallest} "
        f"(weights {need.weights:.2f}, gradients {need.gradients:.2f}, optimizer {need.optimizer:.2f}, activations "
        f"{need.activations:.2f}, logits {need.logits:.2f}, framework {need.framework:.2f}), but {limited_by} gives "
        f"{limit_gib:.2f}: raise the limit to {_needed(need.total, spec.nodes.ranks_per_node)}, "
        "choose larger nodes, or a smaller model, sequenceLength or batch.micro",
    )


def _needed(gib_per_rank: float, ranks: int) -> str:
    return f"{int(gib_per_rank * ranks * 1024) + 1}Mi"


def _divisors(number: int, cap: int) -> list[int]:
    """Divisors up to a cap, largest first, powers of two before others of about their size."""
    divisors = [d for d in range(1, min(number, cap) + 1) if number % d == 0]
    return sorted(divisors, key=lambda d: (d & (d - 1) != 0, -d)) if 1 in divisors else divisors


def _hourly_usd(given: PlanInput, nodes: int) -> float | None:
    """Before pods exist, a price is known only where every allowed type's is; the dearest of them is the promise."""
    spot = given.spec.nodes.capacity_type is CapacityType.SPOT
    prices = [given.prices.price(name, spot=spot) for name in given.spec.nodes.instance_types]
    known = [p.hourly_usd for p in prices if p is not None]
    return max(known) * nodes if known and len(known) == len(prices) else None


def _explanation(
    spec: JobSpec, nodes: int, micro: int, memory: float | None, limit_gib: float | None, limited_by: str
) -> str:
    ranks = nodes * spec.nodes.ranks_per_node
    accumulation = spec.batch.global_ // (ranks * micro)
    why = "the fewest nodes that divide the batch" + (" and fit memory" if memory is not None else "")
    parts = [
        f"{nodes} {'node' if nodes == 1 else 'nodes'} ({why}, from {spec.nodes.min} to {spec.nodes.max}): "
        f"more would add communication, not save dollars",
        f"each step is {ranks} ranks x {accumulation} micro-batches of {micro}",
    ]
    if memory is not None:
        bound = f" of {limit_gib:.2f} GiB ({limited_by})" if limit_gib is not None else f" ({limited_by})"
        parts.append(f"{memory:.2f} GiB a rank predicted{bound}")
    return "; ".join(parts) + "."
