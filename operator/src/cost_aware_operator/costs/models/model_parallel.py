"""A model spread over ranks: its shape, the memory it needs, tensor-parallel traffic, layers of each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cost_aware_operator.costs.elementwise import Numbers, Truths, least, where
from cost_aware_operator.costs.models.layout import (
    AnyLayout,
    Layout,
    Practice,
    Recompute,
    StateSharding,
    pipeline_schedule,
)
from cost_aware_operator.costs.models.memory import FRAMEWORK_GIB, GIB, GPU_FRAMEWORK_GIB, MemoryGib, StageMemory
from cost_aware_operator.costs.models.pipeline import PipelineParallelCostAnalyzer
from cost_aware_operator.costs.models.stages import StageLayers, spread
from cost_aware_operator.costs.tables.hardware import NumberFormat


@dataclass(frozen=True)
class DecoderShape:
    """A decoder with grouped-query attention and a feed-forward layer."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Channels of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; fewer than `heads` under grouped-query attention."""
    ffn: int
    """Width of the feed-forward layer."""
    sequence_length: int
    """Tokens of one sequence."""
    vocabulary: int
    """Entries of the vocabulary."""
    gated_mlp: bool = True
    """Whether the feed-forward layer is gated (Llama) or not (GPT)."""
    tied_embeddings: bool = False
    """Whether the head uses the embedding's weights."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention (q, o, k, v), feed-forward, two norms."""
        head_width = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head_width
        return attention + (3 if self.gated_mlp else 2) * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, or of the head: a row of `hidden` for each entry of the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights: layers, embedding, head (unless tied to it) and the last norm."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_parameters + tables * self.embedding_parameters + self.hidden


def head_in_layers(shape: DecoderShape) -> float:
    """Work of the output projection in layers: the ratio of their FLOPs a token, attention halved by the causal mask."""
    return shape.embedding_parameters / (shape.layer_parameters + shape.sequence_length * shape.hidden)


