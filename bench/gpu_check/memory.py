"""Memory: what a step allocates is what the planner predicts for its plan."""

from __future__ import annotations

import itertools
from typing import Any

from bench.gpu_check.check import Found, Setting, check_judged
from bench.gpu_check.machine import GIB, row_of
from bench.gpu_check.runs import MIDDLE, TINY, Work, plan_of, trained

from cost_aware_operator.costs.models.layout import Layout, Practice, StateSharding
from cost_aware_operator.costs.models.memory import MemoryGib
from cost_aware_operator.costs.models.model_parallel import DecoderShape, ModelParallelCostAnalyzer
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration, NumberFormat
from cost_aware_trainer.contract import ModelPlan, Precision, Recompute, RunPlan, Sharding, StrategyPlan

AGREEMENT = 0.10
"""Share of the allocated bytes by which the prediction may differ."""
STEPS = 3


def memory(setting: Setting) -> Found:
    """Peak of allocated bytes beside the prediction without the framework's share, plan by plan."""
    generation = generation_of(setting)
    figures: dict[str, Any] = {}
    problems = []
    kinds = itertools.product(Precision, (Recompute.NONE, Recompute.FULL), (1, 2))
    for precision, recompute, micro_samples in kinds:
        name = f"{precision.value}_recompute_{recompute.value}_micro_{micro_samples}"
        strategy = StrategyPlan(precision=precision, recompute=recompute)
        model = TINY if setting.small else MIDDLE
        plan = plan_of(setting, model, steps=STEPS, strategy=strategy, global_samples=4, micro_samples=micro_samples)
        expected = predicted(plan, generation)
        predicted_gib = expected.total - expected.framework
        peak_gib = trained(setting, Work(plan, warm_steps=0, steps=STEPS)).peak_bytes / GIB
        figures |= {f"{name}_predicted_gib": predicted_gib, f"{name}_peak_gib": peak_gib}
        difference = predicted_gib / peak_gib - 1
        figures[f"{name}_difference_ratio"] = difference
        if abs(difference) > AGREEMENT:
            problems.append(
                f"{name}: {predicted_gib:.3g} GiB are predicted and {peak_gib:.3g} GiB were allocated ({difference:+.0%})"
            )
    check_judged(
        setting,
        "a CPU's process is counted as a whole, libraries included, and not what it allocates",
        "what libraries allocate is more than a tiny model",
        figures,
    )
    return Found(figures, problems)


def generation_of(setting: Setting) -> AcceleratorGeneration:
    """Generation of the machine's GPU; unknown if it has no row in the table."""
    name, memory_gib = setting.machine.get("gpu_name"), setting.machine.get("gpu_memory_gib")
    row = row_of(name, memory_gib) if name and memory_gib else None
    return row.generation if row else AcceleratorGeneration.UNKNOWN


def predicted(plan: RunPlan, generation: AcceleratorGeneration) -> MemoryGib:
    """The planner's prediction for the fullest rank of a plan, with the kernels that the trainer has."""
    layout = layout_of(plan)
    practice = Practice.of(layout, generation, gated_mlp=True)
    return ModelParallelCostAnalyzer().memory_of_rank(shape_of(plan.model), layout, practice)


def shape_of(model: ModelPlan) -> DecoderShape:
    """The planner's words for a model."""
    return DecoderShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        sequence_length=model.sequence_length,
        vocabulary=model.vocabulary,
        tied_embeddings=model.tied_embeddings,
    )


def layout_of(plan: RunPlan) -> Layout:
    """The planner's words for a plan."""
    sharding = plan.strategy.sharding
    return Layout(
        data=plan.degrees.data,
        tensor=plan.degrees.tensor,
        pipeline=plan.degrees.pipeline,
        context=1,
        sharding=StateSharding.DDP if sharding is Sharding.NONE else StateSharding(sharding.value),
        interleave=plan.strategy.interleave,
        recompute=plan.strategy.recompute,
        micro_batch=plan.batch.micro_samples,
        global_batch=plan.batch.global_samples,
        precision=NumberFormat(plan.strategy.precision.value),
    )
