"""Bundled decoder transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; the head tied or not.

Any stage of a pipeline and any rank of the tensor axis builds its own part of it. Layers sit in a ModuleDict keyed by
their global index, so a parameter has one name, whichever rank holds it. Only parameters are state: the rotary tables are
computed, so a checkpoint has no buffers to lose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name the whole field uses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cost_aware_trainer.contract import ModelPlan, Precision, Recompute, StrategyPlan
from cost_aware_trainer.distributed.layout import ModelStage
from cost_aware_trainer.distributed.tensor_parallel import TensorAxis
from cost_aware_trainer.telemetry.traffic import Traffic

COMPUTE_TYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True)
class PartShape:
    """Facts that all modules of one rank's part share."""

    model: ModelPlan
    """Shape of the whole model."""
    tensor: TensorAxis
    """Place of this rank on the tensor axis."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass computes again."""
    dtype: torch.dtype = torch.float32
    """Number type of activations and products."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.model.hidden // self.model.heads


def whole(model: ModelPlan) -> tuple[PartShape, ModelStage]:
    """Makes the shape and the stage of a model that one rank holds alone."""
    alone = TensorAxis(None, 0, 1, Traffic(torch.device("cpu")))
    return PartShape(model, alone), ModelStage(0, range(model.layers), is_first=True, is_last=True)


def shape_of(model: ModelPlan, strategy: StrategyPlan, tensor: TensorAxis) -> PartShape:
    """Makes the shape that a plan asks for on this rank."""
    return PartShape(model, tensor, strategy.recompute, COMPUTE_TYPES[strategy.precision])


class _CastBefore(torch.autograd.Function):
    """Use of a weight by its cast of this step.

    Each use is a node of its own in the backward pass, which works through nodes from the last one made to the first. Were the
    one cast at the step's start the node, then all gradients would wait in bf16 until the whole pass is done, and no bucket
    could be sent before.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class CastWeight(nn.Module):
    """Module of one weight that is used in the plan's precision and kept in fp32."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self._dtype = dtype
        self._cast: Tensor | None = None

    def cast(self) -> None:
        """Casts the weight once, for all passes until `drop_cast`. Gradients of the passes still add up in fp32."""
        if self.weight.dtype != self._dtype:
            self._cast = self.weight.detach().to(self._dtype)

    def drop_cast(self) -> None:
        """Ends what `cast` began: the weight may change."""
        self._cast = None

    def _cast_weight(self) -> Tensor:
        if self._cast is None:
            return self.weight.to(self._dtype)
        cast: Tensor = _CastBefore.apply(self.weight, self._cast)
        return cast


class Matrix(CastWeight):
    """Linear map without bias, or one tensor-parallel rank's part of it, computed in the plan's precision."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__((outputs, inputs), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, inputs) to (…, outputs)."""
        return F.linear(x.to(self._dtype), self._cast_weight())


class RMSNorm(CastWeight):
    """Root-mean-square normalisation with a learned scale; (..., hidden) to the same shape and type."""

    def __init__(self, hidden: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__((hidden,), dtype)
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self._cast_weight(), eps=self._epsilon)


class Embedding(CastWeight):
    """Rows of the vocabulary, and, where the head is tied to it, the head."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__((rows, hidden), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, hidden) to logits (…, rows)."""
        return F.linear(x, self._cast_weight())


class Attention(nn.Module):
    """Causal self-attention in which `heads / kv_heads` query heads share one key and value head."""

    def __init__(self, shape: PartShape) -> None:
        super().__init__()
        model, degree, size = shape.model, shape.tensor.degree, shape.head_size
        self._heads, self._kv_heads, self._head_size = model.heads // degree, model.kv_heads // degree, size
        self._recomputes = shape.recompute is Recompute.SELECTIVE
        self.query = Matrix(model.hidden, self._heads * size, shape.dtype)
        self.key = Matrix(model.hidden, self._kv_heads * size, shape.dtype)
        self.value = Matrix(model.hidden, self._kv_heads * size, shape.dtype)
        self.output = Matrix(self._heads * size, model.hidden, shape.dtype)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Maps (samples, positions, hidden) to this rank's part of the sum. `rotary` is cosines and sines of all positions."""
        parts = self.query(x), self.key(x), self.value(x)
        if self._recomputes and torch.is_grad_enabled():
            attended = checkpoint(self._attend, *parts, *rotary, use_reentrant=False)
        else:
            attended = self._attend(*parts, *rotary)
        joined: Tensor = self.output(attended)
        return joined

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps projections (samples, positions, heads × head_size) to attended values of `query`'s shape."""
        query, key, value = (
            x.view(*x.shape[:2], heads, self._head_size).transpose(1, 2)
            for x, heads in ((query, self._heads), (key, self._kv_heads), (value, self._kv_heads))
        )
        rotary = cosine.to(query.dtype), sine.to(query.dtype)
        attended = F.scaled_dot_product_attention(
            rotate(query, rotary),
            rotate(key, rotary),
            value,
            is_causal=True,
            enable_gqa=self._heads != self._kv_heads,
        )
        return attended.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, shape: PartShape) -> None:
        super().__init__()
        hidden, ffn = shape.model.hidden, shape.model.ffn // shape.tensor.degree
        self.gate = Matrix(hidden, ffn, shape.dtype)
        self.up = Matrix(hidden, ffn, shape.dtype)
        self.down = Matrix(ffn, hidden, shape.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., hidden) to this rank's part of the sum."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """Pre-normalised residual layer, on this rank's positions."""

    def __init__(self, shape: PartShape) -> None:
        super().__init__()
        self._tensor = shape.tensor
        self.attention_norm = RMSNorm(shape.model.hidden, shape.model.rms_norm_eps, shape.dtype)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.model.hidden, shape.model.rms_norm_eps, shape.dtype)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Maps (samples, positions / tensor degree, hidden) to the same shape."""
        axis = self._tensor
        x = x + axis.scatter_sum(self.attention(axis.gather(self.attention_norm(x)), rotary))
        return x + axis.scatter_sum(self.feed_forward(axis.gather(self.feed_forward_norm(x))))


