"""Checks of a run plan that need no data, no device and no peer. They say what is wrong, where, and what to write instead."""

from __future__ import annotations

import math

from cost_aware_trainer.contract import DegreesPlan, ModelPlan, RunPlan, Schedule, Sharding

BYTE_VALUES = 256


class InvalidRunError(ValueError):
    """Run that can never work as planned. It is not tried again."""


def check_plan(plan: RunPlan, world_size: int) -> None:
    """Checks a plan against itself and against the number of ranks that torchrun started.

    Raises:
        InvalidRunError: names the field, its value and the nearest valid ones.
    """
    _check_positive(plan)
    _check_degrees(plan.degrees, world_size)
    _check_model(plan.model)
    _check_batch(plan)
    _check_tensor(plan)
    _check_stages(plan)
    _check_schedule(plan)
    _check_strategy(plan)
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
        "checkpoint.redundancy_interval_seconds": plan.checkpoint.redundancy_interval_seconds,
        "optimizer.learning_rate": plan.optimizer.learning_rate,
        "optimizer.gradient_clip": plan.optimizer.gradient_clip,
    }
    shape = {name: getattr(plan.model, name) for name in ModelPlan.__dataclass_fields__ if name != "tied_embeddings"}
    fields |= {f"model.{name}": value for name, value in shape.items()}
    fields["strategy.interleave"] = plan.strategy.interleave
    if plan.strategy.bucket_mib is not None:
        fields["strategy.bucket_mib"] = plan.strategy.bucket_mib
    fields |= {f"degrees.{name}": getattr(plan.degrees, name) for name in DegreesPlan.__dataclass_fields__}
    for name, value in fields.items():
        if not 0 < value < math.inf:
            raise InvalidRunError(
                f"{name}: {value} is not positive and finite; write at least 1, or a positive fraction of it"
            )


