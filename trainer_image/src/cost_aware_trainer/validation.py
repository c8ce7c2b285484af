"""Checks of a run plan that need no data, no device and no peer: what is wrong, where, and what to write instead."""

from __future__ import annotations

from cost_aware_trainer.contract import DegreesPlan, ModelPlan, RunPlan

BYTE_VALUES = 256


class InvalidRunError(ValueError):
    """The run can never work as planned; retrying is pointless."""


def check_plan(plan: RunPlan, world_size: int) -> None:
    """Checks a plan against itself and against the number of ranks that torchrun started.

    Raises:
        InvalidRunError: names the field, its value and the nearest valid ones.
    """
    _check_positive(plan)
    _check_degrees(plan.degrees, world_size)
    _check_model(plan.model)
    _check_batch(plan)
    _check_optimizer(plan)


def _check_positive(plan: RunPlan) -> None:
    fields: dict[str, float] = {
        "steps": plan.steps,
        "evaluate_every_steps": plan.evaluate_every_steps,
        "evaluation_samples": plan.evaluation_samples,
        "batch.global_samples": plan.batch.global_samples,
        "batch.micro_samples": plan.batch.micro_samples,
        "checkpoint.keep": plan.checkpoint.keep,
        "checkpoint.interval_seconds": plan.checkpoint.interval_seconds,
        "optimizer.learning_rate": plan.optimizer.learning_rate,
        "optimizer.gradient_clip": plan.optimizer.gradient_clip,
    }
    fields |= {f"model.{name}": getattr(plan.model, name) for name in ModelPlan.__dataclass_fields__}
    fields |= {f"degrees.{name}": getattr(plan.degrees, name) for name in DegreesPlan.__dataclass_fields__}
    for name, value in fields.items():
        if not value > 0:
            raise InvalidRunError(f"{name}: {value} is not positive; write at least 1, or a positive fraction of it")


def _check_degrees(degrees: DegreesPlan, world_size: int) -> None:
    for name in ("tensor", "pipeline"):
        if getattr(degrees, name) != 1:
            raise InvalidRunError(
                f"degrees.{name}: {getattr(degrees, name)} is not supported, this trainer is data-parallel; write 1"
            )
    if degrees.ranks != world_size:
        raise InvalidRunError(
            f"degrees: data {degrees.data} × tensor {degrees.tensor} × pipeline {degrees.pipeline} = {degrees.ranks} "
            f"ranks, but {world_size} were started; write data: {world_size} or start {degrees.ranks}"
        )


def _check_model(model: ModelPlan) -> None:
    _check_divides("model.heads", model.heads, "model.hidden", model.hidden)
    _check_divides("model.kv_heads", model.kv_heads, "model.heads", model.heads)
    head_size = model.hidden // model.heads
    if head_size % 2:
        raise InvalidRunError(
            f"model.hidden: {model.hidden} over {model.heads} heads gives heads of size {head_size}, but rotary "
            f"positions need an even size; write hidden: {model.heads * (head_size + 1)}"
        )
    if model.vocabulary < BYTE_VALUES:
        raise InvalidRunError(f"model.vocabulary: {model.vocabulary} cannot hold bytes; write {BYTE_VALUES} or more")


def _check_batch(plan: RunPlan) -> None:
    batch, data = plan.batch, plan.degrees.data
    unit = data * batch.micro_samples
    if batch.global_samples % unit:
        above = (batch.global_samples // unit + 1) * unit
        below = max(unit, above - unit)
        micros = divisors(batch.global_samples // data) if batch.global_samples % data == 0 else []
        nearest = min(micros, key=lambda micro: abs(micro - batch.micro_samples), default=None)
        raise InvalidRunError(
            f"batch.global_samples: {batch.global_samples} is not a multiple of degrees.data {data} × "
            f"batch.micro_samples {batch.micro_samples} = {unit}; write {below} or {above}"
            + (f", or micro_samples: {nearest}" if nearest else "")
        )


def _check_optimizer(plan: RunPlan) -> None:
    optimizer = plan.optimizer
    if not 0 <= optimizer.minimum_learning_rate <= optimizer.learning_rate:
        raise InvalidRunError(
            f"optimizer.minimum_learning_rate: {optimizer.minimum_learning_rate} is not between 0 and learning_rate "
            f"{optimizer.learning_rate}; write {optimizer.learning_rate / 10:g}"
        )
    for name in ("warmup_steps", "weight_decay"):
        if getattr(optimizer, name) < 0:
            raise InvalidRunError(f"optimizer.{name}: {getattr(optimizer, name)} is negative; write 0 or more")


def _check_divides(name: str, value: int, of: str, whole: int) -> None:
    if whole % value:
        valid = divisors(whole)
        below = max((d for d in valid if d < value), default=1)
        above = min((d for d in valid if d > value), default=whole)
        raise InvalidRunError(f"{name}: {value} does not divide {of} {whole}; write {below} or {above}")


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]