class Decoder(nn.Module):
    """Pipeline stage of the model: from tokens if it is the first, to logits if it is the last."""

    def __init__(self, shape: PartShape, stage: ModelStage) -> None:
        super().__init__()
        model, rows = shape.model, shape.model.vocabulary // shape.tensor.degree
        self._shape, self._stage = shape, stage
        is_tied = model.tied_embeddings
        if stage.is_first or (stage.is_last and is_tied):
            self.embedding = Embedding(rows, model.hidden, shape.dtype)
        self.layers = nn.ModuleDict({str(index): Layer(shape) for index in stage.layers})
        if stage.is_last:
            self.norm = RMSNorm(model.hidden, model.rms_norm_eps, shape.dtype)
        if stage.is_last and not is_tied:
            self.head = Matrix(model.hidden, rows, shape.dtype)
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens (samples, positions), or the stage before's output, to the next stage's input, or to logits.

        Between stages: (samples, positions / tensor degree, hidden). Logits: (samples, positions, vocabulary / tensor
        degree).
        """
        axis = self._shape.tensor
        if self._stage.is_first:
            # only the rows that are used are cast
            x = axis.embed(x, self.embedding.weight, self._shape.dtype)
        rotary = self._rotary_tables(x.shape[1] * axis.degree, x.device)
        for layer in self.layers.values():
            if self._shape.recompute is Recompute.FULL and torch.is_grad_enabled():
                x = checkpoint(layer, x, rotary, use_reentrant=False)
            else:
                x = layer(x, rotary)
        if not self._stage.is_last:
            return x
        x = axis.gather(self.norm(x))
        logits: Tensor = self.embedding(x) if self._shape.model.tied_embeddings else self.head(x)
        return logits

    @contextmanager
    def weights_cast(self) -> Iterator[None]:
        """Casts each weight once for all passes inside the block, in which no weight may change."""
        modules = [module for module in self.modules() if isinstance(module, CastWeight)]
        heads = self._stage.is_last and self._shape.model.tied_embeddings
        chosen = [module for module in modules if heads or not isinstance(module, Embedding)]
        for module in chosen:
            module.cast()
        try:
            yield
        finally:
            for module in chosen:
                module.drop_cast()

    def _rotary_tables(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines (positions, head_size / 2), kept between calls outside of the module's state."""
        if self._rotary is None or self._rotary[0].shape[0] != positions or self._rotary[0].device != device:
            self._rotary = rotary_tables(positions, self._shape.head_size, device, self._shape.model.rope_theta)
        return self._rotary


def rotary_tables(positions: int, head_size: int, device: torch.device, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles (RoFormer, 2104.09864), (positions, head_size / 2) in float32."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates each half-pair of (samples, heads, positions, head_size) by its position's angles."""
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def initial_value(name: str, shape: tuple[int, ...], model: ModelPlan, seed: int) -> Tensor:
    """First value of a whole parameter, from the run's seed and the parameter's own name.

    It depends neither on the order in which modules are built nor on the rank that builds a part of it. Residual outputs are
    scaled by 1 / sqrt(2 × layers), as in GPT-2.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    deviation = 0.02 if name == "head.weight" else 1.0 / math.sqrt(shape[1])
    if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
        deviation /= math.sqrt(2 * model.layers)
    return torch.randn(shape, generator=generator) * deviation


def parameter_shapes(model: ModelPlan) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of a plan's model, without allocating them."""
    with torch.device("meta"):
        decoder = Decoder(*whole(model))
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def model_flops_per_token(model: ModelPlan) -> float:
    """Floating-point operations that one trained token needs, forward and backward, as the MFU of 2204.02311 counts them.

    They are 6 for each weight in a matrix product (the embedding's lookup is none, the head is one), and 12 × layers × hidden ×
    sequence length for attention, without a reduction for causality. Recomputation does not count.
    """
    shapes = parameter_shapes(model)
    multiplied = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) > 1 and "embedding" not in name)
    if model.tied_embeddings:
        multiplied += model.vocabulary * model.hidden
    return 6.0 * multiplied + 12.0 * model.layers * model.hidden * model.sequence_length
