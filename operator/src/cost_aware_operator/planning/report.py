"""A ranking in words: do you need more than one node, why not the runners-up, what was ruled out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_aware_operator.api.spec import Objective
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.communication import Fabric
from cost_aware_operator.costs.models.layout import Layout, pipeline_schedule
from cost_aware_operator.costs.models.machines import usable_gib
from cost_aware_operator.costs.models.memory import MemoryGib
from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.models.predict import Prediction, memory_of_ranks, predict
from cost_aware_operator.costs.search.structure import CostStructure, Terms, structure
from cost_aware_operator.costs.search.three_d import Need, Ranking, Shortfall, ThreeDParallelCostAnalyzer, checkpointing
from cost_aware_operator.planning.space import Space

PARTS = {
    "compute": "computing",
    "tensor_communication": "tensor-parallel communication",
    "pipeline_communication": "sends between stages",
    "data_communication": "gradients and gathered weights",
    "context_communication": "context-parallel communication",
    "bubble": "pipeline bubble",
    "optimizer": "the optimizer",
    "other": "stragglers and fixed costs",
}
MODEL_ERROR = 0.08
"""Median error of predicted steps on measured ones, rounded up (docs/design/20261121-cost-models.md)."""


@dataclass(frozen=True)
class RankedPlan:
    """One row of a ranking in full."""

    rank: int
    """Place in the list, from 1."""
    row: int
    """Row in the ranking's columns."""
    offer: str
    """Name of the offer."""
    nodes: int
    """Nodes of the run."""
    layout: Layout
    """How the model is laid out."""
    prediction: Prediction
    """Predicted step and memory."""
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage."""
    hourly_usd: float
    """Dollars an hour of all nodes together."""
    hours: float
    """Hours of the whole run."""
    usd: float
    """Dollars of the whole run."""
    goodput: float
    """Productive share of time under failures and checkpoints, 0 to 1."""
    efficiency: float
    """Share of a step that computes or updates weights, 0 to 1."""
    bubble_share: float
    """Share of a step that the pipeline's bubble takes, 0 to 1."""
    communication_share: float
    """Share of a step of communication that computation does not hide, 0 to 1."""
    cost: CostStructure
    """Dollars by block."""
    fabric: Fabric
    """Links under the job."""
    why_not: str = ""
    """Why it is not the best; empty for the best."""

    @property
    def degrees(self) -> str:
        """Data x tensor x pipeline."""
        return f"{self.layout.data}x{self.layout.tensor}x{self.layout.pipeline}"

    @property
    def placement(self) -> dict[str, str]:
        """The slowest link that each degree above 1 crosses, with ranks numbered tensor first, then data, then pipeline."""
        layout = self.layout
        strides = {"tensor": 1, "data": layout.tensor, "pipeline": layout.tensor * layout.data}
        groups = {axis: (getattr(layout, axis), stride) for axis, stride in strides.items()}
        return {a: self.fabric.group(size, stride).level.value for a, (size, stride) in groups.items() if size > 1}

    @property
    def schedule(self) -> str:
        """The pipeline's schedule; `-` without a pipeline."""
        if self.layout.pipeline == 1:
            return "-"
        schedule = pipeline_schedule(self.layout)
        return f"{schedule} x{self.layout.interleave}" if schedule is PipelineSchedule.INTERLEAVED else schedule.value


def ranked(ranking: Ranking, most: int) -> list[RankedPlan]:
    """The best plans of different degrees, best first, each with why it is not the first."""
    found: list[RankedPlan] = []
    for rank, row in enumerate(ranking.best_of_each_degrees(most), start=1):
        one = _full(ranking, row, rank)
        found.append(replace(one, why_not=why_not(found[0], one, ranking.objective)) if found else one)
    return found


