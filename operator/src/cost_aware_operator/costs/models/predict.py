"""One layout on one machine: seconds of a step, memory of a rank, and where both go."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.costs.elementwise import Numbers, least, log2, most, where
from cost_aware_operator.costs.models.communication import Fabric, Link, Path
from cost_aware_operator.costs.models.compute import Computer, LayerSeconds, Parameters, model_flops
from cost_aware_operator.costs.models.layout import (
    AnyLayout,
    Layout,
    Practice,
    Recompute,
    StateSharding,
    pipeline_schedule,
)
from cost_aware_operator.costs.models.model_parallel import (
    DecoderShape,
    MemoryGib,
    ModelParallelCostAnalyzer,
    StageMemory,
    between,
    head_in_layers,
)
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.pipeline import PipelineParallelCostAnalyzer, StageRuns
from cost_aware_operator.costs.tables.hardware import Accelerator, NumberFormat

USABLE_MEMORY = 0.985
"""Share of an accelerator's memory that a process gets (torch reports 39.4 GiB of an A100's 40); the driver keeps the rest."""
FORWARD = {Recompute.NONE: 1 / 3, Recompute.SELECTIVE: 1 / 3, Recompute.FULL: 1 / 4}
"""Forward's share of a pass, by FLOPs: the same on every machine, so that a faster part never lengthens a wait in the pipeline."""


@dataclass(frozen=True)
class Machine:
    """Accelerators in nodes."""

    accelerator: Accelerator
    """The accelerator."""
    gpus_per_node: int
    """Accelerators of one node."""
    link_gbytes_per_s: float
    """Link of one accelerator inside the node, one direction, 1e9 bytes a second."""
    network_gbit_per_s: float
    """Network of the whole node, 1e9 bits a second."""

    def fabric(self, parameters: Parameters) -> Fabric:
        """Links at the rates that collectives reach."""
        return Fabric(
            self.gpus_per_node,
            Link(self.link_gbytes_per_s * 1e9 * parameters.node_link, parameters.node_latency_seconds),
            Link(self.network_gbit_per_s / 8 * 1e9 * parameters.network, parameters.network_latency_seconds),
        )


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by what takes them. Numbers, or arrays for many layouts."""

    compute: Numbers
    """Seconds of arithmetic on the rank that works longest."""
    tensor_communication: Numbers
    """Seconds of tensor-parallel collectives that computation does not hide."""
    pipeline_communication: Numbers
    """Seconds of sends between stages that computation does not hide."""
    data_communication: Numbers
    """Seconds of gradient reduction and weight gathers that computation does not hide."""
    context_communication: Numbers
    """Seconds of context-parallel traffic that computation does not hide."""
    bubble: Numbers
    """Seconds in which the stage that works longest waits for other stages."""
    optimizer: Numbers
    """Seconds of the optimizer's update."""
    other: Numbers
    """Seconds lost to stragglers, and the fixed cost of a step."""

    @property
    def total(self) -> Numbers:
        """The sum."""
        return (
            self.compute
            + self.tensor_communication
            + self.pipeline_communication
            + self.data_communication
            + self.context_communication
            + self.bubble
            + self.optimizer
            + self.other
        )


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


def predict(shape: DecoderShape, machine: Machine, layout: Layout, parameters: Parameters = FITTED) -> Prediction:
    """Seconds and GiB of one layout.

    Raises:
        HardwareError: the accelerator has no peak for the precision.
        ValueError: more stages than layers.
    """
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    found = step_seconds(shape, machine, layout, parameters)
    breakdown = Breakdown(**{name: float(getattr(found, name)) for name in Breakdown.__dataclass_fields__})
    memory = memory_on(shape, machine, layout, practice)
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


def step_seconds(
    shape: DecoderShape, machine: Machine, layout: AnyLayout, parameters: Parameters = FITTED
) -> StepSeconds:
    """Where the seconds of a step go, for one layout or for many."""
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    return _Step(shape, machine, layout, practice, parameters).seconds()


def memory_of_ranks(shape: DecoderShape, machine: Machine, layout: AnyLayout) -> StageMemory:
    """GiB of the fullest rank with usual kernels, for one layout or for many."""
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    return ModelParallelCostAnalyzer().memory_of_ranks(shape, layout, practice)


def memory_on(shape: DecoderShape, machine: Machine, layout: Layout, practice: Practice) -> MemoryGib:
    """GiB of the fullest rank: with usual kernels where they fit, with as many lean ones as are needed otherwise.

    Runs near the limit use fused or chunked losses and activations. So memory grows without jumps up to what the accelerator
    has, stays there while leaner kernels make room, and exceeds it only where the leanest do not fit.
    """
    analyzer = ModelParallelCostAnalyzer()
    usual = analyzer.memory_of_rank(shape, layout, practice)
    usable = usable_gib(machine)
    if usual.total <= usable:
        return usual
    return between(analyzer.memory_of_rank(shape, layout, practice, lean=True), usual, usable)


