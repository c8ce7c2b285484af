"""Seconds of arithmetic: matrix products, attention, memory-bound kernels; model FLOPs.

A matrix product takes F/(e P) + D/(b M): its FLOPs at the fraction e of the peak P that large products reach, plus its operands
and result through memory at the fraction b of the bandwidth M. So efficiency falls with size by arithmetic intensity alone
(a roofline whose corner is rounded), and e and b are the only parameters of a GPU generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_aware_operator.costs.elementwise import Numbers
from cost_aware_operator.costs.models.layout import AnyLayout, Practice, Recompute
from cost_aware_operator.costs.models.model_parallel import DecoderShape, activation_elements
from cost_aware_operator.costs.tables.hardware import Accelerator, AcceleratorGeneration, NumberFormat

REFERENCE_WATTS = {AcceleratorGeneration.HOPPER: 700.0, AcceleratorGeneration.AMPERE: 400.0}
"""Boards of one generation differ in power, and matrix products on Hopper are limited by it."""
POWER_EXPONENT = 0.6
"""Sustained clock over power: between 1/3 (voltage follows the clock, P ~ f V^2) and 1 (voltage at its floor)."""


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peak that large kernels reach on one generation."""

    matmul: float
    """Fraction of peak that large matrix products reach."""
    attention: float
    """Fraction of peak that attention kernels reach."""


@dataclass(frozen=True)
class Parameters:
    """All that is fitted. Everything else is counted."""

    volta: Efficiency = Efficiency(0.78, 0.25)
    """Fractions of peak on Volta."""
    ampere: Efficiency = Efficiency(0.80, 0.40)
    """Fractions of peak on Ampere."""
    hopper: Efficiency = Efficiency(0.75, 0.35)
    """Fractions of peak on Hopper."""
    blackwell: Efficiency = Efficiency(0.65, 0.40)
    """Fractions of peak on Blackwell."""
    ada: Efficiency = Efficiency(0.65, 0.40)
    """Fractions of peak on Ada."""
    cpu: Efficiency = Efficiency(0.60, 0.30)
    """Fractions of peak on CPU cores."""
    hopper_attention: float = 1.6
    """Speed of attention kernels written for Hopper, relative to those written for Ampere."""
    fp8: float = 0.80
    """Speed of an fp8 product with casts and scaling, relative to the fp8 peak times the generation's fraction."""
    memory: float = 0.80
    """Fraction of memory bandwidth that memory-bound kernels reach."""
    passes: float = 2.0
    """Times that each activation element which backward needs moves through memory in forward."""
    legacy_passes: float = 5.0
    """Times that each attention score moves through memory, where kernels write the scores to memory."""
    layer_seconds: float = 5e-5
    """Host and launch cost of one layer's forward that is not hidden, seconds."""
    step_seconds: float = 0.01
    """Cost of a step that no other term covers, seconds: data, logging, loss reduction."""
    node_link: float = 0.75
    """Fraction of a link's rate that collectives reach inside a node."""
    network: float = 0.75
    """Fraction of the network's rate that collectives reach between nodes."""
    node_latency_seconds: float = 8e-6
    """Latency (alpha) of one message inside a node."""
    network_latency_seconds: float = 2e-5
    """Latency (alpha) of one message between nodes."""
    tensor_overlap: float = 0.3
    """Share of tensor-parallel communication hidden behind products, where the practice is to overlap."""
    reduction_overlap: float = 0.7
    """Share of a backward pass that can hide gradient reduction."""
    gather_overlap: float = 0.8
    """Share of compute that can hide weight gathers of ZeRO-3."""
    gather_slowdown: float = 0.1
    """Seconds that compute loses for each second of hidden communication: they share memory and multiprocessors."""
    straggler: float = 0.01
    """Growth of a step each time the number of nodes doubles."""
    context_loss: float = 0.08
    """Growth of attention's time each time the context degree doubles: smaller kernels, partial results merged."""

    def of(self, generation: AcceleratorGeneration) -> Efficiency:
        """Fractions of one generation; an unknown one is taken as Ampere."""
        known: Efficiency | None = getattr(self, generation.value, None)
        return self.ampere if known is None else known


