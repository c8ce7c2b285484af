"""What follows from one job's facts before anything is decided: each figure is worked out once a reconcile. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.changes import under_way
from cost_aware_operator.adjusting.situation import Window
from cost_aware_operator.api.spec import CapacityType
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.plan_in_force import plan_in_force
from cost_aware_operator.control.reading.stragglers import stragglers_under
from cost_aware_operator.costs.tables.prices import Price
from cost_aware_operator.observing.samples import Observation, RankSample, observe
from cost_aware_operator.observing.stragglers import SlowRank
from cost_aware_operator.planning.plan import Plan, PlanInput, Refusal, adjusting_space
from cost_aware_operator.planning.space import Space
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import Phase

MODELLED = (
    Phase.COMPUTE, Phase.OPTIMIZER, Phase.COMMUNICATION, Phase.TENSOR_COMMUNICATION, Phase.PIPELINE_COMMUNICATION,
    Phase.PIPELINE_BUBBLE, Phase.STRAGGLER_WAIT,
)  # fmt: skip
"""What the cost models predict of a step; checkpoints, evaluation and waiting for data go on under every plan."""


@dataclass(frozen=True)
class Reading:
    """One job's facts and the figures that follow from them. Policies read it and never change it."""

    facts: Facts
    """What was gathered, once."""

    @cached_property
    def given(self) -> PlanInput:
        """What a plan is made from: manifest, prices, and the resources that pods get where the manifest names none."""
        return PlanInput(self.facts.job.spec, self.facts.prices, self.facts.defaults.resources)

    @cached_property
    def answer(self) -> Plan | Refusal:
        """The plan in force, a new one, or why there is none."""
        return plan_in_force(self.facts, self.given)

    @cached_property
    def space(self) -> Space | None:
        """All plans that the manifest allows a running job; None where model or hardware is not known."""
        return adjusting_space(self.given)

    @cached_property
    def samples(self) -> tuple[RankSample, ...]:
        """Samples of the newest attempt's ranks."""
        return self.samples_of(self.facts.record.attempt)

    def samples_of(self, attempt: int) -> tuple[RankSample, ...]:
        """Samples of an attempt's ranks; none of one that has just begun."""
        return tuple(s for samples in self.facts.samples.values() for s in samples if s.attempt == attempt)

    @cached_property
    def observation(self) -> Observation | None:
        """Speed and shares over the scrapes that are kept, of whichever attempt they are."""
        return observe(self.facts.scrapes)

    @cached_property
    def window(self) -> Window | None:
        """What the newest attempt's ranks did over the scrapes that are kept; None while not all of them tell."""
        seen, facts = self.observation, self.facts
        if seen is None or seen.attempt != facts.record.attempt:
            return None
        if seen.steps_per_second <= 0 or not seen.rank_step_seconds:
            return None
        if facts.order is not None and seen.ranks < facts.order.nodes * facts.order.ranks_per_node:
            # what the others say of a run in which one is silent, or lies, is no ground for a decision
            return None
        parts = seen.rank_step_seconds
        modelled = sum(parts.get(phase, 0.0) for phase in MODELLED)
        working = parts.get(Phase.COMPUTE, 0.0) + parts.get(Phase.OPTIMIZER, 0.0)
        if working <= 0:
            return None
        measured = Measured(modelled, working, seen.network_bytes_per_second)
        return Window(seen.seconds, seen.steps, seen.efficiency, 1 / seen.steps_per_second, measured)

    @cached_property
    def stragglers(self) -> tuple[SlowRank, ...]:
        """Ranks of the newest attempt that work longer on the same than their peers, the slowest first."""
        plan, seen, record = self.ran_plan, self.observation, self.facts.record
        if plan is None or seen is None or seen.attempt != record.attempt:
            return ()
        found = stragglers_under(self.facts.job.spec, plan, self.facts.scrapes)
        return tuple(sorted(found, key=lambda one: -one.slowdown))

    @cached_property
    def ran_plan(self) -> Plan | None:
        """The plan that the ranks run by: until a change is carried out, the one before it."""
        last = under_way(self.facts.record.changes)
        if last is not None and self.facts.record.attempt < last.attempt:
            return last.origin
        return self.answer if isinstance(self.answer, Plan) else None

    @cached_property
    def prices(self) -> Mapping[str, Price]:
        """Prices of the nodes under the pods, by pod uid; pods whose node has no known price are left out."""
        pods = (*self.facts.pods, *self.facts.former, *self.facts.departed)
        return {pod.uid: price for pod in pods if (price := _price(self.facts, pod)) is not None}

    @cached_property
    def running(self) -> tuple[PodView, ...]:
        """Pods that run and are paid for."""
        return tuple(p for p in self.facts.pods if p.started_at is not None and p.ended_at is None)

    @cached_property
    def hourly_usd(self) -> float | None:
        """Dollars an hour of the pods that run, 0 where none does; None where one of them has no known price."""
        return self.hourly_usd_of(self.running)

    def hourly_usd_of(self, pods: tuple[PodView, ...]) -> float | None:
        """Dollars an hour of some pods; None where one of them has no known price."""
        known = [self.prices[p.uid].hourly_usd for p in pods if p.uid in self.prices]
        return sum(known) if len(known) == len(pods) else None


def _price(facts: Facts, pod: PodView) -> Price | None:
    """The price of the node under a pod, by the node's labels.

    If the node cannot be read, a manifest that allows one instance type says what it is.
    """
    node = facts.nodes.get(pod.node or "")
    if node is None:
        nodes = facts.job.spec.nodes
        only = nodes.instance_types[0] if len(nodes.instance_types) == 1 else None
        return facts.prices.price(only, spot=nodes.capacity_type is CapacityType.SPOT)
    return facts.prices.price(node.instance_type, spot=node.spot, zone=node.zone)
