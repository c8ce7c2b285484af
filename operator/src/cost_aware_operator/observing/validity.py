"""Whether a rank's metrics can be true. What cannot is dropped with a reason: no decision and no dollar rests on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cost_aware_operator.observing.samples import RankSample
from cost_aware_trainer.contract import Phase

SLACK_SECONDS = 60.0
"""How far the clocks of a kubelet and of this process may be apart, and a report of a step late."""
LARGEST = 2.0**63
"""Largest number of steps, tokens or bytes that is believed; operations may be more."""


@dataclass(frozen=True)
class Limits:
    """What is known of a rank without asking it."""

    rank: int
    """Its number."""
    attempt: int
    """The newest attempt that was given out."""
    alive_seconds: float
    """Age of its pod, in seconds."""
    total_steps: int | None = None
    """Steps of the run; None if the manifest does not say."""
    tokens_per_step: int | None = None
    """Tokens of a step of all ranks; None if the manifest does not say."""


def why_refused(sample: RankSample, limits: Limits, before: RankSample | None = None) -> str:
    """Why a sample cannot be true, with the figure; empty where it can. `before` is the last one of the rank that was believed."""
    for check in (_identity(sample, limits), _numbers(sample), _sizes(sample, limits), _backwards(sample, before)):
        for reason in check:
            return reason
    return ""


def _identity(sample: RankSample, limits: Limits) -> Iterator[str]:
    if sample.rank != limits.rank:
        yield f"it calls itself rank {sample.rank}"
    if not 0 <= sample.attempt <= limits.attempt:
        yield f"it is of attempt {sample.attempt}, and {limits.attempt} is the newest"


def _counters(sample: RankSample) -> Iterator[tuple[str, float]]:
    yield "steps", sample.steps
    yield "tokens", sample.tokens
    yield "step_seconds", sample.step_seconds
    yield "model_flops", sample.model_flops
    yield "communication_bytes", sample.communication_bytes
    for phase in Phase:
        yield f"phase {phase}", sample.phase_seconds.get(phase, 0.0)


def _numbers(sample: RankSample) -> Iterator[str]:
    gauges = (
        ("step", float(sample.step)),
        ("total_steps", float(sample.total_steps)),
        ("memory_bytes", sample.memory_bytes),
        ("link_bytes_per_second", sample.network_bytes_per_second or 0.0),
    )
    for name, value in (*_counters(sample), *gauges):
        if not math.isfinite(value) or value < 0:
            yield f"{name} is {value:g}"
        elif value > LARGEST and name != "model_flops":
            yield f"{name} is {value:.3g}"


def _sizes(sample: RankSample, limits: Limits) -> Iterator[str]:
    longest = 1.02 * limits.alive_seconds + SLACK_SECONDS
    worked = sum(sample.phase_seconds.values())
    if max(worked, sample.step_seconds) > longest:
        yield f"{max(worked, sample.step_seconds):,.0f} s of steps in a pod that is {limits.alive_seconds:,.0f} s old"
    total = sample.total_steps
    if limits.total_steps is not None and total not in (0, limits.total_steps):
        yield f"total_steps is {total:,} and not {limits.total_steps:,}"
    if total and max(sample.step, sample.steps, sample.checkpoint_step or 0, sample.resumed_step or 0) > total:
        yield f"a step beyond the last, {total:,}"
    if limits.tokens_per_step is not None and sample.tokens > (sample.steps + 1) * limits.tokens_per_step:
        yield f"{sample.tokens:,.0f} tokens in {sample.steps:,.0f} steps of {limits.tokens_per_step:,}"


def _backwards(sample: RankSample, before: RankSample | None) -> Iterator[str]:
    """An attempt's counters only grow: its ranks are never started twice."""
    if before is None or before.attempt != sample.attempt:
        return
    for (name, now), (_, then) in zip(_counters(sample), _counters(before), strict=True):
        if now < then * (1 - 1e-9) - 1e-6:
            yield f"{name} went back from {then:,.6g} to {now:,.6g}"
