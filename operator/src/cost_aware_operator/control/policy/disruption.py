"""Nodes that are about to end: which pods to move off them, before they are killed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.adjusting.changes import under_way
from cost_aware_operator.control.policy.stragglers import spare_nodes
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.workload.views import NodeView, PodView

ENDING_TAINTS = (
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
    "node.cloudprovider.kubernetes.io/shutdown",
)
"""Put on a node that will be gone in seconds to minutes, by whoever takes it away."""
ENDING_CONDITIONS = ("PreemptScheduled", "TerminateScheduled", "RedeployScheduled", "RebootScheduled")
"""Conditions of such nodes on AKS, set by its node problem detector."""


@dataclass(frozen=True)
class Disruption:
    """A pod on a node that ends."""

    pod: PodView
    """The pod."""
    evict: bool
    """Whether it is moved; False where it stays."""
    reason: str
    """One CamelCase word."""
    message: str
    """What happens, and why."""


def notice_of(node: NodeView) -> str:
    """What says that a node ends; empty while nothing does. A cordon alone is none: the node may live on."""
    for taint in node.taints:
        if taint.key in ENDING_TAINTS:
            return f"taint {taint.key}"
    return next((f"condition {name}" for name in node.conditions if name in ENDING_CONDITIONS), "")


def disruptions(facts: Facts, record: RunRecord, plan: Plan) -> tuple[Disruption, ...]:
    """The pods on nodes that end, each told once for a node: a pod that comes back to it stays there.

    A pod is moved off a cordoned node only where another node could take it: without one the run would stop for nothing.
    """
    if under_way(record.changes) is not None:
        return ()
    found = []
    for pod in facts.pods:
        node = facts.nodes.get(pod.node or "")
        if node is None or not pod.usable or record.drained.get(node.name, pod.uid) != pod.uid:
            continue
        notice = notice_of(node)
        if not notice and not node.is_cordoned:
            continue
        where = f"node {node.name} under pod {pod.name} "
        if notice:
            text = f"{where}is about to end ({notice}): the ranks save, and the pod is made anew elsewhere"
            found.append(Disruption(pod, evict=True, reason="NodeEnding", message=text))
        elif spare_nodes(facts, plan):
            text = f"{where}is cordoned: the ranks save, and the pod is made anew elsewhere"
            found.append(Disruption(pod, evict=True, reason="NodeCordoned", message=text))
        else:
            text = f"{where}is cordoned, and no other node could take the pod: it stays as long as the node does"
            found.append(Disruption(pod, evict=False, reason="NodeCordoned", message=text))
    return tuple(found)
