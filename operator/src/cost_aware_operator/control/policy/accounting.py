"""From the facts of a reconcile to the ledger's terms. Pure."""

from __future__ import annotations

from cost_aware_operator.api.spec import CapacityType
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.costs.search.combinations import HOURS_A_MONTH, Work
from cost_aware_operator.costs.tables.prices import Price
from cost_aware_operator.ledger.ledger import Cause, Fees, LedgerState, PodFacts, TrainedSteps, accrue
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.planning.space import fees_of
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import AgentPhase, Phase


def price_of(facts: Facts, pod: PodView) -> Price | None:
    """The price of the node under a pod, by the node's labels.

    Where the node cannot be read, a manifest that allows one instance type says what it is.
    """
    node = facts.nodes.get(pod.node or "")
    if node is None:
        nodes = facts.job.spec.nodes
        only = nodes.instance_types[0] if len(nodes.instance_types) == 1 else None
        return facts.prices.price(only, spot=nodes.capacity_type is CapacityType.SPOT)
    return facts.prices.price(node.instance_type, spot=node.spot, zone=node.zone)


def booked(facts: Facts) -> LedgerState:
    """The ledger with every pod accounted to now or to its end."""
    pods = [_pod_facts(facts, pod) for pod in (*facts.pods, *facts.departed) if pod.started_at is not None]
    return accrue(facts.record.ledger, pods, progress_of(facts), facts.now, fees_now(facts), facts.told_ends)


def fees_now(facts: Facts) -> Fees:
    """What is paid an hour beside the nodes: the kept checkpoints of a known model, and the control plane; 0 where no table has it."""
    spec, node = facts.job.spec, next((facts.nodes.get(p.node or "") for p in facts.pods), None)
    types = spec.nodes.instance_types
    kind = node.instance_type if node is not None else types[0] if len(types) == 1 else None
    if kind is None:
        return Fees()
    management, gib_month = fees_of(facts.prices, kind, [])
    if spec.model is None:
        return Fees(0.0, management)
    stored = Work(shape_of(spec.model), spec.batch.global_, 1, spec.checkpoint.keep)
    return Fees(stored.checkpoints * stored.state_gib * gib_month / HOURS_A_MONTH, management)


def current_samples(facts: Facts) -> list[RankSample]:
    """What the ranks of the newest attempt said."""
    return [s for samples in facts.samples.values() for s in samples if s.attempt == facts.record.attempt]


def progress_of(facts: Facts) -> TrainedSteps:
    """The newest attempt's steps, once its ranks have resumed."""
    samples = [s for s in current_samples(facts) if s.resumed_step is not None]
    if not samples:
        return TrainedSteps()
    return TrainedSteps(
        attempt=facts.record.attempt,
        step=max(s.step for s in samples),
        resumed_step=min(s.resumed_step or 0 for s in samples),
    )


def _pod_facts(facts: Facts, pod: PodView) -> PodFacts:
    assert pod.started_at is not None  # noqa: S101  the caller filters
    node = facts.nodes.get(pod.node or "")
    samples = facts.samples.get(pod.uid, ())
    phases = None
    if samples:
        phases = {phase: sum(s.phase_seconds.get(phase, 0.0) for s in samples) / len(samples) for phase in Phase}
    return PodFacts(
        uid=pod.uid,
        index=pod.index,
        started_at=pod.started_at,
        ended_at=pod.ended_at,
        instance_type=node.instance_type if node else None,
        zone=node.zone if node else None,
        price=price_of(facts, pod),
        attempt=max((s.attempt for s in samples), default=0),
        phase_seconds=phases,
        sent_bytes=sum(s.communication_bytes for s in samples),
        otherwise=_otherwise(facts, pod, samples),
    )


def _otherwise(facts: Facts, pod: PodView, samples: tuple[RankSample, ...]) -> Cause:
    """What time is for that no phase explains: getting (back) to work, or nothing."""
    agent = facts.agents.get(pod.uid)
    if facts.record.ended_at is not None or (agent is not None and agent.phase is AgentPhase.COMPLETED):
        return Cause.IDLE
    if facts.record.attempt == 0:
        return Cause.IDLE
    if facts.job.spec.trainer.config is None and agent is not None and agent.phase is AgentPhase.RUNNING:
        # a user's own program tells no phases: while it runs, it is taken to do what it is there for
        return Cause.PRODUCTIVE
    stepping = any(s.attempt == facts.record.attempt and s.steps > 0 for s in samples)
    if stepping and (agent is None or agent.phase is AgentPhase.RUNNING):
        return Cause.IDLE
    return Cause.RESTART


def paid_hourly_usd(facts: Facts) -> float | None:
    """Dollars an hour of the pods that run; None where no price is known, or none runs."""
    prices = [price_of(facts, p) for p in facts.pods if p.started_at is not None and p.ended_at is None]
    known = [p.hourly_usd for p in prices if p is not None]
    return sum(known) if known and len(known) == len(prices) else None


def budget_left_usd(facts: Facts) -> float | None:
    """What may still be spent; None without a budget."""
    budget = facts.job.spec.budget
    if budget is None or budget.total_usd is None:
        return None
    return budget.total_usd - facts.record.ledger.accrued_usd