def _check_degrees(degrees: DegreesPlan, world_size: int) -> None:
    if degrees.ranks != world_size:
        rest = degrees.tensor * degrees.pipeline
        remedy = f"write data: {world_size // rest} or start" if world_size % rest == 0 else "start"
        raise InvalidRunError(
            f"degrees: data {degrees.data} × tensor {degrees.tensor} × pipeline {degrees.pipeline} = {degrees.ranks} "
            f"ranks, but {world_size} were started; {remedy} {degrees.ranks}"
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
        possible = divisors(batch.global_samples // data) if batch.global_samples % data == 0 else []
        nearest = min(possible, key=lambda micro: abs(micro - batch.micro_samples), default=None)
        raise InvalidRunError(
            f"batch.global_samples: {batch.global_samples} is not a multiple of degrees.data {data} × "
            f"batch.micro_samples {batch.micro_samples} = {unit}; write {below} or {above}"
            + (f", or micro_samples: {nearest}" if nearest else "")
        )


def _check_tensor(plan: RunPlan) -> None:
    """Checks the tensor axis, which splits heads, the feed-forward layer, the vocabulary and, between layers, the positions."""
    for name in ("kv_heads", "heads", "ffn", "vocabulary", "sequence_length"):
        _check_divides("degrees.tensor", plan.degrees.tensor, f"model.{name}", getattr(plan.model, name))


def _check_stages(plan: RunPlan) -> None:
    strategy, layers = plan.strategy, plan.model.layers
    count = plan.degrees.pipeline * strategy.interleave
    if layers < count:
        raise InvalidRunError(
            f"degrees.pipeline: {plan.degrees.pipeline} × strategy.interleave {strategy.interleave} = {count} stages for "
            f"model.layers {layers}; write pipeline: {max(1, layers // strategy.interleave)} or fewer"
        )
    given = strategy.stage_layers
    if given and (len(given) != count or sum(given) != layers or min(given) < 1):
        each, more = divmod(layers, count)
        even = [each + (stage < more) for stage in range(count)]
        raise InvalidRunError(
            f"strategy.stage_layers: {list(given)} are not {count} positive counts (degrees.pipeline × "
            f"strategy.interleave) that add up to model.layers {layers}; write {even} or leave it out"
        )


_INTERLEAVES = {
    Schedule.GPIPE: (1, 1),
    Schedule.ONE_FORWARD_ONE_BACKWARD: (1, 1),
    Schedule.INTERLEAVED: (2, 64),
    Schedule.ZERO_BUBBLE: (1, 64),
    Schedule.ZERO_BUBBLE_V: (2, 2),
}
"""Smallest and largest number of stages on each rank that a schedule can work with."""


def _check_schedule(plan: RunPlan) -> None:
    """Checks the numbers of stages and of micro-batches that each of torch's schedules needs. One stage needs nothing."""
    schedule, interleave, pipeline = plan.strategy.schedule, plan.strategy.interleave, plan.degrees.pipeline
    least, most = _INTERLEAVES[schedule] if pipeline > 1 else (1, 1)
    if not least <= interleave <= most:
        why = f"strategy.schedule {schedule}" if pipeline > 1 else "degrees.pipeline 1"
        raise InvalidRunError(
            f"strategy.interleave: {interleave} does not go with {why}; write {min(max(interleave, least), most)}"
        )
    if pipeline == 1:
        return
    micro_batches = plan.micro_batches
    if schedule is Schedule.ONE_FORWARD_ONE_BACKWARD and micro_batches < pipeline:
        raise InvalidRunError(_too_few(plan, micro_batches, pipeline))
    if schedule is Schedule.ZERO_BUBBLE_V and micro_batches < 2 * pipeline - 1:
        raise InvalidRunError(_too_few(plan, micro_batches, 2 * pipeline - 1))
    rounds = max(1, micro_batches // pipeline)
    if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) and micro_batches % rounds:
        raise InvalidRunError(
            f"batch.micro_samples: {plan.batch.micro_samples} gives {micro_batches} micro-batches, which strategy.schedule "
            f"{schedule} cannot divide into {rounds} rounds over {pipeline} ranks; {_fitting_micro_batch(plan, pipeline, 1)}"
        )


def _too_few(plan: RunPlan, micro_batches: int, needed: int) -> str:
    return (
        f"batch.micro_samples: {plan.batch.micro_samples} gives {micro_batches} micro-batches, but strategy.schedule "
        f"{plan.strategy.schedule} needs {needed} for degrees.pipeline {plan.degrees.pipeline}; "
        f"{_fitting_micro_batch(plan, plan.degrees.pipeline, needed)}"
    )


def _fitting_micro_batch(plan: RunPlan, pipeline: int, needed: int) -> str:
    """Advises the nearest micro-batch that gives enough micro-batches, and a multiple of the pipeline's ranks."""
    samples = plan.batch.global_samples // plan.degrees.data
    fitting = [micro for micro in divisors(samples) if samples // micro >= needed and samples // micro % pipeline == 0]
    nearest = min(fitting, key=lambda micro: abs(micro - plan.batch.micro_samples), default=None)
    return f"write {nearest}" if nearest else "write schedule: gpipe"


def _check_strategy(plan: RunPlan) -> None:
    """Refuses combinations that torch cannot run."""
    strategy = plan.strategy
    splits_backward = plan.degrees.pipeline > 1 and strategy.schedule in (Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_V)
    if not splits_backward:
        return
    if strategy.compile:
        raise InvalidRunError(
            f"strategy.compile: true does not go with strategy.schedule {strategy.schedule}, whose backward pass is in two "
            "parts; write false"
        )
    if strategy.recompute != "none":
        raise InvalidRunError(
            f"strategy.recompute: {strategy.recompute} does not go with strategy.schedule {strategy.schedule}, which "
            "would compute everything again for each of its two backward passes; write none"
        )
    if strategy.sharding is not Sharding.NONE and plan.degrees.data > 1:
        raise InvalidRunError(
            f"strategy.sharding: {strategy.sharding} does not go with strategy.schedule {strategy.schedule}; write none, "
            "or schedule: 1f1b"
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
        nearest = f"{below} or {above}" if above != below else f"{below}"
        raise InvalidRunError(f"{name}: {value} does not divide {of} {whole}; write {nearest}")


def divisors(number: int) -> list[int]:
    """Lists all divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]