def activation_elements(
    shape: DecoderShape, tensor: Numbers, *, sequence_parallel: bool, lean: bool = False
) -> Numbers:
    """Activation elements that backward needs, for each token and layer, on one rank, without the score matrix.

    Inputs and outputs of both norms (4 h), queries, keys and values, the attention's output, and of the feed-forward layer the
    outputs of its products and the input of the last (3 ffn gated, 2 ffn not): Korthikanti et al. 2022, section 4.1, in
    elements instead of bytes; rotary embedding writes queries and keys once more, and the gate's activation is one more ffn.
    Lean kernels keep neither: rotation is linear, and the activation is computed again from its input. What lies between
    tensor-parallel regions is divided by the degree only under sequence parallelism.
    """
    kv = shape.kv_heads * (shape.hidden // shape.heads)
    rotary = shape.hidden + kv if shape.gated_mlp and not lean else 0
    gate = (3 if lean else 4) if shape.gated_mlp else 2
    inside = 2 * shape.hidden + 2 * kv + rotary + gate * shape.ffn
    outside = 4 * shape.hidden
    return inside / tensor + outside / (tensor if sequence_parallel else 1)


class ModelParallelCostAnalyzer:
    """Memory and traffic of a model on one rank, and its layers over stages."""

    def memory_gib(self, shape: DecoderShape, micro_batch: int) -> MemoryGib:
        """Peak memory of a data-parallel rank that holds the whole model in fp32, in GiB.

        States: 4 bytes a weight for weights, gradients (twice under DDP, whose buckets copy them) and each of AdamW's two
        moments. Activations kept for backward follow Korthikanti et al., "Reducing Activation Recomputation in Large
        Transformer Models" (2022), eq. 2 without the attention matrix, which scaled_dot_product_attention does not keep: 34
        bytes a token and channel at 2 bytes an element, so 68 at 4. Logits are held three times (output, log-softmax,
        gradient).
        """
        tokens = micro_batch * shape.sequence_length
        weights = 4.0 * shape.parameters / GIB
        return MemoryGib(
            weights=weights,
            gradients=2 * weights,
            optimizer=2 * weights,
            activations=68.0 * tokens * shape.hidden * shape.layers / GIB,
            logits=3 * 4.0 * tokens * shape.vocabulary / GIB,
            framework=FRAMEWORK_GIB,
        )

    def memory_of_rank(
        self, shape: DecoderShape, layout: Layout, practice: Practice, *, lean: bool = False
    ) -> MemoryGib:
        """Peak memory of the fullest rank of a layout, in GiB: the first stage (most live micro-batches) or the last (logits).

        `lean`: with kernels that hold least, as runs near the limit use them.
        """
        return self.memory_of_ranks(shape, layout, practice, lean=lean).told()

    def memory_of_ranks(
        self, shape: DecoderShape, layout: AnyLayout, practice: Practice, *, lean: bool = False
    ) -> StageMemory:
        """Memory of the fullest rank as in `memory_of_rank`, for one layout or for many."""
        layers = self.stage_spread(shape.layers, layout.pipeline, head_in_layers(shape))
        only, final = layout.pipeline == 1, layout.pipeline - 1
        first = self._stage(shape, layout, practice, 0, layers.first, first=True, last=only, lean=lean)
        last = self._stage(shape, layout, practice, final, layers.last, first=only, last=True, lean=lean)
        return first.or_fuller(last)

    def _stage(
        self, shape: DecoderShape, layout: AnyLayout, practice: Practice, stage: Numbers, layers: Numbers, *, first: Truths,
        last: Truths, lean: bool,
    ) -> StageMemory:  # fmt: skip
        parameters = self.stage_parameters(shape, layout, layers, first=first, last=last)
        # torch shards by layer, the ZeRO-3 of 2020 and 2021 by tensor
        unit = shape.layer_parameters if practice.flash_attention else shape.hidden * shape.ffn
        states = self._states(parameters, unit / layout.tensor, layout)
        tokens = layout.micro_batch * shape.sequence_length / layout.context
        live = PipelineParallelCostAnalyzer().live_micro_batches(
            stage, layout.pipeline, layout.micro_batches, pipeline_schedule(layout), layout.interleave
        )
        kept, working = self._layer_activations(shape, layout, practice, lean)
        element = 4.0 if layout.precision is NumberFormat.FP32 else 2.0
        # output in compute precision, then cast, log-softmax and their gradient in fp32 (12 bytes beside the first 2)
        each = element + (8.0 if practice.flash_attention else 6.0) + 2.0
        if lean:
            # today's fused losses overwrite the output with its gradient, Megatron's of 2019 a cast of it in fp32
            each = element if practice.flash_attention else element + 4.0
        logits = each * tokens * shape.vocabulary / layout.tensor
        return StageMemory(
            weights=states[0] / GIB,
            gradients=states[1] / GIB,
            optimizer=states[2] / GIB,
            activations=tokens * (kept * layers * live + working) / GIB,
            logits=where(last, logits / GIB, 0.0),
            framework=FRAMEWORK_GIB if layout.precision is NumberFormat.FP32 else GPU_FRAMEWORK_GIB,
        )

    def stage_parameters(
        self, shape: DecoderShape, layout: AnyLayout, layers: Numbers, *, first: Truths, last: Truths
    ) -> Numbers:
        """Number of weights that one tensor rank of a stage holds, before data-parallel ranks share them."""
        own_head = where(last, where(layout.pipeline == 1, 0 if shape.tied_embeddings else 1, 1), 0)
        tables = where(first, 1, 0) + own_head
        return (layers * shape.layer_parameters + tables * shape.embedding_parameters) / layout.tensor

    def _states(self, parameters: Numbers, layer: Numbers, layout: AnyLayout) -> tuple[Numbers, Numbers, Numbers]:
        """Bytes of weights, gradients and optimizer (Rajbhandari et al. 2020, section 3, with gradients in fp32).

        Mixed precision: 2 a weight, 4 a gradient (2 in fp16), 12 for master, momentum and variance. ZeRO-1 divides the 12, ZeRO-2
        also gradients, ZeRO-3 (FSDP) holds fp32 weights as master, divided, and two units gathered (`layer` weights each); a
        pipeline keeps a stage's weights gathered and its gradients whole until its last micro-batch, as gathering for each would
        cost more.
        """
        d = layout.data * layout.context
        full = layout.precision is NumberFormat.FP32
        weight, gradient = (4.0, 4.0) if full else (2.0, 2.0 if layout.precision is NumberFormat.FP16 else 4.0)
        optimizer = 8.0 if full else 12.0
        if layout.sharding is StateSharding.ZERO3:
            piped = layout.pipeline > 1
            gathered = where(piped, parameters, least(parameters, 2 * layer))
            whole_gradients = gradient * where(piped, parameters, least(parameters, layer))
            return weight * gathered, gradient * parameters / d + whole_gradients, optimizer * parameters / d
        if layout.sharding is StateSharding.ZERO2:
            return weight * parameters, gradient * parameters / d, optimizer * parameters / d
        divided = d if layout.sharding is StateSharding.ZERO1 else 1
        return weight * parameters, gradient * parameters, optimizer * parameters / divided

    def _layer_activations(
        self, shape: DecoderShape, layout: AnyLayout, practice: Practice, lean: bool
    ) -> tuple[Numbers, Numbers]:
        """Bytes for each token: those that each layer keeps until backward, and those in use while one layer is computed again."""
        element = 4.0 if layout.precision is NumberFormat.FP32 else 2.0
        whole = element * activation_elements(
            shape, layout.tensor, sequence_parallel=practice.sequence_parallel, lean=lean and practice.flash_attention
        )
        if layout.precision is NumberFormat.FP8 and layout.sharding is not StateSharding.ZERO3:
            whole *= 0.7  # inputs of products are kept in fp8 (Transformer Engine), the rest in bf16
        scores: Numbers = 0.0
        if not practice.flash_attention:
            scores = (2 * element + 1) * shape.heads / layout.tensor * shape.sequence_length / layout.context
        border = element * shape.hidden / (layout.tensor if practice.sequence_parallel else 1)
        if layout.recompute is Recompute.NONE:
            return whole + scores, whole + scores
        if layout.recompute is Recompute.SELECTIVE:
            # torch's selective checkpointing keeps the attention's output and every second product's, about a third;
            # Megatron's drops the score matrix alone
            return (
                (border + 0.35 * (whole - border), whole)
                if practice.keeps_products(layout)
                else (whole, whole + scores)
            )
        return border, 2 * whole + scores

    def tensor_bytes(self, shape: DecoderShape, layout: AnyLayout, practice: Practice) -> tuple[Numbers, Numbers]:
        """Bytes of one tensor-parallel collective, and how many all-reduces a layer and micro-batch needs.

        Two in forward and two in backward of b s h elements each (Shoeybi et al. 2019, section 3), two more where forward is
        computed again. Under sequence parallelism each is a reduce-scatter and an all-gather of the same total.
        """
        element = 4.0 if layout.precision is NumberFormat.FP32 else 2.0
        size = element * layout.micro_batch * shape.sequence_length / layout.context * shape.hidden
        if layout.recompute is not Recompute.FULL:
            return size, 4
        return size, where(layout.pipeline > 1, 4, 6) if practice.flash_attention else 6

    def stage_layers(self, layers: int, stages: int, head_in_layers: float = 0.0) -> tuple[int, ...]:
        """Layers of each stage: even if they divide, as frameworks split them; else as `spread` balances them, with the head.

        Raises:
            ValueError: fewer layers than stages.
        """
        if not 1 <= stages <= layers:
            raise ValueError(f"{stages} stages need as many layers, got {layers}: write {layers} stages or fewer")
        return self.stage_spread(layers, stages, head_in_layers).counts()

    def stage_spread(self, layers: int, stages: Numbers, head_in_layers: Numbers = 0.0) -> StageLayers:
        """Layers of each stage as in `stage_layers`, for one layout or for many."""
        return spread(layers, stages, head_in_layers)

    def distribute(self, costs: Sequence[float], stages: int) -> tuple[int, ...]:
        """Number of layers of each stage that makes the most expensive stage as cheap as possible; layers stay in order.

        Dynamic programming over (layers placed, stages used), O(layers^2 x stages). `costs` has one entry a layer, in order;
        add the embedding's cost to the first and the head's to the last. Every stage gets one layer or more.

        Raises:
            ValueError: fewer layers than stages, or a cost that is negative or no number.
        """
        n = len(costs)
        if not 1 <= stages <= n:
            raise ValueError(f"{stages} stages need as many layers, got {n}: write {n} stages or fewer")
        if not all(math.isfinite(c) and c >= 0 for c in costs):
            raise ValueError("layer costs must be finite and not negative")
        prefix = [0.0]
        for cost in costs:
            prefix.append(prefix[-1] + cost)
        best = list(prefix)
        cuts: list[list[int]] = []
        for used in range(2, stages + 1):
            row, cut = [math.inf] * (n + 1), [0] * (n + 1)
            for end in range(used, n + 1):
                for start in range(used - 1, end):
                    worst = max(best[start], prefix[end] - prefix[start])
                    if worst < row[end]:
                        row[end], cut[end] = worst, start
            best = row
            cuts.append(cut)
        counts, end = [], n
        for cut in reversed(cuts):
            counts.append(end - cut[end])
            end = cut[end]
        return tuple(reversed([*counts, end]))
