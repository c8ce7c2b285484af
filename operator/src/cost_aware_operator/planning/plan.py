"""The plan of a run: of all that fit, the degrees, nodes and micro-batch with the fewest predicted dollars, or the least time.

With a model and hardware that are known, every combination is predicted (`costs.three_d`). Where they are not, as with a user's own
program on nodes of any kind, the plan is the fewest nodes that divide the batch: more nodes of one kind add communication.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_aware_operator.api.spec import CapacityType, CheckpointRedundancy, JobSpec
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.layout import Layout, Recompute, StateSharding, pipeline_schedule
from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.models.predict import usable_gib
from cost_aware_operator.costs.search.combinations import Offer
from cost_aware_operator.costs.search.three_d import Ranking, ThreeDParallelCostAnalyzer
from cost_aware_operator.costs.tables.hardware import HardwareError, NumberFormat
from cost_aware_operator.planning import report
from cost_aware_operator.planning.buckets import bucket_mib
from cost_aware_operator.planning.checks import PlanInput as PlanInput
from cost_aware_operator.planning.checks import Refusal as Refusal
from cost_aware_operator.planning.checks import abilities_of, node_counts, refused
from cost_aware_operator.planning.space import (
    FREE_CPU_MEMORY_GIB,
    PlanError,
    Space,
    gpus_of_pod,
    machine_of,
    precision_of,
    ranks_per_node_of,
    resources_of,
    space_of,
)

NODE_HOUR_USD = 1.0
"""A price for nodes of which none is known: then the fewest node-hours win, and no dollars are told."""
ALTERNATIVES = 5


@dataclass(frozen=True)
class Predicted:
    """What a plan is expected to take."""

    step_seconds: float
    """Seconds of one step."""
    efficiency: float
    """Share of a step that computes or updates weights, 0 to 1."""
    hours: float
    """Hours of the whole run."""
    total_usd: float | None
    """Dollars of the whole run; None while prices are unknown."""


@dataclass(frozen=True)
class Alternative:
    """A runner-up."""

    degrees: str
    """Data x tensor x pipeline."""
    nodes: int
    """Nodes of the run."""
    instance_type: str
    """Instance type, with ` spot` where it is spot."""
    hours: float
    """Hours of the whole run."""
    total_usd: float | None
    """Dollars of the whole run; None while prices are unknown."""
    why_not: str
    """Why it is not the plan."""


@dataclass(frozen=True)
class Plan:
    """Degrees and sizes of a run."""

    data: int
    """Data-parallel degree: replicas of the model."""
    nodes: int
    """Nodes of the run."""
    ranks_per_node: int
    """Processes of one node."""
    micro_batch: int
    """Sequences that a replica computes at once."""
    memory_gib: float | None
    """GiB that the fullest rank is predicted to need; None where nothing is predicted."""
    hourly_usd: float | None
    """Dollars an hour of all nodes together; None while a price is unknown."""
    explanation: str
    """Why this plan, in sentences."""
    tensor: int = 1
    """Tensor-parallel degree."""
    pipeline: int = 1
    """Pipeline stages."""
    sharding: str = StateSharding.DDP.value
    """State that data-parallel ranks share out, a `StateSharding`."""
    recompute: str = Recompute.NONE.value
    """Activations that backward computes again, a `Recompute`."""
    schedule: str = PipelineSchedule.ONE_F_ONE_B.value
    """Order of the pipeline's passes, a `PipelineSchedule`."""
    interleave: int = 1
    """Model chunks of each pipeline stage; 1 is a plain pipeline."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty without a pipeline."""
    precision: str = "fp32"
    """Type in which matrix products are computed, a `NumberFormat`."""
    instance_types: tuple[str, ...] = ()
    """Instance types that the pods may run on; empty means any."""
    spot: bool = False
    """Whether the nodes are bought as spot."""
    bucket_mib: float | None = None
    """MiB of one bucket of gradients that replicas sum; None where the trainer's own choice stands. Two plans that
    differ only in this are the same plan."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that were slow; no pod of the job runs on them again."""
    predicted: Predicted | None = None
    """Expected step, hours and dollars; None where nothing is predicted."""
    alternatives: tuple[Alternative, ...] = ()
    """Runners-up, best first."""

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.nodes * self.ranks_per_node

    def layout(self, global_batch: int, precision: NumberFormat) -> Layout:
        """The plan as the cost models see it. Chunks of an interleaved stage are told by `interleave` alone."""
        schedule = PipelineSchedule(self.schedule)
        return Layout(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=1,
            sharding=StateSharding(self.sharding),
            interleave=self.interleave,
            recompute=Recompute(self.recompute),
            micro_batch=self.micro_batch,
            global_batch=global_batch,
            precision=precision,
            schedule=PipelineSchedule.ONE_F_ONE_B if schedule is PipelineSchedule.INTERLEAVED else schedule,
        )

    def laid_out(self, layout: Layout, stage_layers: tuple[int, ...]) -> Plan:
        """The plan with a layout in place of its own; `stage_layers` counts only where there are stages."""
        return replace(
            self,
            data=layout.data,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            micro_batch=layout.micro_batch,
            sharding=layout.sharding.value,
            recompute=layout.recompute.value,
            schedule=pipeline_schedule(layout).value,
            interleave=layout.interleave,
            stage_layers=stage_layers if layout.pipeline > 1 else (),
        )


