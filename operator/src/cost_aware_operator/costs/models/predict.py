"""One layout on one machine: seconds of a step, memory of a rank, and what takes them."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.costs.models.compute import Parameters, model_flops
from cost_aware_operator.costs.models.layout import AnyLayout, Layout, Practice
from cost_aware_operator.costs.models.machines import Machine as Machine
from cost_aware_operator.costs.models.machines import usable_gib
from cost_aware_operator.costs.models.memory import MemoryGib, StageMemory, between
from cost_aware_operator.costs.models.model_parallel import DecoderShape, ModelParallelCostAnalyzer
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.step import StepSeconds
from cost_aware_operator.costs.models.step import step_seconds as step_seconds
from cost_aware_operator.costs.models.trainer_memory import trainer_memory
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration


@dataclass(frozen=True)
class Breakdown(StepSeconds):
    """Seconds of one layout's step by what takes them.

    Communication counts only what computation does not hide. The parts add up to the step.
    """

    compute: float
    """Seconds of arithmetic on the rank that works longest."""
    tensor_communication: float
    """Seconds of tensor-parallel collectives that computation does not hide."""
    pipeline_communication: float
    """Seconds of sends between stages that computation does not hide."""
    data_communication: float
    """Seconds of gradient reduction and weight gathers that computation does not hide."""
    context_communication: float
    """Seconds of context-parallel traffic that computation does not hide."""
    bubble: float
    """Seconds in which the stage that works longest waits for other stages."""
    optimizer: float
    """Seconds of the optimizer's update."""
    other: float
    """Seconds lost to stragglers, and the fixed cost of a step."""

    @property
    def total(self) -> float:
        """The sum."""
        return float(super().total)


@dataclass(frozen=True)
class Prediction:
    """Predicted step and memory of one layout."""

    step_seconds: float
    """Seconds of one step."""
    memory_gib: float
    """GiB that the fullest rank needs."""
    feasible: bool
    """Whether the layout fits the batch, the model and the memory."""
    reason: str
    """Why it is not feasible, and what would be; empty where it is."""
    tflops_per_gpu: float
    """Model FLOPs of one accelerator, 1e12 a second, without recompute."""
    breakdown: Breakdown
    """The step's seconds by what takes them."""
    memory: MemoryGib
    """The fullest rank's GiB by what holds them."""


def predict(
    shape: DecoderShape, machine: Machine, layout: Layout, parameters: Parameters = FITTED, *, bundled: bool = False
) -> Prediction:
    """Seconds and GiB of one layout; `bundled` if the bundled trainer is to run it.

    Raises:
        HardwareError: the accelerator has no peak for the precision.
        ValueError: more stages than layers.
    """
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    found = step_seconds(shape, machine, layout, parameters)
    breakdown = Breakdown(**{name: float(getattr(found, name)) for name in Breakdown.__dataclass_fields__})
    memory = (
        memory_of_ranks(shape, machine, layout, bundled=True).told()
        if bundled
        else memory_on(shape, machine, layout, practice)
    )
    reason = _infeasible(shape, machine, layout, memory)
    return Prediction(
        step_seconds=breakdown.total,
        memory_gib=memory.total,
        feasible=not reason,
        reason=reason,
        tflops_per_gpu=model_flops(shape, layout.global_batch) / breakdown.total / layout.ranks / 1e12,
        breakdown=breakdown,
        memory=memory,
    )


def memory_of_ranks(shape: DecoderShape, machine: Machine, layout: AnyLayout, *, bundled: bool = False) -> StageMemory:
    """GiB of the fullest rank, for one layout or for many: of the bundled trainer, or of others with usual kernels.

    What the bundled trainer holds is known for the kernels of GPUs. On CPUs, whose kernels hold more, it is taken to be as others.
    """
    if bundled and machine.accelerator.generation is not AcceleratorGeneration.CPU:
        return trainer_memory(shape, layout, machine.accelerator.generation)
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    return ModelParallelCostAnalyzer().memory_of_ranks(shape, layout, practice)


def memory_on(shape: DecoderShape, machine: Machine, layout: Layout, practice: Practice) -> MemoryGib:
    """GiB of the fullest rank: with usual kernels if they fit, else with as many lean ones as are needed.

    Runs near the limit use fused or chunked losses and activations. So memory grows without jumps up to what the accelerator
    has, stays there while leaner kernels make room, and exceeds it only where the leanest do not fit.
    """
    analyzer = ModelParallelCostAnalyzer()
    usual = analyzer.memory_of_rank(shape, layout, practice)
    usable = usable_gib(machine)
    if usual.total <= usable:
        return usual
    return between(analyzer.memory_of_rank(shape, layout, practice, lean=True), usual, usable)


def fits(memory: MemoryGib, machine: Machine) -> bool:
    """Whether a rank fits; rounding errors are forgiven."""
    return memory.total <= usable_gib(machine) * (1 + 1e-9)


def _infeasible(shape: DecoderShape, machine: Machine, layout: Layout, memory: MemoryGib) -> str:
    unit = layout.data * layout.micro_batch
    if layout.global_batch % unit:
        nearest = max(unit, round(layout.global_batch / unit) * unit)
        return (
            f"layout.global_batch: {layout.global_batch} is not divisible by data x micro_batch "
            f"({layout.data} x {layout.micro_batch}): write {nearest}"
        )
    for name, count in (("heads", shape.heads), ("ffn", shape.ffn)):
        if count % layout.tensor:
            nearest = max(d for d in range(1, layout.tensor + 1) if count % d == 0)
            return f"layout.tensor: {layout.tensor} does not divide model.{name} ({count}): write {nearest}"
    if not fits(memory, machine):
        parts = ", ".join(f"{name} {getattr(memory, name):.1f}" for name in MemoryGib.__dataclass_fields__)
        return (
            f"memory: {memory.total:.1f} GiB a rank with fused kernels ({parts}), but "
            f"{machine.accelerator.name} has {usable_gib(machine):.1f} usable: "
            "use more tensor or pipeline ranks, more sharding or recompute, or a smaller micro_batch"
        )
    return ""
