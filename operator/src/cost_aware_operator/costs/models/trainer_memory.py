"""Memory of a rank of the bundled trainer. Other frameworks do things otherwise, so their published runs say little of it.

tests/layouts/test_large_plans.py runs the trainer's steps of large plans on tensors without contents, and holds these formulas to what
is found there.
"""

from __future__ import annotations

from cost_aware_operator.costs.elementwise import Numbers, Truths, least, most, where
from cost_aware_operator.costs.models.layout import AnyLayout, Recompute, StateSharding, pipeline_schedule
from cost_aware_operator.costs.models.memory import FRAMEWORK_GIB, GIB, GPU_FRAMEWORK_GIB, StageMemory
from cost_aware_operator.costs.models.model_parallel import DecoderShape, ModelParallelCostAnalyzer, head_in_layers
from cost_aware_operator.costs.models.pipeline import PipelineParallelCostAnalyzer, PipelineSchedule
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration, NumberFormat

GATHERED_STAGES = 3
"""Stages of a rank whose sharded weights torch keeps gathered at a time, of several."""


def trainer_memory(
    shape: DecoderShape, layout: AnyLayout, generation: AcceleratorGeneration | None = None
) -> StageMemory:
    """Peak memory of the fullest rank, the first stage's or the last's, for one layout or for many.

    It is that of several micro-batches. With a single one no gradient is held yet where activations are most, and it is less.
    `generation`: that of the accelerator; without it, kernels are those that hold least.
    """
    analyzer = ModelParallelCostAnalyzer()
    layers = analyzer.stage_spread(shape.layers, layout.pipeline, head_in_layers(shape))
    only, final = layout.pipeline == 1, layout.pipeline - 1
    scores = score_bytes(shape, layout, generation)
    first = _stage(shape, layout, scores, 0, layers.first, first=True, last=only)
    return first.or_fuller(_stage(shape, layout, scores, final, layers.last, first=only, last=True))


def score_bytes(shape: DecoderShape, layout: AnyLayout, generation: AcceleratorGeneration | None) -> Numbers:
    """Bytes of one layer's attention scores for each token on one rank; 0 where a fused kernel never writes them.

    On GPUs query heads that share keys have a fused kernel in half precision alone: torch's documentation of
    `scaled_dot_product_attention` names flash attention and the plain kernel for `enable_gqa`. Not measured here.
    """
    cpu = generation in (None, AcceleratorGeneration.CPU)
    if cpu or layout.precision is not NumberFormat.FP32 or shape.kv_heads == shape.heads:
        return 0.0
    return 4.0 * shape.heads / layout.tensor * shape.sequence_length


