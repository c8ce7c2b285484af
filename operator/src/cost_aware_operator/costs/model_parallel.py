"""Memory of a rank: weights, gradients, optimizer, activations, logits and the framework itself."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30
FRAMEWORK_GIB = 0.6
"""A rank's process with torch imported and a process group up, measured at 0.45 to 0.6 GiB resident on CPU; on a GPU the CUDA
context takes about as much."""


@dataclass(frozen=True)
class DecoderShape:
    """A decoder with grouped-query attention and a gated feed-forward layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence_length: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Weights: attention (q, o, k, v), gate, up and down, two norms a layer; embedding, head and last norm."""
        head_width = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head_width
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True)
class MemoryGib:
    """Peak memory of one rank by what holds it."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    framework: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.framework


class ModelParallelCostAnalyzer:
    """What a model needs on one rank."""

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
