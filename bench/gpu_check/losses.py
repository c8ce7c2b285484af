"""Losses: a GPU trains what a CPU trains, under every layout, in bf16 and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.gpu_check.check import Found, Setting, SkippedError
from bench.gpu_check.runs import MIDDLE, TINY, Work, plan_of, trained

from cost_aware_trainer.contract import DegreesPlan, Precision, Sharding, StrategyPlan

STEPS = 20
TOLERANCE = 1e-4
"""Nats per token by which fp32 losses may differ: the order of sums differs between devices and layouts, nothing else."""
LOOSE = 0.02
"""Share of the loss by which bf16 may differ from fp32."""
LAYOUTS = {
    "one": (DegreesPlan(), StrategyPlan()),
    "data_2": (DegreesPlan(data=2), StrategyPlan()),
    "tensor_2": (DegreesPlan(tensor=2), StrategyPlan()),
    "pipeline_2": (DegreesPlan(pipeline=2), StrategyPlan()),
    "zero3_2": (DegreesPlan(data=2), StrategyPlan(sharding=Sharding.ZERO3)),
    "data_2_tensor_2": (DegreesPlan(data=2, tensor=2), StrategyPlan()),
    "data_2_tensor_2_pipeline_2": (DegreesPlan(data=2, tensor=2, pipeline=2), StrategyPlan()),
}


def losses(
    setting: Setting,
    degrees: DegreesPlan | None = None,
    strategy: StrategyPlan | None = None,
    *,
    device: str | None = None,
    tf32: bool = False,
) -> list[float]:
    """Losses of the tiny model's first steps."""
    plan = plan_of(setting, TINY, steps=STEPS, degrees=degrees, strategy=strategy)
    return trained(setting, Work(plan, warm_steps=0, steps=STEPS, tf32=tf32), device).losses


def largest_difference(mine: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two runs' losses at one step."""
    if not mine or len(mine) != len(other):
        raise ValueError(f"{len(mine)} losses cannot be compared with {len(other)}")
    return max(abs(a - b) for a, b in zip(mine, other, strict=True))


def follows_cpu(setting: Setting) -> Found:
    """The trainer in fp32 under each layout that the GPUs allow, beside one rank on a CPU."""
    expected = losses(setting, device="cpu")
    figures: dict[str, float] = {"steps": STEPS, "cpu_first_loss": expected[0], "cpu_last_loss": expected[-1]}
    problems, left_out = [], []
    for name, (degrees, strategy) in LAYOUTS.items():
        if degrees.ranks > setting.ranks:
            have = f"{setting.ranks} {'GPU' if setting.on_cuda else 'rank'}{'s' * (setting.ranks > 1)}"
            left_out.append(f"{name}: needs {degrees.ranks} ranks, and the machine has {have}")
            continue
        difference = largest_difference(losses(setting, degrees, strategy), expected)
        figures[f"{name}_largest_loss_difference"] = difference
        if difference > TOLERANCE:
            problems.append(f"{name}: losses differ from a CPU's by up to {difference:.2g}, more than {TOLERANCE}")
    if setting.on_cuda:
        # only a figure: TF32 rounds to ten bits, which the trainer allows itself and this check does not
        figures["one_with_tf32_largest_loss_difference"] = largest_difference(losses(setting, tf32=True), expected)
    return Found(figures, problems, left_out)


def bf16_follows_fp32(setting: Setting) -> Found:
    """The trainer in bf16 beside itself in fp32."""
    exact = losses(setting)
    coarse = losses(setting, strategy=StrategyPlan(precision=Precision.BF16))
    difference = largest_difference(coarse, exact)
    figures = {"steps": STEPS, "fp32_last_loss": exact[-1], "bf16_last_loss": coarse[-1]}
    figures["largest_loss_difference"] = difference
    problems = []
    if difference == 0:
        problems.append("losses of bf16 are exactly those of fp32: it was not used")
    if difference > LOOSE * max(exact):
        problems.append(f"losses of bf16 differ by up to {difference:.3g}, more than {LOOSE:.0%} of the largest loss")
    return Found(figures, problems)


def compiled(setting: Setting) -> Found:
    """The compiled trainer beside the eager one: losses in fp32, and seconds of a step in bf16."""
    if not setting.on_cuda:
        raise SkippedError("compiling for a CPU takes a minute and says nothing of a GPU's kernels")
    difference = largest_difference(losses(setting, strategy=StrategyPlan(compile=True)), losses(setting))
    seconds: dict[bool, float] = {}
    for is_compiled in (False, True):
        strategy = StrategyPlan(precision=Precision.BF16, compile=is_compiled)
        model = TINY if setting.small else MIDDLE
        plan = plan_of(setting, model, steps=STEPS, strategy=strategy, global_samples=16, micro_samples=8)
        seconds[is_compiled] = median(trained(setting, Work(plan, warm_steps=5, steps=STEPS - 5)).step_seconds)
    figures = {"steps": STEPS, "largest_loss_difference": difference}
    figures |= {"eager_step_seconds": seconds[False], "compiled_step_seconds": seconds[True]}
    figures["speed_up_ratio"] = seconds[False] / seconds[True]
    problem = f"losses of compiled layers differ by up to {difference:.2g}, more than {TOLERANCE}"
    return Found(figures, [problem] if difference > TOLERANCE else [])