def _full(ranking: Ranking, row: int, rank: int) -> RankedPlan:
    columns, offer, layout, work = ranking.columns, ranking.offer(row), ranking.layout(row), ranking.work
    prediction = predict(work.shape, offer.machine, layout, ranking.parameters, bundled=work.bundled)
    nodes, step_seconds = int(columns.nodes[row]), float(columns.step_seconds[row])
    stall_seconds, interval_seconds = checkpointing(work, offer, nodes)
    goodput = float(columns.goodput[row])
    terms = Terms(
        checkpoint_seconds=stall_seconds,
        checkpoint_interval_seconds=interval_seconds,
        # structure() books checkpoints itself
        goodput=min(1.0, goodput * (1 + stall_seconds / interval_seconds)),
        stored_gib=work.checkpoints * work.state_gib,
        storage_usd_per_gib_month=offer.storage_usd_per_gib_month,
        management_hourly_usd=offer.management_hourly_usd,
    )
    cost = structure(prediction, layout, offer.machine.gpus_per_node, work.steps, offer.node_hourly_usd, terms)
    return RankedPlan(
        rank=rank,
        row=row,
        offer=offer.name,
        nodes=nodes,
        layout=layout,
        prediction=prediction,
        stage_layers=ranking.stage_layers(row),
        hourly_usd=nodes * offer.node_hourly_usd,
        hours=float(columns.hours[row]),
        usd=float(columns.usd[row]),
        goodput=goodput,
        efficiency=float(columns.productive_seconds[row]) / step_seconds,
        bubble_share=float(columns.bubble_seconds[row]) / step_seconds,
        communication_share=float(columns.communication_seconds[row]) / step_seconds,
        cost=cost,
        fabric=offer.machine.fabric(ranking.parameters),
    )


def why_not(best: RankedPlan, other: RankedPlan, objective: Objective) -> str:
    """Reason why a runner-up is worse, and by how much, in dollars or hours as the objective counts."""
    in_dollars = objective is Objective.COST
    ours, theirs = (best.usd, other.usd) if in_dollars else (best.hours, other.hours)
    unit = "${:,.2f}".format if in_dollars else "{:,.2f} h".format
    more = theirs - ours
    reasons = _grown(best, other, ours, theirs)
    if abs(more) <= 0.0005 * ours:
        text = "as good; " + (f"uses {other.nodes} nodes" if other.nodes != best.nodes else "uses more memory or nodes")
        return text if not reasons else f"as good within rounding; more {reasons[0][0]}"
    text = f"{unit(more)} more ({more / ours:+.1%})"
    if reasons:
        text += ": " + ", ".join(f"{unit(value)} more for {name}" for name, value in reasons[:2])
    if more < MODEL_ERROR * ours:
        text += "; within the model's error"
    return text


def _grown(best: RankedPlan, other: RankedPlan, ours: float, theirs: float) -> list[tuple[str, float]]:
    """Parts of the step that take more of the objective in the runner-up, largest first."""
    found = []
    for part, name in PARTS.items():
        mine = getattr(best.prediction.breakdown, part) / best.prediction.step_seconds * ours
        its = getattr(other.prediction.breakdown, part) / other.prediction.step_seconds * theirs
        if its - mine > 0.001 * ours:
            found.append((name, its - mine))
    return sorted(found, key=lambda item: -item[1])


def ruled_out(ranking: Ranking) -> list[str]:
    """Why combinations are not in the ranking: a line for each need."""
    return [_said(s) for s in ranking.shortfalls]


def _said(lack: Shortfall) -> str:
    count = f"{lack.combinations:,} combinations"
    if lack.need is Need.MEMORY:
        at = lack.nearest_layout
        layout = (
            f" (data {at.data}, tensor {at.tensor}, pipeline {at.pipeline}, {at.sharding})" if at is not None else ""
        )
        return (
            f"{count} need more memory than a rank has: the nearest {lack.nearest:.1f} of {lack.limit:.1f} GiB{layout}"
        )
    if lack.need is Need.DEADLINE:
        return f"{count} miss the deadline of {lack.limit:,.2f} h: the nearest takes {lack.nearest:,.2f} h"
    field = "budget.maxHourlyUSD" if lack.need is Need.HOURLY else "budget.totalUSD"
    per = " an hour" if lack.need is Need.HOURLY else ""
    return f"{count} exceed {field} of ${lack.limit:,.2f}: the nearest costs ${lack.nearest:,.2f}{per}"


