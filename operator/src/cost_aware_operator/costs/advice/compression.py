"""Gradient compression: bytes and seconds of bf16, int8 and int4 reduction, and whether it pays.

Quantised reduction is that of ZeRO++ (Wang et al. 2023, qgZ): each rank quantises its gradients in blocks, an all-to-all brings every
rank its part of all others, which it sums in fp32 and quantises again, and an all-gather hands out the sums. Over several nodes the
all-to-all takes two hops, inside the node and then between nodes, as a flat one would send every rank's gradients whole over the
node's network; with k ranks a node, two hops send a k-th. An all-gather of
everyone's quantised gradients, as in torch's quantization_pertensor_hook, moves n times as much and is not considered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_aware_operator.costs.advice.data_parallel import BUCKET_BYTES, exposed_seconds
from cost_aware_operator.costs.checks import AnalysisError, count, not_negative, positive, share
from cost_aware_operator.costs.models.communication import Group, Link
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.tables.hardware import Accelerator
from cost_aware_trainer.contract import Compression as Compression

SCALE_BYTES = 2.0
"""One bf16 scale a block."""
BLOCKS = {8: 256, 4: 32}
"""Elements that share a scale, by bits, as the trainer quantises: four bits need a scale for fewer."""
MOST_ELEMENTS = 10**14
WORTH = 0.2
"""Share of the exposed seconds that compression must save: the model knows bytes and memory, not a hop's handling."""


BITS = {Compression.BF16: 16, Compression.INT8: 8, Compression.INT4: 4}


@dataclass(frozen=True)
class CompressionCost:
    """One way to send one step's gradients."""

    compression: Compression
    """The way."""
    sent_bytes: float
    """Bytes that one rank sends, without the first of two hops."""
    communication_seconds: float
    """Seconds that communication takes."""
    exposed_seconds: float
    """Seconds of communication after backward has ended."""
    quantise_seconds: float
    """Seconds that compressing and restoring occupy the accelerator; never hidden."""
    residual_bytes: float
    """Bytes a rank that error feedback would keep: one copy of the gradients."""

    @property
    def cost_seconds(self) -> float:
        """What the step takes longer than its computation."""
        return self.exposed_seconds + self.quantise_seconds


@dataclass(frozen=True)
class CompressionAdvice:
    """Whether to compress, and how."""

    use: Compression
    """Compression to use; `NONE` where none pays."""
    saved_seconds: float
    """Seconds saved in each step; 0 where the answer is no."""
    saved_usd: float
    """Dollars saved in each step, over all nodes."""
    reason: str
    """Why, with the figures that decided."""
    options: tuple[CompressionCost, ...]
    """All ways that were compared, the uncompressed one first."""

    @property
    def pays(self) -> bool:
        """Whether any compression does."""
        return self.use is not Compression.NONE


