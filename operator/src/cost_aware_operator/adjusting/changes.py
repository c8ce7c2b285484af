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
    """One change of plan. Dollars and seconds are of one step, measured before, promised, and measured after.

    `predicted_savings_usd` is over the steps that were left, the cost of the change taken off; `realised_savings_usd` the same with
    what was measured. `is_rollback` undoes the change before it.
    """

    at: datetime
    attempt: int
    kind: Kind
    origin: Plan
    target: Plan
    reason: str
    before_step_usd: float
    predicted_step_usd: float
    predicted_savings_usd: float
    remaining_steps: int
    is_rollback: bool = False
    before_node_usd: float | None = None
    """Dollars an hour of one node when it was decided: what a price does since is not the plan's doing."""
    resumed_at: datetime | None = None
    realised_step_usd: float | None = None
    realised_savings_usd: float | None = None
    downtime_seconds: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """What the ranks say of it, by `Stage`; empty where they do not tell."""
    outcome: ChangeOutcome = ChangeOutcome.IN_PROGRESS

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
    """What makes one plan of a job another: by this it is barred."""
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
    """The same, with the type of its nodes where that is another than the origin's."""
    other = plan.instance_types != origin.instance_types
    return described(plan) + (f", of {' or '.join(plan.instance_types)}" if other else "")


def move_key(node: str) -> str:
    """By this it is barred to leave a node, where that did not work."""
    return f"off {node}"


def kind_of(origin: Plan, target: Plan) -> Kind:
    """How one gets from a plan to another."""
    if (origin.excluded_nodes, origin.instance_types) != (target.excluded_nodes, target.instance_types):
        return Kind.MOVE
    return Kind.REBALANCE if origin.nodes == target.nodes else Kind.RESIZE
