"""The bundled decoder transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head.

Layers sit in a ModuleDict keyed by their global index, so that a layer's parameter names are the same whichever ranks
hold it. Nothing but parameters is state: the rotary tables are computed, so a checkpoint has no buffers to lose.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F  # noqa: N812  the name the whole field uses
from torch import Tensor, nn

from cost_aware_trainer.contract import ModelPlan

ROTARY_BASE = 10_000.0


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale; (..., hidden) to the same shape."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, eps=1e-6)


class Attention(nn.Module):
    """Causal self-attention in which `heads / kv_heads` query heads share one key and value head."""

    def __init__(self, model: ModelPlan) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads, model.kv_heads
        self.head_size = model.hidden // model.heads
        self.query = nn.Linear(model.hidden, model.heads * self.head_size, bias=False)
        self.key = nn.Linear(model.hidden, model.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(model.hidden, model.kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(model.heads * self.head_size, model.hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(samples, positions, hidden) to the same shape; `rotary` is the cosines and sines of all positions."""
        samples, positions, _ = x.shape
        query = self.query(x).view(samples, positions, self.heads, self.head_size).transpose(1, 2)
        key = self.key(x).view(samples, positions, self.kv_heads, self.head_size).transpose(1, 2)
        value = self.value(x).view(samples, positions, self.kv_heads, self.head_size).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            rotate(query, rotary),
            rotate(key, rotary),
            value,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        joined: Tensor = self.output(attended.transpose(1, 2).reshape(samples, positions, -1))
        return joined


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, model: ModelPlan) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same shape."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """One pre-normalised residual layer."""

    def __init__(self, model: ModelPlan) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden)
        self.attention = Attention(model)
        self.feed_forward_norm = RMSNorm(model.hidden)
        self.feed_forward = FeedForward(model)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(samples, positions, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotary)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Decoder(nn.Module):
    """The whole model: tokens to logits."""

    def __init__(self, model: ModelPlan) -> None:
        super().__init__()
        self.head_size = model.hidden // model.heads
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in range(model.layers)})
        self.norm = RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (samples, positions) of int64 to logits (samples, positions, vocabulary)."""
        rotary = self._rotary_tables(tokens.shape[1], tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _rotary_tables(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines (positions, head_size / 2), kept between calls outside of the module's state."""
        if self._rotary is None or self._rotary[0].shape[0] != positions or self._rotary[0].device != device:
            self._rotary = rotary_tables(positions, self.head_size, device)
        return self._rotary


def rotary_tables(positions: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles (RoFormer, 2104.09864), (positions, head_size / 2) in float32."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each half-pair of (samples, heads, positions, head_size) by its position's angles."""
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over all positions, in nats, computed in float32 whatever the logits' type."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def initialise(decoder: Decoder, seed: int) -> None:
    """Fills every parameter from the run's seed and the parameter's own name.

    So a parameter's first value depends neither on the order in which modules are built nor on which rank builds them.
    Residual outputs are scaled by 1 / sqrt(2 × layers), as in GPT-2.
    """
    residual_scale = 1.0 / math.sqrt(2 * max(1, len(decoder.layers)))
    for name, parameter in decoder.named_parameters():
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            deviation = 0.02 if name == "head.weight" else 1.0 / math.sqrt(parameter.shape[1])
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                deviation *= residual_scale
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def parameter_shapes(model: ModelPlan) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of a plan's model, without allocating them."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