def make_plan(given: PlanInput) -> Plan | Refusal:
    """The best plan, or why there is none. Checks run in this order; the first that fails is the answer."""
    refusal = refused(given)
    if refusal is not None:
        return refusal
    try:
        space = operator_space(given)
        if space is None:
            return _fewest_nodes(given)
        ranking = ThreeDParallelCostAnalyzer().search(space.work, space.offers, space.bounds, space.objective)
    except PlanError as error:
        return Refusal(error.reason, str(error))
    except AnalysisError as error:
        return Refusal("NoPlan", f"spec.{error}")
    if not len(ranking.columns):
        reason, message = report.nothing_fits(ranking)
        return Refusal(reason, message or report.no_memory(space, ranking))
    return _best(given, space, ranking)


def planning_key(spec: JobSpec) -> str:
    """Changes when a manifest asks for something else than the plan was made for."""
    asked = {"model", "trainer", "batch", "parallelism", "nodes", "objective", "deadline_seconds", "budget", "template"}
    parts = spec.model_dump(mode="json", include=asked, exclude_defaults=True)
    if spec.budget is not None:
        # what may be spent stops a run, it does not choose its plan
        parts["budget"] = spec.budget.max_hourly_usd
    if spec.checkpoint.redundancy is not CheckpointRedundancy.NONE:
        # it takes memory, on CPUs the ranks' own
        parts["redundancy"] = spec.checkpoint.redundancy.value
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def repriced(plan: Plan, given: PlanInput) -> Plan:
    """A plan in force at today's prices."""
    hourly = _hourly_usd(given, plan.instance_types, plan.nodes, spot=plan.spot)
    return plan if hourly == plan.hourly_usd else replace(plan, hourly_usd=hourly)


def operator_space(given: PlanInput) -> Space | None:
    """What a search for a running job needs; None where the model or the hardware is not known.

    Prices may be missing, and the budget bounds what is spent and not what is planned: a prediction is no reason to refuse a run
    that stops by itself.
    """
    spec = given.spec
    if spec.nodes.capacity_type is CapacityType.ANY:
        # whichever node comes, what is promised is the dearer price
        nodes = spec.nodes.model_copy(update={"capacity_type": CapacityType.ON_DEMAND})
        spec = spec.model_copy(update={"nodes": nodes})
    resources = resources_of(spec, given.default_resources)
    if spec.model is None or (gpus_of_pod(resources) and not spec.nodes.instance_types):
        return None
    abilities = abilities_of(spec)
    try:
        space = space_of(spec, given.prices, given.default_resources, abilities)
    except PlanError as error:
        if error.reason not in ("InstanceTypesMissing", "PriceUnknown", "HardwareUnknown"):
            raise
        offers = _unpriced_offers(spec, resources)
        if offers is None:
            return None
        # a fixed dollar a node-hour stands in; it must not be bounded like a price
        free = spec.model_copy(update={"budget": None})
        space = space_of(free, given.prices, given.default_resources, abilities, offers=offers)
    return replace(space, bounds=replace(space.bounds, budget_usd=None))


