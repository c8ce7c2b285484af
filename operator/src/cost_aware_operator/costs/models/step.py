"""Seconds of one step, term by term, for one layout or for many at once."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.costs.elementwise import Numbers, least, log2, most, where
from cost_aware_operator.costs.models.communication import Path
from cost_aware_operator.costs.models.compute import Computer, Parameters
from cost_aware_operator.costs.models.layout import AnyLayout, Practice, Recompute, StateSharding, pipeline_schedule
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape, ModelParallelCostAnalyzer, head_in_layers
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.pipeline import PipelineParallelCostAnalyzer, StageRuns
from cost_aware_operator.costs.tables.hardware import NumberFormat

FORWARD = {Recompute.NONE: 1 / 3, Recompute.SELECTIVE: 1 / 3, Recompute.FULL: 1 / 4}
"""Forward's share of a pass, by FLOPs: the same on every machine, so that a faster part never lengthens a wait in the pipeline."""


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


def step_seconds(
    shape: DecoderShape, machine: Machine, layout: AnyLayout, parameters: Parameters = FITTED
) -> StepSeconds:
    """Seconds of a step by what takes them, for one layout or for many."""
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    return _StepTerms(shape, machine, layout, practice, parameters).seconds()


class _StepTerms:
    """Terms of one step, for one layout or for many. Methods return seconds unless their name says otherwise."""

    def __init__(
        self, shape: DecoderShape, machine: Machine, layout: AnyLayout, practice: Practice, parameters: Parameters
    ) -> None:
        self.shape, self.layout, self.practice, self.parameters = shape, layout, practice, parameters
        self.fabric = machine.fabric(parameters)
        self.computer = Computer(machine.accelerator, layout.precision, practice, parameters)
        self.analyzer = ModelParallelCostAnalyzer()
        self.layer = self.computer.layer(shape, layout)
        self.head_seconds = self.computer.head(shape, layout)
        self.tensor_layer_seconds = self._tensor_layer_seconds()
        self.context_layer_seconds, self.context_hidden_seconds = self._context_layer_seconds()
        self.per_layer_seconds = self.layer.total + self.tensor_layer_seconds + self.context_layer_seconds
        # weighed by FLOPs and not by seconds, or a faster part could change the split and make the step slower
        self.stages = self.analyzer.stage_spread(shape.layers, layout.pipeline, head_in_layers(shape))
        # ranks are numbered tensor first, then context, data, pipeline: what talks most stays inside a node
        self.reduction = self.fabric.group(layout.data * layout.context, layout.tensor)
        self.neighbours = self.fabric.group(layout.pipeline, layout.tensor * layout.context * layout.data)

    def seconds(self) -> StepSeconds:
        layout, m, stages = self.layout, self.layout.micro_batches, self.stages
        hop_seconds, overlapped_seconds = self._hop()
        high_seconds = stages.high * self.per_layer_seconds + hop_seconds
        low_seconds = stages.low * self.per_layer_seconds + hop_seconds
        last_seconds = stages.last * self.per_layer_seconds + self.head_seconds + hop_seconds
        forward_share = FORWARD[layout.recompute]
        weight_share = self._weight_share(last_seconds)
        runs = StageRuns(
            layout.pipeline, stages.highs, high_seconds, low_seconds, last_seconds, forward_share, weight_share
        )
        schedule = pipeline_schedule(layout)
        whole_seconds, _ = PipelineParallelCostAnalyzer().step_of_runs(runs, m, schedule, layout.interleave)
        first_seconds = runs.seconds(0)
        # the stage that works longest
        at_last = (last_seconds > first_seconds) | (layout.pipeline == 1)
        busy_seconds, layers = where(at_last, last_seconds, first_seconds), where(at_last, stages.last, stages.first)
        compute_seconds = layers * self.layer.total + where(at_last, self.head_seconds, 0.0)
        # computation that hides context traffic and sends cannot hide gathers and reductions too. The stage with the least cover
        # counts: a stage chosen by its time would let the cover jump where a faster part changes the choice
        bare_seconds = self.layer.total - self.context_hidden_seconds
        front_seconds = stages.least_of_front * bare_seconds
        end_seconds = stages.last * bare_seconds + self.head_seconds
        free_seconds = where(layout.pipeline == 1, end_seconds, least(front_seconds, end_seconds)) - overlapped_seconds
        data_seconds, slowed_seconds = self._data(stages.most, m * free_seconds)
        optimizer_seconds = self._optimizer(stages.most)
        nodes = most(1.0, layout.ranks / self.fabric.ranks_per_node)
        punctual_seconds = whole_seconds - m * overlapped_seconds + data_seconds + slowed_seconds + optimizer_seconds
        late_seconds = punctual_seconds * self.parameters.straggler * log2(nodes)
        return StepSeconds(
            compute=m * compute_seconds + slowed_seconds,
            tensor_communication=m * layers * self.tensor_layer_seconds,
            pipeline_communication=m * (hop_seconds - overlapped_seconds),
            data_communication=data_seconds,
            context_communication=m * layers * self.context_layer_seconds,
            bubble=most(0.0, whole_seconds - m * busy_seconds),
            optimizer=optimizer_seconds,
            other=late_seconds + self.parameters.step_seconds,
        )

    def _weight_share(self, last_seconds: Numbers) -> Numbers:
        """Share of the last stage's pass, head included, that only makes weight gradients."""
        return (self.stages.last * self.layer.weight_gradients + self.head_seconds / 3) / last_seconds

    def _tensor_layer_seconds(self) -> Numbers:
        group = self.fabric.group(self.layout.tensor)
        size_bytes, count = self.analyzer.tensor_bytes(self.shape, self.layout, self.practice)
        each_seconds = (
            2 * group.all_gather(size_bytes) if self.practice.sequence_parallel else group.all_reduce(size_bytes)
        )
        hidden_share = self.parameters.tensor_overlap if self.practice.overlapped_reduction else 0.0
        return count * each_seconds * (1 - hidden_share)

    def _context_layer_seconds(self) -> tuple[Numbers, Numbers]:
        """Ring attention (Liu et al. 2023): keys and values pass every rank, forward and twice in backward, behind attention.

        Returns the exposed seconds and the hidden ones.
        """
        layout, c = self.layout, self.layout.context
        if c == 1:
            return 0.0, 0.0
        kv = self.shape.kv_heads * (self.shape.hidden // self.shape.heads)
        tokens = layout.micro_batch * self.shape.sequence_length / c
        size_bytes = 2 * 2.0 * tokens * kv / layout.tensor
        group = self.fabric.group(c, layout.tensor)
        again = 1 if layout.recompute is Recompute.FULL else 0
        moved_seconds = (c - 1) * group.send(size_bytes) * (3 + again)
        passes = (3.5 if self.practice.flash_attention else 3.0) + again
        attention_seconds = passes * self.layer.attention_forward
        hidden_seconds = least(moved_seconds, attention_seconds)
        lost_seconds = self.parameters.context_loss * log2(c) * attention_seconds
        return moved_seconds - hidden_seconds + lost_seconds, hidden_seconds

    def _hop(self) -> tuple[Numbers, Numbers]:
        """Seconds of one micro-batch's sends, forward and backward, once a chunk; and the part that computation hides.

        Each tensor rank sends its part. 1F1B waits for its sends. Under interleaving, today's frameworks send one chunk's result
        while the next chunk computes (Megatron's overlap_p2p_comm), which hides as much as that chunk takes; while the pipeline
        fills and drains there is no next chunk, so those sends stay in the bubble.
        """
        layout, chunks = self.layout, self.layout.interleave
        tokens = layout.micro_batch * self.shape.sequence_length / layout.context
        size_bytes = self.computer.element_bytes * tokens * self.shape.hidden / layout.tensor
        send_seconds = self.neighbours.send(size_bytes)
        if not self.practice.overlapped_reduction:
            return 2 * chunks * send_seconds, 0.0
        chunk_layers = least(self.stages.least_of_front, self.stages.last) / chunks
        cover_seconds = chunk_layers * (self.layer.total - self.context_hidden_seconds)
        forward_seconds = cover_seconds * FORWARD[layout.recompute]
        hidden_seconds = chunks * (
            least(send_seconds, forward_seconds) + least(send_seconds, cover_seconds - forward_seconds)
        )
        return 2 * chunks * send_seconds, where(chunks > 1, hidden_seconds, 0.0)

    def _stage_parameters(self, layers: Numbers) -> Numbers:
        return self.analyzer.stage_parameters(
            self.shape, self.layout, layers, first=True, last=self.layout.pipeline == 1
        )

    def _data(self, layers: Numbers, compute_seconds: Numbers) -> tuple[Numbers, Numbers]:
        """Exposed seconds of gradient and weight traffic, and seconds by which hidden traffic slows compute."""
        layout, p = self.layout, self.parameters
        weights = self._stage_parameters(layers)
        # torch's DDP reduces gradients of fp32 weights; sharded optimizers reduce in the precision of compute, as do fp16 ones
        half = layout.precision is NumberFormat.FP16 or layout.sharding is not StateSharding.DDP
        gradient_bytes = float(self.computer.element_bytes) if half else 4.0
        element_bytes = float(self.computer.element_bytes)
        if layout.sharding is StateSharding.ZERO3:
            return self._gathered(layers, weights, element_bytes, compute_seconds)
        if layout.sharding is StateSharding.DDP:
            traffic_seconds = self.reduction.all_reduce(gradient_bytes * weights)
        else:
            reduce_seconds = self.reduction.reduce_scatter(gradient_bytes * weights)
            traffic_seconds = reduce_seconds + self.reduction.all_gather(element_bytes * weights)
        if not self.practice.overlapped_reduction:
            return traffic_seconds, 0.0
        window_seconds = p.reduction_overlap * compute_seconds / layout.micro_batches
        hidden_seconds = least(traffic_seconds * 0.9, window_seconds)
        return traffic_seconds - hidden_seconds, p.gather_slowdown * hidden_seconds

    def _gathered(
        self, layers: Numbers, weights: Numbers, element_bytes: float, compute_seconds: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Exposed seconds under ZeRO-3, and seconds by which hidden traffic slows compute.

        Each unit is gathered for forward and again for backward, and its gradients are reduced, in every micro-batch.
        Under a pipeline a stage is gathered and reduced once a step.
        """
        layout, p = self.layout, self.parameters
        pieces = most(1, layers)
        unit_bytes = element_bytes * weights / pieces
        if self.practice.flash_attention:
            unit_seconds = 2 * self.reduction.all_gather(unit_bytes) + self.reduction.reduce_scatter(unit_bytes)
        else:
            unit_seconds = 3 * self._single_adapter(unit_bytes)
        times = where(layout.pipeline > 1, 1, layout.micro_batches)
        traffic_seconds = times * pieces * unit_seconds
        # the first gather and the last reduction have nothing to hide behind
        hidden_seconds = least(traffic_seconds * (1 - 1 / (3 * pieces)), p.gather_overlap * compute_seconds)
        return traffic_seconds - hidden_seconds, p.gather_slowdown * hidden_seconds

    def _single_adapter(self, size_bytes: Numbers) -> Numbers:
        """Seconds of a gather as in the ZeRO-3 of 2020 and 2021: per tensor, each rank over its own adapter, not hierarchical."""
        group = self.reduction
        adapter = Path(self.fabric.network.bytes_per_second / self.fabric.ranks_per_node, 0.0)
        return where(group.nodes <= 1, group.all_gather(size_bytes), adapter.ring(size_bytes, group.size))

    def _optimizer(self, layers: Numbers) -> Numbers:
        """Seconds of AdamW, which is memory-bound.

        It reads and writes gradients, master weights and both moments, about 34 bytes a weight.
        """
        layout = self.layout
        shared = 1 if layout.sharding is StateSharding.DDP else layout.data * layout.context
        return 34.0 * self._stage_parameters(layers) / shared / self.computer.bytes_per_second
