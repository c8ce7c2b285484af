"""Stragglers in a reconcile: which ranks, in which pods, on which nodes, and where else those could run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_aware_operator.adjusting.situation import SlowNode
from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.costs.models.model_parallel import head_in_layers
from cost_aware_operator.costs.models.stages import interleaved, stage_work
from cost_aware_operator.observing.samples import Scrape, observe
from cost_aware_operator.observing.stragglers import SlowRank, stragglers
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.planning.space import resources_of
from cost_aware_operator.workload.placement import could_take
from cost_aware_operator.workload.views import PodView


def stragglers_under(spec: JobSpec, plan: Plan, scrapes: Sequence[Scrape]) -> tuple[SlowRank, ...]:
    """The stragglers of a run under a plan."""
    works: list[tuple[float, ...]] = []
    if spec.model is not None:
        shape = shape_of(spec.model)
        chunked = plan.interleave > 1
        layers = interleaved(shape.layers, plan.pipeline, plan.interleave) if chunked else plan.stage_layers
        # in a small model what surrounds the products takes the time, and the head costs next to nothing
        works = [stage_work(layers, head) for head in (head_in_layers(shape), 0.0)]
    return stragglers(scrapes, plan.data * plan.tensor, works)


def slow_ranks(facts: Facts, plan: Plan) -> tuple[tuple[SlowRank, PodView | None], ...]:
    """The newest attempt's stragglers with their pods, the slowest first."""
    seen = observe(facts.scrapes)
    if seen is None or seen.attempt != facts.record.attempt:
        return ()
    pods = {p.uid: p for p in facts.pods}
    by_index = {index: pods.get(uid) for index, uid in facts.record.members.items()}
    found = sorted(stragglers_under(facts.job.spec, plan, facts.scrapes), key=lambda s: -s.slowdown)
    return tuple((slow, by_index.get(slow.rank // plan.ranks_per_node)) for slow in found)


def slow_node_of(facts: Facts, plan: Plan) -> SlowNode | None:
    """The node of the slowest straggler, with all the stragglers there."""
    slow = [(s, p) for s, p in slow_ranks(facts, plan) if p is not None and p.node is not None]
    seen = observe(facts.scrapes)
    if not slow or seen is None:
        return None
    worst, pod = slow[0]
    here = [(s, p) for s, p in slow if p.node == pod.node]
    indices = {i for i, uid in facts.record.members.items() if uid in {p.uid for _, p in here}}
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
    """Nodes that could take a pod and have none of this job; None where nodes are not known."""
    if facts.cluster_nodes is None:
        return None
    resources = resources_of(facts.job.spec, facts.defaults.resources)
    used = {p.node for p in facts.pods if p.ended_at is None}
    return sum(name not in used for name in could_take(facts.cluster_nodes, facts.job, plan, resources))


def free_nodes(facts: Facts, plan: Plan) -> dict[str, int]:
    """The same of other allowed instance types, by type."""
    others = [kind for kind in facts.job.spec.nodes.instance_types if kind not in plan.instance_types]
    if not plan.instance_types:
        return {}
    return {kind: spare_nodes(facts, replace(plan, instance_types=(kind,))) or 0 for kind in others}
