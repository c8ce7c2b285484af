"""Speed: MFU of a model of 1 B weights and of a slice of one of 8 B, beside published figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from bench.accuracy.measured import Measured, rows
from bench.gpu_check.check import Found, Setting, SkippedError, check_judged
from bench.gpu_check.machine import row_of
from bench.gpu_check.memory import layout_of, predicted, shape_of
from bench.gpu_check.runs import TINY, Work, plan_of, trained

from cost_aware_operator.costs.models.compute import model_flops
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.predict import predict
from cost_aware_operator.costs.tables.hardware import Accelerator, NumberFormat, accelerator
from cost_aware_trainer.contract import ModelPlan, Precision, Recompute, RunPlan, StrategyPlan
from cost_aware_trainer.models.decoder import model_flops_per_token

ONE_B = ModelPlan(layers=22, hidden=2048, heads=32, kv_heads=4, ffn=5632, sequence_length=2048, vocabulary=32_000)
"""TinyLlama's shape, 1.1 B weights."""
EIGHT_B = ModelPlan(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14_336,
    sequence_length=8192,
    vocabulary=128_256,
    rope_theta=500_000.0,
)
"""Llama 3 8B's shape."""
MICRO_SAMPLES = (16, 8, 4, 2, 1)
"""Micro-batches, of which the largest that fits is taken."""
SEQUENCE_LENGTHS = (8192, 4096, 2048)
"""Sequence lengths of the slice of 8 B, of which the longest that fits is taken."""
FILLED = 0.9
"""Share of the GPU's memory that a plan may be predicted to take."""
DEFINITION = (
    "model FLOPs of a token are 6 for each weight in a matrix product and 12 x layers x hidden x sequence length, as PaLM "
    "(2204.02311, appendix B) counts them: causality is not deducted and recomputation not counted; over the accelerator's "
    "dense bf16 peak in accelerators.csv"
)
WARM_STEPS, STEPS = 5, 10
FAR = 2.0
"""Factor by which a step may differ from the planner's prediction before the check fails."""
BESIDE = (("torchtitan", "Llama3.1-8B", 8192), ("llm-foundry", "MPT-1b", 2048))
"""Source, model and sequence length of the published figures, runs of eight GPUs in bf16."""


def mfu(setting: Setting) -> Found:
    """Tokens a second and MFU on one GPU in bf16, compiled, with the batch and as many layers as fit."""
    row = _row(setting)
    published = published_figures()
    figures: dict[str, Any] = {"definition": DEFINITION, "accelerator": row.name, "peak_source": row.source}
    figures["peak_tflops"] = row.peak(NumberFormat.BF16)
    problems, left_out = [], []
    for name, plan in plans(setting, row).items():
        if plan is None:
            left_out.append(f"{name}: no plan fits into {row.memory_gib:g} GiB")
            continue
        told = measure(setting, plan, row)
        figures |= {f"{name}_{figure}": value for figure, value in told.items()}
        if not 0 < told["mfu_ratio"] <= 1:
            problems.append(f"{name}: an MFU of {told['mfu_ratio']:.3g} cannot be true")
        if not 1 / FAR <= told["step_seconds"] / told["predicted_step_seconds"] <= FAR:
            problems.append(
                f"{name}: a step takes {told['step_seconds']:.4g} s, and {told['predicted_step_seconds']:.4g} s are "
                f"predicted: further apart than a factor of {FAR:g}"
            )
    figures["published"] = published
    check_judged(
        setting,
        "a CPU's MFU is not what the models and their figures are about",
        "tiny models say nothing of a GPU's speed",
        figures,
    )
    return Found(figures, problems, left_out)


