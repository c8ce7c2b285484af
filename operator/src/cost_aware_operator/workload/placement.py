"""Which nodes could take a pod of a job, as the scheduler would see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.api.spec import CapacityType
from cost_aware_operator.api.units import quantity
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.workload.views import NodeView, Taint

FORBIDDING = ("NoSchedule", "NoExecute")


def could_take(
    nodes: Iterable[NodeView], job: TrainingJob, plan: Plan, resources: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Names of the nodes that are ready, allowed by the manifest and the plan, and large enough for a pod."""
    return tuple(node.name for node in nodes if _may(node, job, plan) and _fits(node, resources))


def _may(node: NodeView, job: TrainingJob, plan: Plan) -> bool:
    template, capacity = job.spec.template, job.spec.nodes.capacity_type
    if not node.ready or node.unschedulable or node.name in plan.excluded_nodes:
        return False
    if plan.instance_types and node.instance_type not in plan.instance_types:
        return False
    if capacity is not CapacityType.ANY and node.spot is not (capacity is CapacityType.SPOT):
        return False
    if any(node.labels.get(name) != value for name, value in template.node_selector.items()):
        return False
    return all(
        t.effect not in FORBIDDING or any(tolerates(own, t) for own in template.tolerations) for t in node.taints
    )


def tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Whether a toleration lets pods onto a node with a taint."""
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.key:
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == taint.value


def _fits(node: NodeView, resources: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a pod fits beside what others take; where that is not known, whether it fits at all."""
    wanted = {**resources.get("limits", {}), **resources.get("requests", {}), "pods": "1"}
    taken = node.taken or {}
    try:
        return all(
            quantity(amount) + taken.get(name, 0.0) <= quantity(node.allocatable[name])
            for name, amount in wanted.items()
            if node.allocatable.get(name) is not None
        ) and all(name in node.allocatable for name in wanted if "/" in name)
    except ValueError:
        return False