def usable_gib(machine: Machine) -> float:
    """What a process gets of an accelerator's memory."""
    return USABLE_MEMORY * machine.accelerator.memory_gib


def fits(memory: MemoryGib, machine: Machine) -> bool:
    """Whether a rank fits, but for rounding."""
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


class _Step:
    """The terms of one step, of one layout or of many. Every method returns seconds."""

    def __init__(
        self, shape: DecoderShape, machine: Machine, layout: AnyLayout, practice: Practice, parameters: Parameters
    ) -> None:
        self.shape, self.layout, self.practice, self.parameters = shape, layout, practice, parameters
        self.fabric = machine.fabric(parameters)
        self.computer = Computer(machine.accelerator, layout.precision, practice, parameters)
        self.analyzer = ModelParallelCostAnalyzer()
        self.layer = self.computer.layer(shape, layout)
        self.head = self.computer.head(shape, layout)
        self.tensor_layer = self._tensor_layer()
        self.context_layer, self.context_hidden = self._context_layer()
        self.per_layer = self.layer.total + self.tensor_layer + self.context_layer
        # weighed by FLOPs and not by seconds, or a faster part could change the split and make the step slower
        self.stages = self.analyzer.stage_spread(shape.layers, layout.pipeline, head_in_layers(shape))
        # ranks are numbered tensor first, then context, data, pipeline: what talks most stays inside a node
        self.reduction = self.fabric.group(layout.data * layout.context, layout.tensor)
        self.neighbours = self.fabric.group(layout.pipeline, layout.tensor * layout.context * layout.data)

    def seconds(self) -> StepSeconds:
        layout, m, stages = self.layout, self.layout.micro_batches, self.stages
        hop, overlapped = self._hop()
        high, low = stages.high * self.per_layer + hop, stages.low * self.per_layer + hop
        last = stages.last * self.per_layer + self.head + hop
        ahead = FORWARD[layout.recompute]
        runs = StageRuns(layout.pipeline, stages.highs, high, low, last, ahead, self._weight_share(last))
        whole, _ = PipelineParallelCostAnalyzer().step_of_runs(runs, m, pipeline_schedule(layout), layout.interleave)
        first = runs.seconds(0)
        # the stage that works longest
        at_last = (last > first) | (layout.pipeline == 1)
        busy, layers = where(at_last, last, first), where(at_last, stages.last, stages.first)
        compute = layers * self.layer.total + where(at_last, self.head, 0.0)
        # what hides context traffic and sends cannot hide gathers and reductions as well; of the stage with least to hide behind,
        # as a stage chosen by its time would let the cover jump where a faster part changes the choice
        bare = self.layer.total - self.context_hidden
        at_front, at_end = stages.least_of_front * bare, stages.last * bare + self.head
        free = where(layout.pipeline == 1, at_end, least(at_front, at_end)) - overlapped
        data, slowed = self._data(stages.most, m * free)
        optimizer = self._optimizer(stages.most)
        nodes = most(1.0, layout.ranks / self.fabric.ranks_per_node)
        late = (whole - m * overlapped + data + slowed + optimizer) * self.parameters.straggler * log2(nodes)
        return StepSeconds(
            compute=m * compute + slowed,
            tensor_communication=m * layers * self.tensor_layer,
            pipeline_communication=m * (hop - overlapped),
            data_communication=data,
            context_communication=m * layers * self.context_layer,
            bubble=most(0.0, whole - m * busy),
            optimizer=optimizer,
            other=late + self.parameters.step_seconds,
        )

    def _weight_share(self, last: Numbers) -> Numbers:
        """Share of the last stage's pass, which has the head besides its layers, that only makes weight gradients."""
        return (self.stages.last * self.layer.weight + self.head / 3) / last

    def _tensor_layer(self) -> Numbers:
        group = self.fabric.group(self.layout.tensor)
        size, count = self.analyzer.tensor_bytes(self.shape, self.layout, self.practice)
        each = 2 * group.all_gather(size) if self.practice.sequence_parallel else group.all_reduce(size)
        hidden = self.parameters.tensor_overlap if self.practice.overlapped_reduction else 0.0
        return count * each * (1 - hidden)

    def _context_layer(self) -> tuple[Numbers, Numbers]:
        """Ring attention (Liu et al. 2023): keys and values pass every rank, forward and twice in backward, behind attention.

        What stays exposed, and what is hidden.
        """
        layout, c = self.layout, self.layout.context
        if c == 1:
            return 0.0, 0.0
        kv = self.shape.kv_heads * (self.shape.hidden // self.shape.heads)
        tokens = layout.micro_batch * self.shape.sequence_length / c
        size = 2 * 2.0 * tokens * kv / layout.tensor
        group = self.fabric.group(c, layout.tensor)
        again = 1 if layout.recompute is Recompute.FULL else 0
        moved = (c - 1) * group.send(size) * (3 + again)
        passes = (3.5 if self.practice.flash_attention else 3.0) + again
        attention = passes * self.layer.attention_forward
        hidden = least(moved, attention)
        return moved - hidden + self.parameters.context_loss * log2(c) * attention, hidden

    def _hop(self) -> tuple[Numbers, Numbers]:
        """Sends of one micro-batch, forward and backward, once a chunk, and what of them computation hides.

        Tensor ranks send a part each. 1F1B waits for its sends. Under interleaving, today's frameworks send one chunk's result
        while the next chunk computes (Megatron's overlap_p2p_comm), which hides as much as that chunk takes; while the pipeline
        fills and drains there is no next chunk, so those sends stay in the bubble.
        """
        layout, chunks = self.layout, self.layout.interleave
        tokens = layout.micro_batch * self.shape.sequence_length / layout.context
        size = self.computer.element_bytes * tokens * self.shape.hidden / layout.tensor
        one = self.neighbours.send(size)
        if not self.practice.overlapped_reduction:
            return 2 * chunks * one, 0.0
        cover = least(self.stages.least_of_front, self.stages.last) / chunks * (self.layer.total - self.context_hidden)
        ahead = cover * FORWARD[layout.recompute]
        hidden = chunks * (least(one, ahead) + least(one, cover - ahead))
        return 2 * chunks * one, where(chunks > 1, hidden, 0.0)

    def _stage_parameters(self, layers: Numbers) -> Numbers:
        return self.analyzer.stage_parameters(
            self.shape, self.layout, layers, first=True, last=self.layout.pipeline == 1
        )

    def _data(self, layers: Numbers, compute: Numbers) -> tuple[Numbers, Numbers]:
        """Exposed gradient and weight traffic, and what hidden traffic slows compute by."""
        layout, p = self.layout, self.parameters
        weights = self._stage_parameters(layers)
        # torch's DDP reduces gradients of fp32 weights; sharded optimizers reduce in the precision of compute, as do fp16 ones
        half = layout.precision is NumberFormat.FP16 or layout.sharding is not StateSharding.DDP
        gradient = float(self.computer.element_bytes) if half else 4.0
        element = float(self.computer.element_bytes)
        if layout.sharding is StateSharding.ZERO3:
            return self._gathered(layers, weights, element, compute)
        if layout.sharding is StateSharding.DDP:
            traffic = self.reduction.all_reduce(gradient * weights)
        else:
            traffic = self.reduction.reduce_scatter(gradient * weights) + self.reduction.all_gather(element * weights)
        if not self.practice.overlapped_reduction:
            return traffic, 0.0
        window = p.reduction_overlap * compute / layout.micro_batches
        hidden = least(traffic * 0.9, window)
        return traffic - hidden, p.gather_slowdown * hidden

    def _gathered(self, layers: Numbers, weights: Numbers, element: float, compute: Numbers) -> tuple[Numbers, Numbers]:
        """ZeRO-3: each unit gathered for forward and again for backward, gradients reduced, every micro-batch.

        Under a pipeline a stage is gathered and reduced once a step.
        """
        layout, p = self.layout, self.parameters
        pieces = most(1, layers)
        unit = element * weights / pieces
        if self.practice.flash_attention:
            one = 2 * self.reduction.all_gather(unit) + self.reduction.reduce_scatter(unit)
        else:
            one = 3 * self._single_adapter(unit)
        times = where(layout.pipeline > 1, 1, layout.micro_batches)
        traffic = times * pieces * one
        # the first gather and the last reduction have nothing to hide behind
        hidden = least(traffic * (1 - 1 / (3 * pieces)), p.gather_overlap * compute)
        return traffic - hidden, p.gather_slowdown * hidden

    def _single_adapter(self, size: Numbers) -> Numbers:
        """A gather as in the ZeRO-3 of 2020 and 2021: per tensor, each rank over its own adapter, not hierarchical."""
        group = self.reduction
        adapter = Path(self.fabric.network.bytes_per_second / self.fabric.ranks_per_node, 0.0)
        return where(group.nodes <= 1, group.all_gather(size), adapter.ring(size, group.size))

    def _optimizer(self, layers: Numbers) -> Numbers:
        """AdamW reads and writes gradients, master weights and both moments, about 34 bytes a weight; its kernels are memory-bound."""
        layout = self.layout
        shared = 1 if layout.sharding is StateSharding.DDP else layout.data * layout.context
        return 34.0 * self._stage_parameters(layers) / shared / self.computer.bytes_per_second


def layer_seconds(
    shape: DecoderShape, machine: Machine, layout: Layout, parameters: Parameters = FITTED
) -> LayerSeconds:
    """Compute of one layer and micro-batch on one rank, seconds."""
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    return Computer(machine.accelerator, layout.precision, practice, parameters).layer(shape, layout)