def measure(setting: Setting, plan: RunPlan, row: Accelerator) -> dict[str, Any]:
    """One model's figures."""
    run = trained(setting, Work(plan, warm_steps=WARM_STEPS, steps=STEPS))
    seconds = median(run.step_seconds)
    tokens = plan.batch.global_samples * plan.model.sequence_length
    machine = Machine(row, 1, row.link_gbytes_per_s, row.network_gbit_per_s)
    return {
        "weights": shape_of(plan.model).parameters,
        "layers": plan.model.layers,
        "micro_samples": plan.batch.micro_samples,
        "sequence_length": plan.model.sequence_length,
        "step_seconds": seconds,
        "predicted_step_seconds": predict(shape_of(plan.model), machine, layout_of(plan)).step_seconds,
        "tokens_per_s": tokens / seconds,
        "mfu_ratio": model_flops_per_token(plan.model) * tokens / seconds / (row.peak(NumberFormat.BF16) * 1e12),
    }


def plans(setting: Setting, row: Accelerator) -> dict[str, RunPlan | None]:
    """Plans of both models by name; None where none fits."""
    strategy = StrategyPlan(precision=Precision.BF16, compile=setting.on_cuda)
    whole = [ONE_B]
    slices = [
        replace(EIGHT_B, layers=layers, sequence_length=length)
        for length in SEQUENCE_LENGTHS
        for layers in range(EIGHT_B.layers, 0, -1)
    ]
    if setting.small:
        whole, slices = [TINY], [replace(TINY, layers=1)]

    def tried(models: Iterable[ModelPlan], micro: Iterable[int], recompute: Recompute) -> Iterable[RunPlan]:
        for model in models:
            for samples in micro:
                yield plan_of(
                    setting,
                    model,
                    steps=WARM_STEPS + STEPS,
                    strategy=replace(strategy, recompute=recompute),
                    global_samples=samples,
                    micro_samples=samples,
                )

    return {
        "model_1b": first_that_fits(tried(whole, MICRO_SAMPLES, Recompute.NONE), row),
        "slice_of_8b": first_that_fits(tried(slices, (1,), Recompute.SELECTIVE), row),
    }


def first_that_fits(plans: Iterable[RunPlan], row: Accelerator) -> RunPlan | None:
    """The first plan that is predicted to leave a tenth of the accelerator's memory free; None if there is none."""
    return next((p for p in plans if predicted(p, row.generation).total <= FILLED * row.memory_gib), None)


def published_figures() -> list[dict[str, Any]]:
    """Published runs of like models, of which this repository has the rows; MFU is computed as for ours."""
    return [_published(one) for one in rows() if _is_beside(one)]


def _is_beside(one: Measured) -> bool:
    question = one.question
    is_asked = any(
        one.source.startswith(source) and one.name == model and question.shape.sequence_length == length
        for source, model, length in BESIDE
    )
    return is_asked and question.layout.precision is NumberFormat.BF16 and question.layout.ranks == 8


def _published(one: Measured) -> dict[str, Any]:
    shape, layout, row = one.question.shape, one.question.layout, one.question.machine.accelerator
    tokens = layout.global_batch * shape.sequence_length
    flops = model_flops(shape, layout.global_batch)
    return {
        "source": one.page,
        "model": one.name,
        "precision": one.precision,
        "gpu": one.gpu,
        "gpus": layout.ranks,
        "sequence_length": shape.sequence_length,
        "tokens_per_s_per_gpu": tokens / one.step_seconds / layout.ranks,
        "mfu_ratio": flops / one.step_seconds / layout.ranks / (row.peak(NumberFormat.BF16) * 1e12),
    }


def _row(setting: Setting) -> Accelerator:
    """Row of the machine's accelerator."""
    if not setting.on_cuda:
        return accelerator("CPU")
    name = setting.machine["gpu_name"]
    row = row_of(name, setting.machine["gpu_memory_gib"])
    if row is None:
        raise SkippedError(f"{name} has no row in accelerators.csv: add one with its dense bf16 peak and source")
    if NumberFormat.BF16 not in row.peak_tflops:
        raise SkippedError(f"{row.name} has no units for bf16")
    return row