def nothing_fits(ranking: Ranking) -> tuple[str, str]:
    """Reason of the condition and message for a ranking without plans; the message says what to write instead."""
    lacks = {s.need: s for s in ranking.shortfalls}
    for need, reason, field, form in (
        (Need.BUDGET, "BudgetTooSmall", "spec.budget.totalUSD", "{:.2f}"),
        (Need.DEADLINE, "DeadlineImpossible", "spec.deadlineSeconds", "{:.0f}"),
        (Need.HOURLY, "HourlyBudgetTooSmall", "spec.budget.maxHourlyUSD", "{:.2f}"),
    ):
        lack = lacks.get(need)
        if lack is None:
            continue
        scale = 3600 if need is Need.DEADLINE else 1.0
        # rounded up, so that what is written does
        smallest = form.format(lack.nearest * scale * 1.0001 + (1 if need is Need.DEADLINE else 0.01))
        left = "; ".join(_said(s) for s in ranking.shortfalls)
        return (
            reason,
            f"{field}: no plan is within {form.format(lack.limit * scale)}: write {smallest} or more ({left})",
        )
    return "MemoryExceeded", ""


def no_memory(space: Space, ranking: Ranking) -> str:
    """Message for plans of which none fits in memory: the need, the limit and what to write."""
    lack = next(s for s in ranking.shortfalls if s.need is Need.MEMORY)
    layout, shape = lack.nearest_layout, space.work.shape
    if layout is None:
        raise AssertionError("memory's shortfall names its layout")
    offer = min(space.offers, key=lambda o: abs(usable_gib(o.machine) - lack.limit))
    need = memory_of_ranks(shape, offer.machine, layout, bundled=space.work.bundled).told()
    parts = ", ".join(f"{name} {getattr(need, name):.2f}" for name in MemoryGib.__dataclass_fields__)
    if offer.machine.accelerator.name == "CPU":
        ranks = offer.machine.gpus_per_node
        limited_by = "spec.template.resources.limits.memory"
        raised = f"raise the limit to {int(lack.nearest * ranks * 1024) + 1}Mi, allow more nodes"
    else:
        limited_by, raised = f"a GPU of {offer.name}", "allow larger GPUs or more nodes"
    return (
        f"spec.model: {shape.parameters / 1e6:,.1f} M parameters need at least {lack.nearest:.2f} GiB a rank ({parts}; data "
        f"{layout.data}, tensor {layout.tensor}, pipeline {layout.pipeline}, micro-batch {layout.micro_batch}), but "
        f"{limited_by} gives {lack.limit:.2f}: {raised}, or write a smaller model, sequenceLength or batch.micro"
    )


def needs_more_than_one_node(space: Space, ranking: Ranking) -> str:
    """Answer to the first question: would one node do?"""
    if not len(ranking.columns):
        return ""
    best = _full(ranking, 0, 1)
    alone = _search(space, ranking, 1, 1)
    verdict = f"{best.nodes} nodes of {best.offer} take {_hours(best.hours)} for ${best.usd:,.2f}"
    if alone is None or not len(alone.columns):
        return f"Yes. One node cannot do it: {_obstacle(alone)}. {verdict[0].upper()}{verdict[1:]}."
    single = _full(alone, 0, 1)
    said = f"One node of {single.offer} takes {_hours(single.hours)} for ${single.usd:,.2f}"
    if best.nodes == 1:
        more = _search(space, ranking, 2, max(2, space.bounds.nodes_max))
        if more is None or not len(more.columns):
            return f"No. {said}."
        other = _full(more, 0, 1)
        return (
            f"No. {said}; the best on more nodes, {other.nodes} of {other.offer}, takes {_hours(other.hours)} for "
            f"${other.usd:,.2f} ({other.usd / single.usd - 1:+.1%})."
        )
    if space.bounds.nodes_min > 1 and single.usd <= best.usd:
        return f"No, but spec.nodes.min asks for {space.bounds.nodes_min}. {said}; {verdict} ({best.usd / single.usd - 1:+.1%})."
    saved = "sooner" if ranking.objective is Objective.TIME else "for less"
    return f"Not to train it, but more do it {saved}. {said}; {verdict} ({best.usd / single.usd - 1:+.1%} dollars)."


def _search(space: Space, ranking: Ranking, nodes_min: int, nodes_max: int) -> Ranking | None:
    bounds = replace(space.bounds, nodes_min=nodes_min, nodes_max=nodes_max)
    try:
        return ThreeDParallelCostAnalyzer().search(
            space.work, space.offers, bounds, ranking.objective, ranking.parameters
        )
    except AnalysisError:
        return None


def _obstacle(alone: Ranking | None) -> str:
    if alone is None or not alone.shortfalls:
        return "its ranks give no degrees that divide the model and the batch"
    return _said(alone.shortfalls[-1])


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:,.1f} min"
