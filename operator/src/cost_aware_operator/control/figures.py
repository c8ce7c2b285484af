"""The numbers of the status: plan, progress, efficiency and cost. Pure."""

from __future__ import annotations

from cost_aware_operator.api.status import (
    CausesStatus,
    CostStatus,
    EfficiencyStatus,
    PlanStatus,
    PredictedStatus,
    ProgressStatus,
)
from cost_aware_operator.control.facts import Facts
from cost_aware_operator.control.money import current_samples, price_of
from cost_aware_operator.ledger.ledger import Cause
from cost_aware_operator.observing.samples import Observation
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.presets import shape_of
from cost_aware_trainer.contract import Phase


def plan_status(plan: Plan) -> PlanStatus:
    """The plan as the status shows it."""
    return PlanStatus(
        data=plan.data,
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        micro_batch=plan.micro_batch,
        nodes=plan.nodes,
        ranks=plan.ranks,
        degrees=f"{plan.data}x{plan.tensor}x{plan.pipeline}",
        explanation=plan.explanation[:1024],
        predicted=PredictedStatus(memory_gib=plan.memory_gib, hourly_usd=plan.hourly_usd),
    )


_WAITING = (Phase.TENSOR_COMMUNICATION, Phase.PIPELINE_COMMUNICATION, Phase.PIPELINE_BUBBLE)


def efficiency_status(observation: Observation | None) -> EfficiencyStatus | None:
    """Shares of the last scrapes."""
    if observation is None:
        return None
    shares = {phase: observation.shares[phase] for phase in Phase}
    # The status has one share for whatever ranks wait for each other with.
    shares[Phase.COMMUNICATION] += sum(shares.pop(phase) for phase in _WAITING)
    rounded = {phase.value: round(share, 4) for phase, share in shares.items()}
    return EfficiencyStatus(current=round(observation.efficiency, 4), **rounded)


def progress_status(facts: Facts, observation: Observation | None) -> ProgressStatus | None:
    """From the ranks while they answer, from the result when they are done, else what was known before."""
    old, result = facts.job.status.progress, facts.result
    samples = [s for s in current_samples(facts) if s.total_steps > 0]
    if result is not None and result.total_steps:
        return _progress(
            facts, result.step, result.total_steps, result.loss, result.heldout_loss, None, 0.0
        ).model_copy(update={"samples_checksum": result.samples_checksum or None, "checkpoint_step": result.step})
    if not samples:
        return (
            None
            if old is None
            else old.model_copy(update={"tokens_per_second": None, "estimated_remaining_seconds": None})
        )
    lead = max(samples, key=lambda s: (s.step, -s.rank))
    heldout = next((s.heldout_loss for s in samples if s.heldout_loss is not None), None)
    speed = observation.tokens_per_second if observation is not None else None
    remaining = None
    if observation is not None and observation.steps_per_second > 0:
        remaining = (lead.total_steps - lead.step) / observation.steps_per_second
    progress = _progress(facts, lead.step, lead.total_steps, lead.loss, heldout, speed, remaining)
    return progress.model_copy(update={"checkpoint_step": facts.record.newest_checkpoint or None})


def _progress(
    facts: Facts,
    step: int,
    total_steps: int,
    loss: float | None,
    heldout_loss: float | None,
    tokens_per_second: float | None,
    remaining_seconds: float | None,
) -> ProgressStatus:
    model = facts.job.spec.model
    tokens = step * facts.job.spec.batch.global_ * (shape_of(model).sequence_length if model is not None else 0)
    return ProgressStatus(
        step=step,
        total_steps=total_steps,
        tokens=tokens,
        percent=round(100.0 * step / total_steps, 2),
        loss=None if loss is None else round(loss, 4),
        heldout_loss=None if heldout_loss is None else round(heldout_loss, 4),
        tokens_per_second=None if tokens_per_second is None else round(tokens_per_second, 1),
        estimated_remaining_seconds=None if remaining_seconds is None else round(remaining_seconds, 1),
    )


def cost_status(facts: Facts, plan: Plan | None, progress: ProgressStatus | None) -> CostStatus | None:
    """Dollars so far, at the present speed to the end, and per token. None before the first pod."""
    ledger = facts.record.ledger
    if ledger.pod_seconds <= 0:
        return None
    up = [p for p in facts.pods if p.started_at is not None and p.ended_at is None]
    prices = [price_of(facts, p) for p in up]
    known = [p for p in prices if p is not None]
    hourly = sum(p.hourly_usd for p in known) if len(known) == len(prices) else None
    old = facts.job.status.cost
    accrued = ledger.accrued_usd
    projected = None
    if facts.record.ended_at is not None:
        projected = accrued
    elif progress is not None and progress.estimated_remaining_seconds is not None and hourly is not None:
        projected = accrued + hourly * progress.estimated_remaining_seconds / 3600.0
    unpriced_only = ledger.unpriced_pod_seconds >= ledger.pod_seconds
    return CostStatus(
        accrued_usd=round(accrued, 6),
        spent="unknown" if unpriced_only else f"${accrued:,.4f}" if accrued < 100 else f"${accrued:,.2f}",
        by_cause=CausesStatus(**{cause.value: round(ledger.by_cause(cause), 6) for cause in Cause}),
        transfer_usd=round(ledger.transfer_usd, 6),
        hourly_usd=None if hourly is None else round(hourly, 6),
        projected_usd=None if projected is None else round(projected, 6),
        per_million_tokens_usd=round(accrued / progress.tokens * 1e6, 6)
        if progress and progress.tokens and accrued
        else None,
        pod_seconds=round(ledger.pod_seconds, 3),
        unpriced_pod_seconds=round(ledger.unpriced_pod_seconds, 3),
        price_source=known[0].source if known else old.price_source if old else None,
        price_as_of=known[0].as_of if known else old.price_as_of if old else None,
    )