@dataclass(frozen=True)
class LayerSeconds:
    """Compute of one layer and micro-batch on one rank, in seconds. Numbers, or arrays for many layouts."""

    forward: Numbers
    """Seconds of the forward pass."""
    backward: Numbers
    """Seconds of the backward pass, without recompute."""
    again: Numbers
    """Seconds of forward work that backward computes a second time."""
    attention_forward: Numbers
    """Seconds of attention within `forward`."""
    weight: Numbers
    """Seconds of backward that make weight gradients."""

    @property
    def total(self) -> Numbers:
        """Forward, backward and recompute."""
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class Computer:
    """One accelerator under fitted parameters, at one precision."""

    accelerator: Accelerator
    """The accelerator."""
    precision: NumberFormat
    """Type in which matrix products are computed."""
    practice: Practice
    """What the training framework does."""
    parameters: Parameters
    """The fitted parameters."""

    def _flops_per_second(self) -> float:
        p, a = self.parameters, self.accelerator
        rate = a.peak(self.precision) * 1e12 * p.of(a.generation).matmul * self._clock
        return rate * p.fp8 if self.precision is NumberFormat.FP8 else rate

    @property
    def _clock(self) -> float:
        reference, watts = REFERENCE_WATTS.get(self.accelerator.generation), self.accelerator.power_watts
        return (
            1.0
            if reference is None or watts is None or watts >= reference
            else float((watts / reference) ** POWER_EXPONENT)
        )

    @property
    def bytes_per_second(self) -> float:
        """What memory-bound kernels reach."""
        return self.accelerator.memory_gbytes_per_s * 1e9 * self.parameters.memory

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation; fp8 is used inside products only."""
        return 4 if self.precision is NumberFormat.FP32 else 2

    def matmul(self, m: Numbers, k: Numbers, n: Numbers) -> Numbers:
        """An m x k by k x n product, seconds: 2mkn/(e P) + bytes(mk + kn + mn)/(b M)."""
        moved = self.element_bytes * (m * k + k * n + m * n)
        return 2.0 * m * k * n / self._flops_per_second() + moved / self.bytes_per_second

    def attention(self, tokens: Numbers, keys: float, width: Numbers, heads: Numbers) -> Numbers:
        """Scores and their product with values, forward, seconds: `tokens` queries over `keys`, `width` channels on this rank.

        FlashAttention computes 2 tokens keys width FLOPs under a causal mask (half of the full 4). Separate kernels compute the
        full 4 and move the score matrix of heads x tokens x keys through memory several times.
        """
        p, a = self.parameters, self.accelerator
        half = NumberFormat.BF16 if self.precision is NumberFormat.FP8 else self.precision
        peak = a.peak_tflops.get(half) or a.peak(self.precision)
        fractions = p.of(a.generation)
        if self.practice.flash_attention:
            hopper = a.generation is AcceleratorGeneration.HOPPER and self.practice.hopper_attention
            fraction = fractions.attention * (p.hopper_attention if hopper else 1.0)
            return 2.0 * tokens * keys * width / (peak * 1e12 * fraction * self._clock)
        products = 4.0 * tokens * keys * width / (peak * 1e12 * fractions.matmul * self._clock)
        moved = p.legacy_passes * self.element_bytes * heads * tokens * keys
        return products + moved / self.bytes_per_second

    def layer(self, shape: DecoderShape, layout: AnyLayout) -> LayerSeconds:
        """One decoder layer and one micro-batch on one rank of the layout."""
        t, c = layout.tensor, layout.context
        tokens, h = layout.micro_batch * shape.sequence_length / c, shape.hidden
        kv = shape.kv_heads * (h // shape.heads)
        inner = (2 if shape.gated_mlp else 1) * shape.ffn
        products = (
            self.matmul(tokens, h, (h + 2 * kv) / t)
            + self.matmul(tokens, h / t, h)
            + self.matmul(tokens, h, inner / t)
            + self.matmul(tokens, shape.ffn / t, h)
        )
        attention = self.attention(tokens, shape.sequence_length, h / t, shape.heads / t)
        elements = activation_elements(shape, t, sequence_parallel=self.practice.sequence_parallel) * tokens
        vector = self.parameters.passes * self.element_bytes * elements / self.bytes_per_second
        forward = products + attention + vector + self.parameters.layer_seconds
        backward = 2 * products + (2.5 if self.practice.flash_attention else 2.0) * attention + 2 * vector
        again: Numbers = {
            Recompute.NONE: 0.0,
            Recompute.SELECTIVE: 0.5 * products + vector if self.practice.keeps_products(layout) else attention,
            Recompute.FULL: forward,
        }[layout.recompute]
        return LayerSeconds(forward, backward + self.parameters.layer_seconds, again, attention, products)

    def head(self, shape: DecoderShape, layout: AnyLayout) -> Numbers:
        """Output projection, softmax and loss, forward and backward of one micro-batch, seconds.

        Logits move 28 bytes an element: cast (2 read, 4 written), log-softmax (4, 4), its gradient (4, 4), cast back (4, 2).
        """
        tokens = layout.micro_batch * shape.sequence_length / layout.context
        vocabulary = shape.vocabulary / layout.tensor
        half = replace(self, precision=NumberFormat.BF16) if self.precision is NumberFormat.FP8 else self
        product = half.matmul(tokens, shape.hidden, vocabulary)
        return 3 * product + 28.0 * tokens * vocabulary / self.bytes_per_second


def model_flops(shape: DecoderShape, global_batch: int) -> float:
    """Model FLOPs of a step, forward and backward, without recompute.

    6 N_matmul + 12 L h s a token (Kaplan et al. 2020; Narayanan et al. 2021, appendix): every weight of a product multiplies
    and adds once forward and twice backward; attention is counted in full, causal mask or not, as published MFU is.
    """
    kv = shape.kv_heads * (shape.hidden // shape.heads)
    layer = 2 * shape.hidden * (shape.hidden + kv) + (3 if shape.gated_mlp else 2) * shape.hidden * shape.ffn
    weights = shape.layers * layer + shape.vocabulary * shape.hidden
    per_token = 6.0 * weights + 12.0 * shape.layers * shape.hidden * shape.sequence_length
    return per_token * shape.sequence_length * global_batch
