"""What has been changed in a run, what was promised of it, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from cost_aware_operator.planning.plan import Plan

KEPT = 20
"""Changes that are remembered; older ones drop out."""


class Kind(StrEnum):
    """How a change is made."""

    REBALANCE = "Rebalance"
    """Other degrees on the same pods."""
    RESIZE = "Resize"
    """Another number of pods."""
    MOVE = "Move"
    """All pods made anew: none of them on a node that was slow, or all on nodes of another type."""
    SHRINK = "Shrink"
    """Fewer pods, as nodes are gone and others do not come."""


class ChangeOutcome(StrEnum):
    """What came of a change."""

    IN_PROGRESS = "InProgress"
    """Ordered, and not one step done under it."""
    CHECKING = "Checking"
    """Steps are done; whether it keeps its promise is being measured."""
    KEPT = "Kept"
    """It is no worse than what it replaced, or the run was complete before it could be."""
    ROLLED_BACK = "RolledBack"
    """It was worse than what it replaced."""
    FAILED = "Failed"
    """It did not start, and the run went on under the old plan."""
    SUPERSEDED = "Superseded"
    """Another change came before it could be judged."""


@dataclass(frozen=True)
class Change:
    """One change of plan: what was measured before it, what was promised, and what came of it."""

    at: datetime
    """When it was decided."""
    attempt: int
    """The attempt that carries it out."""
    kind: Kind
    """How it is made."""
    origin: Plan
    """The plan before it."""
    target: Plan
    """The plan that it leads to."""
    reason: str
    """Why, with the figures."""
    before_step_usd: float
    """Dollars of a step before it, as measured."""
    predicted_step_usd: float
    """Dollars of a step after it, as promised."""
    predicted_savings_usd: float
    """Dollars promised over the steps that were left, the cost of the change taken off."""
    remaining_steps: int
    """Steps that were left."""
    is_rollback: bool = False
    """Whether it undoes the change before it."""
    before_node_usd: float | None = None
    """Dollars an hour of one node when it was decided: what a price does since is not the plan's doing."""
    resumed_at: datetime | None = None
    """When the first step under it was seen."""
    realised_step_usd: float | None = None
    """Dollars of a step after it, as measured; None until a window is."""
    realised_savings_usd: float | None = None
    """Dollars saved over the steps that were left, as measured; None until a window is."""
    downtime_seconds: float | None = None
    """Seconds from the decision to the first step under it."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """What the ranks say of it, by `Stage`; empty where they do not tell."""
    outcome: ChangeOutcome = ChangeOutcome.IN_PROGRESS
    """What came of it."""

    def before_at(self, node_usd: float) -> float:
        """Dollars of a step before the change, at another price of a node; of another type's the present price says nothing."""
        if self.origin.instance_types != self.target.instance_types:
            return self.before_step_usd
        return self.before_step_usd * (node_usd / self.before_node_usd if self.before_node_usd else 1.0)

    @property
    def is_open(self) -> bool:
        """Whether it is not yet known what came of it."""
        return self.outcome in (ChangeOutcome.IN_PROGRESS, ChangeOutcome.CHECKING)


def under_way(changes: Sequence[Change]) -> Change | None:
    """The newest change, while it is ordered and no step is done under it; else None."""
    last = changes[-1] if changes else None
    return last if last is not None and last.outcome is ChangeOutcome.IN_PROGRESS else None


def plan_key(plan: Plan) -> str:
    """Key that identifies a plan within a job; barred plans are remembered by it."""
    parts = (
        plan.nodes, plan.data, plan.tensor, plan.pipeline, plan.micro_batch, plan.sharding, plan.recompute, plan.schedule,
        plan.interleave, "+".join(plan.instance_types),
    )  # fmt: skip
    return "/".join(map(str, parts))


def described(plan: Plan) -> str:
    """A plan in a few words."""
    nodes = f"{plan.nodes} node{'' if plan.nodes == 1 else 's'}"
    without = f", not on {', '.join(plan.excluded_nodes)}" if plan.excluded_nodes else ""
    return f"{plan.data}x{plan.tensor}x{plan.pipeline} on {nodes}, micro-batch {plan.micro_batch}{without}"


def described_from(plan: Plan, origin: Plan) -> str:
    """A plan in a few words, with the type of its nodes if the origin has another."""
    other = plan.instance_types != origin.instance_types
    return described(plan) + (f", of {' or '.join(plan.instance_types)}" if other else "")


def move_key(node: str) -> str:
    """Key of a move off a node; a move that did not work is remembered by it."""
    return f"off {node}"


def kind_of(origin: Plan, target: Plan) -> Kind:
    """Kind of change that leads from one plan to another."""
    if (origin.excluded_nodes, origin.instance_types) != (target.excluded_nodes, target.instance_types):
        return Kind.MOVE
    return Kind.REBALANCE if origin.nodes == target.nodes else Kind.RESIZE