class GradientCompressor:
    """The analysis of compression; the trainer's hook does it.

    Args:
        accelerator: whose memory bandwidth bounds quantisation.
        memory_efficiency: share of that bandwidth that memory-bound kernels reach.
        block: elements that share a scale; by the trainer's `BLOCKS` if absent.

    Raises:
        AnalysisError: a share or a count out of range.
    """

    def __init__(
        self, accelerator: Accelerator, memory_efficiency: float = FITTED.memory, block: int | None = None
    ) -> None:
        share("memory_efficiency", positive("memory_efficiency", memory_efficiency))
        positive("memory_gbytes_per_s", accelerator.memory_gbytes_per_s, 1e6)
        self._bytes_per_second = accelerator.memory_gbytes_per_s * 1e9 * memory_efficiency
        self._block = None if block is None else count("block", block, 8, 2**20)

    def element_bytes(self, compression: Compression, gradient_bytes: float = 4.0) -> float:
        """Bytes of one element on the wire, with its part of a scale."""
        bits = BITS.get(compression)
        if bits is None:
            return gradient_bytes
        return bits / 8 + (0.0 if bits not in BLOCKS else SCALE_BYTES / (self._block or BLOCKS[bits]))

    def quantise_seconds(
        self,
        elements: float,
        ranks: int,
        compression: Compression,
        gradient_bytes: float = 4.0,
        hop_ranks: int | None = None,
    ) -> float:
        """Memory traffic of compressing and restoring, over memory bandwidth.

        With g bytes a gradient and c on the wire, an element moves g + c (quantise), c + 4/n (sum), 4/n + c/n (quantise the sum) and
        c + g (restore); bf16 only casts, g + 2 and 2 + g. A hop over `hop_ranks` ranks in between adds a sum and a quantisation of
        its part, (8 + 2c)/k. About 11 bytes for int8 of fp32 over many ranks.
        """
        if compression is Compression.NONE or ranks <= 1:
            return 0.0
        c, g = self.element_bytes(compression), gradient_bytes
        cast, quantised = 0.0 if g <= c else 2 * (g + c), 2 * g + 3 * c + (8 + c) / ranks
        quantised += (8 + 2 * c) / hop_ranks if hop_ranks else 0.0
        moved = cast if compression is Compression.BF16 else quantised
        return elements * moved / self._bytes_per_second

    def cost(
        self,
        compression: Compression,
        group: Group,
        elements: float,
        backward_seconds: float,
        *,
        gradient_bytes: float = 4.0,
        bucket_bytes: float = BUCKET_BYTES,
    ) -> CompressionCost:
        """Bytes and seconds of one step. Gradients are cut into buckets of `bucket_bytes` before compression, sent during backward.

        Raises:
            AnalysisError: a figure out of range.
        """
        not_negative("elements", elements, MOST_ELEMENTS)
        window = not_negative("backward_seconds", backward_seconds)
        if gradient_bytes not in (2, 4):
            raise AnalysisError(
                f"gradient_bytes: {gradient_bytes!r} is no float type's: write 4 (fp32) or 2 (bf16, fp16)"
            )
        if group.size <= 1 or elements == 0:
            return CompressionCost(compression, 0.0, 0.0, 0.0, 0.0, 0.0)
        buckets = max(1, -int(-elements * gradient_bytes // positive("bucket_bytes", bucket_bytes)))
        size = elements * self.element_bytes(compression, gradient_bytes)
        quantised = compression in (Compression.INT8, Compression.INT4)
        # seconds of one bucket, and how many ranks a first hop joins
        ways: list[tuple[float, int | None]] = [(group.all_reduce(size / buckets), None)]
        if quantised:
            gather = group.all_gather(size / buckets)
            ways = [(group.all_to_all(size / buckets) + gather, None)]
            if group.nodes > 1 and group.per_node > 1:
                ways.append((_two_hops(group, size / buckets) + gather, group.per_node))
        costs = [
            CompressionCost(
                compression=compression,
                sent_bytes=2 * (group.size - 1) / group.size * size,
                communication_seconds=buckets * one,
                exposed_seconds=exposed_seconds(one, buckets, window),
                quantise_seconds=self.quantise_seconds(elements, group.size, compression, gradient_bytes, hop),
                residual_bytes=gradient_bytes * elements if quantised else 0.0,
            )
            for one, hop in ways
        ]
        return min(costs, key=lambda cost: cost.cost_seconds)

    def advise(
        self,
        group: Group,
        elements: float,
        backward_seconds: float,
        *,
        gradient_bytes: float = 4.0,
        allowed: Sequence[Compression] = (Compression.BF16, Compression.INT8, Compression.INT4),
        job_hourly_usd: float = 0.0,
        bucket_bytes: float = BUCKET_BYTES,
        worth: float = WORTH,
    ) -> CompressionAdvice:
        """The compression that makes the step shortest; no, unless exposed communication saved exceeds quantisation time.

        Args:
            group: the data-parallel group on its links.
            elements: gradients of a rank.
            backward_seconds: of the step's last backward, which can hide communication.
            gradient_bytes: of an uncompressed gradient.
            allowed: what accuracy permits; the analysis knows time alone.
            job_hourly_usd: price of all nodes, by which a second is priced.
            bucket_bytes: of uncompressed gradients.
            worth: share of what is exposed now that must be saved; less lies within the error of this model.

        Raises:
            AnalysisError: a figure out of range.
        """
        share("worth", worth)
        usd = not_negative("job_hourly_usd", job_hourly_usd, 1e9)
        kinds = [Compression.NONE, *(c for c in Compression if c in allowed and c is not Compression.NONE)]
        options = tuple(
            self.cost(kind, group, elements, backward_seconds, gradient_bytes=gradient_bytes, bucket_bytes=bucket_bytes)
            for kind in kinds
        )
        plain = options[0]
        best = min(options, key=lambda option: option.cost_seconds)
        saved = plain.cost_seconds - best.cost_seconds
        if saved <= worth * plain.exposed_seconds:
            reason = f"no: {plain.exposed_seconds * 1e3:.3g} ms are exposed"
            if len(options) > 1:
                near = min(options[1:], key=lambda option: option.cost_seconds)
                reason += (
                    f"; {near.compression} would save {(plain.exposed_seconds - near.exposed_seconds) * 1e3:.3g} ms "
                    f"and take {near.quantise_seconds * 1e3:.3g} ms to quantise"
                )
                if saved > 0:
                    reason += f", a gain under {worth:.0%} of what is exposed, which this model cannot tell from none"
            return CompressionAdvice(Compression.NONE, 0.0, 0.0, reason, options)
        reason = (
            f"{best.compression}: saves {(plain.exposed_seconds - best.exposed_seconds) * 1e3:.3g} ms of "
            f"{plain.exposed_seconds * 1e3:.3g} ms exposed, and takes {best.quantise_seconds * 1e3:.3g} ms to quantise"
        )
        return CompressionAdvice(best.compression, saved, saved * usd / 3600, reason, options)


def _two_hops(group: Group, size_bytes: float) -> float:
    """All-to-all inside each node, then of each rank's k-th with its peers in other nodes, on a k-th of the network."""
    across = Link(group.outer.bytes_per_second / group.per_node, group.outer.latency_seconds)
    inside = group.fabric.node.all_to_all(size_bytes, group.per_node)
    return inside + across.all_to_all(size_bytes / group.per_node, group.nodes)
