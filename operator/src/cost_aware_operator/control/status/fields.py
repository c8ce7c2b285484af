"""The numbers of the status: plan, progress, efficiency and cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_aware_operator.adjusting.changes import Change, described_from
from cost_aware_operator.api.status import (
    AdjustmentStatus,
    AlternativeStatus,
    BlocksStatus,
    CausesStatus,
    CheckpointStatus,
    CostStatus,
    EfficiencyStatus,
    GoodputStatus,
    MeasuredStatus,
    PlanStatus,
    PredictedStatus,
    ProgressStatus,
    SavingsStatus,
    StagesStatus,
    StragglerStatus,
)
from cost_aware_operator.api.units import GIB
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.policy.stragglers import slow_ranks
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.costs.tables.hardware import HardwareError, NumberFormat
from cost_aware_operator.ledger.accounts import LAG_SECONDS
from cost_aware_operator.ledger.blocks import by_block, saved, total_usd
from cost_aware_operator.ledger.ledger import Cause
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.planning.space import machine_of, resources_of
from cost_aware_trainer.contract import Phase


def _rounded(value: float) -> float:
    """The value with four significant digits."""
    return float(f"{value:.4g}")


def plan_status(plan: Plan, measured: MeasuredStatus | None = None) -> PlanStatus:
    """The plan as the status shows it."""
    return PlanStatus(
        data=plan.data,
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        micro_batch=plan.micro_batch,
        nodes=plan.nodes,
        ranks=plan.ranks,
        degrees=f"{plan.data}x{plan.tensor}x{plan.pipeline}",
        instance_types=plan.instance_types,
        explanation=plan.explanation[:1024],
        predicted=PredictedStatus(
            memory_gib=plan.memory_gib,
            hourly_usd=plan.hourly_usd,
            step_seconds=_rounded(plan.predicted.step_seconds) if plan.predicted else None,
            efficiency=round(plan.predicted.efficiency, 4) if plan.predicted else None,
            hours=_rounded(plan.predicted.hours) if plan.predicted else None,
            total_usd=plan.predicted.total_usd if plan.predicted else None,
        ),
        measured=measured,
        alternatives=tuple(
            AlternativeStatus(
                degrees=a.degrees,
                nodes=a.nodes,
                instance_type=a.instance_type,
                hours=_rounded(a.hours),
                total_usd=a.total_usd,
                why_not=a.why_not[:1024],
            )
            for a in plan.alternatives
        ),
    )


def adjustment_status(change: Change) -> AdjustmentStatus:
    """A change as the status shows it."""
    realised, downtime = change.realised_savings_usd, change.downtime_seconds
    return AdjustmentStatus(
        time=change.at,
        attempt=change.attempt,
        kind=change.kind.value,
        from_=described_from(change.origin, change.target),
        to=described_from(change.target, change.origin),
        reason=change.reason[:1024],
        predicted_savings_usd=_rounded(change.predicted_savings_usd),
        realised_savings_usd=None if realised is None else _rounded(realised),
        downtime_seconds=None if downtime is None else round(downtime, 3),
        stages=StagesStatus(**change.stage_seconds) if change.stage_seconds else None,
        outcome=change.outcome.value,
    )


def measured_status(reading: Reading, decision: Decision, plan: Plan) -> MeasuredStatus | None:
    """What the ranks measure under the plan in force, beside what was predicted; None until a step can be told."""
    window, attempt = reading.window, decision.record.attempt
    if window is None or attempt != reading.facts.record.attempt:
        return None
    seconds = window.measured.step_seconds
    memory = max((s.memory_bytes for s in reading.samples_of(attempt)), default=0.0) / GIB
    return MeasuredStatus(
        step_seconds=_rounded(seconds),
        step_error=_error(plan.predicted.step_seconds if plan.predicted is not None else None, seconds),
        memory_gib=_rounded(memory) if memory > 0 else None,
        memory_error=_error(plan.memory_gib, memory),
    )


def _error(predicted: float | None, measured: float) -> float | None:
    """|predicted - measured| / measured."""
    return None if predicted is None or measured <= 0 else round(abs(predicted - measured) / measured, 4)


def efficiency_status(reading: Reading, plan: Plan | None) -> EfficiencyStatus | None:
    """Shares of the last scrapes, and the two rates whose ratio the efficiency is."""
    observation = reading.observation
    if observation is None:
        return None
    shares = {phase.value: round(observation.shares[phase], 4) for phase in Phase}
    peak = _peak_flops(reading.facts, plan) if plan is not None and observation.flops_per_second > 0 else None
    reference = observation.reference_tokens_per_second
    return EfficiencyStatus(
        current=round(observation.efficiency, 4),
        rank_tokens_per_second=_rounded(observation.rank_tokens_per_second) if reference > 0 else None,
        reference_tokens_per_second=_rounded(reference) if reference > 0 else None,
        mfu=None if peak is None else round(observation.flops_per_second / peak, 4),
        **shares,
    )


def _peak_flops(facts: Facts, plan: Plan) -> float | None:
    """Dense operations a second of one rank's accelerator in the plan's precision, the mean over the pods' nodes.

    None where a node's hardware is not known, and for CPUs: the peak listed for them is of no processor in particular.
    """
    only = plan.instance_types[0] if len(plan.instance_types) == 1 else None
    types = set[str]()
    for pod in facts.pods:
        node = facts.nodes.get(pod.node or "")
        kind = node.instance_type if node is not None else only
        if kind is None:
            return None
        types.add(kind)
    resources = resources_of(facts.job.spec, facts.defaults.resources)
    peaks = [_peak(facts, kind, resources, plan) for kind in types]
    known = [p for p in peaks if p is not None]
    return sum(known) / len(known) if known and len(known) == len(peaks) else None


def _peak(
    facts: Facts, instance_type: str, resources: Mapping[str, Mapping[str, str]] | dict[str, Any], plan: Plan
) -> float | None:
    try:
        accelerator = machine_of(facts.job.spec, instance_type, resources).accelerator
        return None if accelerator.name == "CPU" else accelerator.peak(NumberFormat(plan.precision)) * 1e12
    except HardwareError:
        return None


def straggler_status(reading: Reading) -> tuple[StragglerStatus, ...]:
    """Ranks that hold up the others."""
    return tuple(
        StragglerStatus(
            rank=slow.rank,
            pod=pod.name if pod is not None else None,
            node=pod.node if pod is not None else None,
            slowdown=round(slow.slowdown, 2),
        )
        for slow, pod in slow_ranks(reading)[:16]
    )


def checkpoint_status(decision: Decision) -> CheckpointStatus | None:
    """How often the newest attempt saves, and why."""
    if decision.order is None or decision.order.plan is None:
        return None
    stall = decision.record.saves.stall_seconds
    return CheckpointStatus(
        interval_seconds=decision.order.plan.checkpoint.interval_seconds,
        reason=decision.record.interval_reason[:1024],
        stall_seconds=None if stall is None else _rounded(stall),
    )


def goodput_status(record: RunRecord) -> GoodputStatus | None:
    """Shares of all paid time by cause."""
    seconds = record.ledger.seconds
    total = sum(seconds.values())
    if total <= 0:
        return None
    return GoodputStatus(**{cause.value: round(seconds.get(cause, 0.0) / total, 4) for cause in Cause})


def progress_status(reading: Reading, decision: Decision) -> ProgressStatus | None:
    """Progress as the ranks tell it, else as the result tells it when they are done, else as it was known before."""
    facts, observation = reading.facts, reading.observation
    old, result = facts.job.status.progress, decision.result
    samples = [s for s in reading.samples_of(decision.record.attempt) if s.total_steps > 0]
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
    return progress.model_copy(update={"checkpoint_step": decision.record.newest_checkpoint or None})


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


def _savings(record: RunRecord, progress: ProgressStatus | None) -> SavingsStatus | None:
    baseline = record.baseline
    found = saved(baseline, record.ledger, progress.step) if baseline is not None and progress is not None else None
    if baseline is None or found is None:
        return None
    return SavingsStatus(
        counterfactual=(
            f"the submitted plan, {baseline.plan}, at the {baseline.step_seconds:.4g} s a step that it was measured at, "
            "and the prices that were paid"
        ),
        counterfactual_usd=round(found.counterfactual_usd, 6),
        paid_usd=round(found.paid_usd, 6),
        usd=round(found.usd, 6),
    )


def cost_status(reading: Reading, record: RunRecord, progress: ProgressStatus | None) -> CostStatus | None:
    """Dollars so far, at the present speed to the end, and per token. None before the first pod."""
    ledger = record.ledger
    if ledger.pod_seconds <= 0:
        return None
    hourly = reading.hourly_usd
    known = [reading.prices[p.uid] for p in reading.running if p.uid in reading.prices]
    old = reading.facts.job.status.cost
    accrued = ledger.accrued_usd
    projected = None
    if record.ended_at is not None:
        projected = accrued
    elif progress is not None and progress.estimated_remaining_seconds is not None and hourly is not None:
        # what runs is booked a little late
        seconds = progress.estimated_remaining_seconds + LAG_SECONDS
        projected = accrued + hourly * seconds / 3600.0
    unpriced_only = ledger.unpriced_pod_seconds >= ledger.pod_seconds
    return CostStatus(
        accrued_usd=round(accrued, 6),
        spent="unknown" if unpriced_only else f"${accrued:,.4f}" if accrued < 100 else f"${accrued:,.2f}",
        by_cause=CausesStatus(**{cause.value: round(ledger.by_cause(cause), 6) for cause in Cause}),
        total_usd=round(total_usd(ledger), 6),
        by_block=BlocksStatus(**{block.value: round(usd, 6) for block, usd in by_block(ledger).items()}),
        savings=_savings(record, progress),
        storage_usd=round(ledger.storage_usd, 6),
        management_usd=round(ledger.management_usd, 6),
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