def _unpriced_offers(spec: JobSpec, resources: Mapping[str, Mapping[str, str]]) -> tuple[Offer, ...] | None:
    """Offers of the allowed types at a price that stands in, or of a node of any type for a CPU job; None if not known."""
    names: tuple[str | None, ...] = spec.nodes.instance_types or (None,)
    try:
        nodes = [(name, machine_of(spec, name, resources)) for name in names]
    except HardwareError:
        return None
    return tuple(Offer(name or "any node", node, NODE_HOUR_USD, precision_of(spec, node)) for name, node in nodes)


def _best(given: PlanInput, space: Space, ranking: Ranking) -> Plan:
    best, *others = report.ranked(ranking, 1 + ALTERNATIVES)
    layout, priced = best.layout, bool(space.prices)
    types = given.spec.nodes.instance_types
    name = best.offer.removesuffix(" spot")
    memory = best.prediction.memory_gib
    plan = Plan(
        data=layout.data,
        nodes=best.nodes,
        ranks_per_node=layout.ranks // best.nodes,
        micro_batch=layout.micro_batch,
        precision=layout.precision.value,
        bucket_mib=bucket_mib(space.work.shape, ranking.offer(best.row).machine, layout, ranking.parameters),
        instance_types=(name,) if name in types else types,
        spot=best.offer != name,
        memory_gib=round(memory, 3),
        hourly_usd=best.hourly_usd if priced else _hourly_usd(given, types, best.nodes, spot=False),
        explanation=_explanation(given, space, best),
        predicted=Predicted(
            best.prediction.step_seconds, best.efficiency, best.hours, round(best.usd, 4) if priced else None
        ),
        alternatives=tuple(
            Alternative(o.degrees, o.nodes, o.offer, o.hours, round(o.usd, 4) if priced else None, o.why_not)
            for o in others
        ),
    )
    return plan.laid_out(layout, best.stage_layers)


def plan_of(current: Plan, ranking: Ranking, row: int) -> Plan:
    """A row of a ranking as a plan for the job that runs by `current`, on the same kind of nodes where that is what the row is of."""
    layout, columns, offer = ranking.layout(row), ranking.columns, ranking.offer(row)
    nodes = int(columns.nodes[row])
    hourly = None if current.hourly_usd is None else current.hourly_usd / current.nodes * nodes
    if is_other_kind(current, offer):
        hourly = offer.hourly_usd * nodes
        ranks = layout.ranks // nodes
        current = replace(current, instance_types=(type_of(offer),), spot=offer.spot, ranks_per_node=ranks)
    return replace(
        current.laid_out(layout, ranking.stage_layers(row)),
        nodes=nodes,
        bucket_mib=bucket_mib(ranking.work.shape, offer.machine, layout, ranking.parameters),
        memory_gib=round(float(columns.memory_gib[row]), 3),
        hourly_usd=hourly,
        predicted=Predicted(
            step_seconds=float(columns.step_seconds[row]),
            efficiency=float(columns.productive_seconds[row] / columns.step_seconds[row]),
            hours=float(columns.hours[row]),
            total_usd=None,
        ),
        alternatives=(),
    )


def is_other_kind(plan: Plan, offer: Offer) -> bool:
    """Whether an offer is of nodes that the plan's pods may not run on."""
    return bool(plan.instance_types) and type_of(offer) not in plan.instance_types


