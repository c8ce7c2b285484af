"""Books of a reconcile: from a reading to the ledger's terms. Pure."""

from __future__ import annotations

from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.costs.search.combinations import HOURS_A_MONTH, Work
from cost_aware_operator.ledger.accounts import LAG_SECONDS
from cost_aware_operator.ledger.ledger import Cause, Fees, LedgerState, PodFacts, TrainedSteps, accrue
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.planning.space import fees_of
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import AgentPhase, Phase


def booked(reading: Reading) -> LedgerState:
    """The ledger with every pod accounted to now or to its end."""
    facts = reading.facts
    pods = [
        one for pod in (*facts.pods, *facts.former, *facts.departed) if (one := _pod_facts(reading, pod)) is not None
    ]
    progress, fees = progress_of(reading), fees_now(facts)
    return accrue(facts.record.ledger, pods, progress, facts.now, fees, facts.told_ends, LAG_SECONDS)


def fees_now(facts: Facts) -> Fees:
    """Dollars an hour beside the nodes: the kept checkpoints of a known model, and the control plane; 0 if no table has it."""
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


def progress_of(reading: Reading) -> TrainedSteps:
    """The newest attempt's steps, once its ranks have resumed."""
    samples = [s for s in reading.samples if s.resumed_step is not None]
    if not samples:
        return TrainedSteps()
    return TrainedSteps(
        attempt=reading.facts.record.attempt,
        step=max(s.step for s in samples),
        resumed_step=min(s.resumed_step or 0 for s in samples),
    )


def _pod_facts(reading: Reading, pod: PodView) -> PodFacts | None:
    """A pod as the ledger sees it; None before it has started."""
    if pod.started_at is None:
        return None
    facts = reading.facts
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
        price=reading.prices.get(pod.uid),
        scheduled_at=pod.scheduled_at or pod.created_at,
        is_end_watched=pod.is_end_watched,
        attempt=max((s.attempt for s in samples), default=0),
        phase_seconds=phases,
        sent_bytes=sum(s.communication_bytes for s in samples),
        otherwise=_otherwise(facts, pod, samples),
    )


def _otherwise(facts: Facts, pod: PodView, samples: tuple[RankSample, ...]) -> Cause:
    """Cause of the time that no phase explains: getting (back) to work, or nothing."""
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


def budget_left_usd(reading: Reading, record: RunRecord) -> float | None:
    """Dollars that may still be spent; None without a budget."""
    budget = reading.facts.job.spec.budget
    if budget is None or budget.total_usd is None:
        return None
    return budget.total_usd - record.ledger.accrued_usd
