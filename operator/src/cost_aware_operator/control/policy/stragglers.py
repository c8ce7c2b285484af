"""Stragglers in a reconcile: in which pods and on which nodes, and where else those could run. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.situation import SlowNode
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.observing.stragglers import SlowRank
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.space import resources_of
from cost_aware_operator.workload.placement import could_take
from cost_aware_operator.workload.views import PodView


def slow_ranks(reading: Reading) -> tuple[tuple[SlowRank, PodView | None], ...]:
    """The newest attempt's stragglers with their pods, the slowest first."""
    facts, plan = reading.facts, reading.ran_plan
    if plan is None:
        return ()
    pods = {p.uid: p for p in facts.pods}
    by_index = {index: pods.get(uid) for index, uid in facts.record.members.items()}
    return tuple((slow, by_index.get(slow.rank // plan.ranks_per_node)) for slow in reading.stragglers)


def slow_node_of(reading: Reading, plan: Plan) -> SlowNode | None:
    """The node of the slowest straggler, with all the stragglers there."""
    slow = [(s, p) for s, p in slow_ranks(reading) if p is not None and p.node is not None]
    seen = reading.observation
    if not slow or seen is None:
        return None
    worst, pod = slow[0]
    here = [(s, p) for s, p in slow if p.node == pod.node]
    uids = {p.uid for _, p in here}
    indices = {i for i, uid in reading.facts.record.members.items() if uid in uids}
    elsewhere = [w for rank, w in seen.working_seconds.items() if rank // plan.ranks_per_node not in indices]
    return SlowNode(
        name=pod.node or "",
        pods=tuple(sorted({p.name for _, p in here})),
        ranks=tuple(sorted(s.rank for s, _ in here)),
        working_seconds=worst.working_seconds,
        peers_seconds=worst.peers_seconds,
        rest_seconds=max(elsewhere, default=worst.peers_seconds),
    )


def spare_nodes(facts: Facts, plan: Plan) -> int | None:
    """Nodes that could take a pod and have none of this job; None if nodes are not known."""
    if facts.cluster_nodes is None:
        return None
    resources = resources_of(facts.job.spec, facts.defaults.resources)
    used = {p.node for p in facts.pods if p.ended_at is None}
    return sum(name not in used for name in could_take(facts.cluster_nodes, facts.job, plan, resources))


def free_nodes(facts: Facts, plan: Plan) -> dict[str, int]:
    """Spare nodes of the other allowed instance types, by type."""
    others = [kind for kind in facts.job.spec.nodes.instance_types if kind not in plan.instance_types]
    if not plan.instance_types:
        return {}
    return {kind: spare_nodes(facts, replace(plan, instance_types=(kind,))) or 0 for kind in others}