def layer_elements(shape: DecoderShape, tensor: Numbers) -> Numbers:
    """Elements that one layer keeps for its backward pass, for each token, on one rank.

    Divided by the tensor degree: inputs of both norms, queries, keys and values, attention's output, and of the feed-forward layer
    gate, up, the activated gate, and their product. Rotated queries and keys replace those before. Not divided: both norms'
    outputs, which are gathered for the products behind them and stay so.
    """
    kv = shape.kv_heads * (shape.hidden // shape.heads)
    split = 2 * shape.hidden + 2 * shape.hidden + 2 * kv + 4 * shape.ffn
    return split / tensor + 2 * shape.hidden


def _stage(
    shape: DecoderShape,
    layout: AnyLayout,
    scores: Numbers,
    stage: Numbers,
    layers: Numbers,
    *,
    first: Truths,
    last: Truths,
) -> StageMemory:
    element = _element(layout)
    schedule = pipeline_schedule(layout)
    tokens = layout.micro_batch * shape.sequence_length / layout.context
    live = PipelineParallelCostAnalyzer().live_micro_batches(
        stage, layout.pipeline, layout.micro_batches, schedule, layout.interleave
    )
    whole = element * layer_elements(shape, layout.tensor)
    # gradients of gate and up, while one layer's are made
    kept, working = whole, 2 * element * shape.ffn / layout.tensor
    working += 2 * scores
    if layout.recompute is Recompute.NONE:
        kept += scores
    if layout.recompute is Recompute.FULL:
        kept, working = element * shape.hidden / layout.tensor, working + whole
    # the loss writes the gradient over them; GPipe does all forward passes before the first loss is used
    piped_at_once = where(layout.pipeline > 1, layout.micro_batches, 1) if schedule is PipelineSchedule.GPIPE else 1
    logits = where(last, element * tokens * shape.vocabulary / layout.tensor * piped_at_once, 0.0)
    weights, gradients, optimizer = _states(shape, layout, layers, logits, first=first, last=last)
    return StageMemory(
        weights=weights / GIB,
        gradients=gradients / GIB,
        optimizer=optimizer / GIB,
        activations=tokens * (kept * layers * live + working) / GIB,
        logits=logits / GIB,
        framework=FRAMEWORK_GIB if layout.precision is NumberFormat.FP32 else GPU_FRAMEWORK_GIB,
    )


def _element(layout: AnyLayout) -> float:
    return 4.0 if layout.precision is NumberFormat.FP32 else 2.0


def _states(
    shape: DecoderShape, layout: AnyLayout, layers: Numbers, logits: Numbers, *, first: Truths, last: Truths
) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes of weights in the precision of compute, of gradients, and of the optimizer, fp32 weights beside bf16 ones included.

    A gradient is made in the precision of compute and then added to those in fp32. The head's is as large as several layers', and is
    made when all activations are still held, but logits no more.
    """
    parameters = ModelParallelCostAnalyzer().stage_parameters(shape, layout, layers, first=first, last=last)
    table, element = shape.embedding_parameters / layout.tensor, _element(layout)
    made = 4.0 if element == 4.0 else 4.0 + element
    optimizer = (8.0 if element == 4.0 else 12.0) * parameters
    head = where(last, table, 0.0)
    # of an embedding's weights only the rows that are used are cast
    rows_only = where(first, where(last, 0.0 if shape.tied_embeddings else table, table), 0.0)
    weights = element * parameters if element == 4.0 else element * (parameters - rows_only)
    gradients = 4.0 * parameters + most(0.0, made * head - logits)
    if layout.sharding is StateSharding.DDP:
        return weights, gradients, optimizer
    own_weights, own_gradients = _gathered(shape, layout, parameters, first=first, last=last)
    alone = layout.data == 1
    return (
        where(alone, weights, own_weights),
        where(alone, gradients, own_gradients + element * head),
        optimizer / layout.data,
    )


def _gathered(
    shape: DecoderShape, layout: AnyLayout, parameters: Numbers, *, first: Truths, last: Truths
) -> tuple[Numbers, Numbers]:
    """Bytes of gathered weights and of gradients where replicas share states.

    Layers are gathered one by one. Embedding, last norm and head go together, and are held twice while they are copied out of the
    buffer in which they came. A pipeline sums gradients over replicas when all its micro-batches are done.
    """
    element, piped = _element(layout), layout.pipeline > 1
    table, layer = shape.embedding_parameters / layout.tensor, shape.layer_parameters / layout.tensor
    in_stages = element * parameters * least(1.0, GATHERED_STAGES / layout.interleave)
    if layout.sharding is StateSharding.ZERO1:
        return where(piped, in_stages, element * parameters), 4.0 * parameters
    # a layer's gradients as they are made, and in fp32 as they are sent
    gradients = where(piped, 4.0 * parameters, 4.0 * parameters / layout.data + (element + 4.0) * layer)
    if layout.sharding is StateSharding.ZERO2:
        return where(piped, in_stages, element * parameters), gradients
    tables = table * where(last, 1.0 if shape.tied_embeddings else where(first, 2.0, 1.0), where(first, 1.0, 0.0))
    gathered = element * least(parameters, tables + most(tables, 2 * layer))
    return where(piped, in_stages, gathered), gradients