def type_of(offer: Offer) -> str:
    """The instance type of an offer, whose name also says whether it is spot."""
    return offer.name.removesuffix(" spot")


def adjusting_space(given: PlanInput) -> Space | None:
    """What a running job may become: within the manifest's nodes and allowed degrees; the degrees written down are where it starts."""
    spec = given.spec
    if spec.parallelism is not None:
        start = spec.parallelism.model_copy(update={"data": None, "tensor": None, "pipeline": None})
        spec = spec.model_copy(update={"parallelism": start})
    try:
        return operator_space(replace(given, spec=spec))
    except PlanError:
        return None


def _explanation(given: PlanInput, space: Space, best: report.RankedPlan) -> str:
    spec, layout = given.spec, best.layout
    what = "dollars" if space.objective.value == "Cost" else "time"
    least = f"least predicted {what if space.prices else 'node-hours' if what == 'dollars' else what}"
    usable = usable_gib(next(o for o in space.offers if o.name == best.offer).machine)
    bound = f" of {usable:.2f}" if usable < FREE_CPU_MEMORY_GIB / 2 else ""
    dollars = f" for ${best.usd:,.2f}" if space.prices else ""
    budget = spec.budget.total_usd if spec.budget is not None else None
    parts = [
        f"{best.nodes} {'node' if best.nodes == 1 else 'nodes'} of {best.offer} as {best.degrees}: {least} of those from "
        f"{spec.nodes.min} to {spec.nodes.max} nodes that divide the batch and fit memory",
        f"each step is {layout.data} replicas x {layout.micro_batches} micro-batches of {layout.micro_batch}, "
        f"{best.prediction.step_seconds:,.3g} s predicted, {best.hours:,.2f} h{dollars} in all",
        f"{best.prediction.memory_gib:.2f}{bound} GiB a rank",
    ]
    if budget is not None and space.prices and best.usd > budget:
        parts.append(f"that is more than spec.budget.totalUSD (${budget:,.2f}), at which the run will stop")
    return "; ".join(parts) + "."


def _fewest_nodes(given: PlanInput) -> Plan | Refusal:
    """Without a model or hardware to predict from: the fewest nodes, and the largest micro-batch up to 64 that divides."""
    spec = given.spec
    nodes = node_counts(given)[0]
    ranks = ranks_per_node_of(spec, given.default_resources)
    degrees = spec.parallelism
    tensor, pipeline = (degrees.tensor or 1, degrees.pipeline or 1) if degrees is not None else (1, 1)
    data = nodes * ranks // (tensor * pipeline)
    share = spec.batch.global_ // data
    micro = spec.batch.micro or max(d for d in range(1, min(share, 64) + 1) if share % d == 0)
    spot = spec.nodes.capacity_type is CapacityType.SPOT
    unknown = "spec.model is not given" if spec.model is None else "spec.nodes.instanceTypes names no GPU type"
    return Plan(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        nodes=nodes,
        ranks_per_node=ranks,
        micro_batch=micro,
        memory_gib=None,
        hourly_usd=_hourly_usd(given, spec.nodes.instance_types, nodes, spot=spot),
        instance_types=spec.nodes.instance_types,
        spot=spot,
        explanation=(
            f"{nodes} {'node' if nodes == 1 else 'nodes'}, the fewest from {spec.nodes.min} to {spec.nodes.max} that divide the "
            f"batch: more would add communication, not save dollars; nothing is predicted, as {unknown}; each step is "
            f"{data} replicas x {share // micro} micro-batches of {micro}."
        ),
    )


def _hourly_usd(given: PlanInput, instance_types: tuple[str, ...], nodes: int, *, spot: bool) -> float | None:
    """Before pods exist, a price is known only where every allowed type's is; the dearest of them is the promise."""
    prices = [given.prices.price(name, spot=spot) for name in instance_types]
    known = [p.hourly_usd for p in prices if p is not None]
    return max(known) * nodes if known and len(known) == len(prices) else None
