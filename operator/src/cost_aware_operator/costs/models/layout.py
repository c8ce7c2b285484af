"""How a run is laid out: degrees, batch, what is sharded and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration, NumberFormat
from cost_aware_trainer.contract import Recompute as Recompute


class StateSharding(StrEnum):
    """What data-parallel ranks share out: nothing, optimizer states, those and gradients, or those and weights."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


@dataclass(frozen=True)
class Layout:
    """How a run is laid out over ranks."""

    data: int
    """Data-parallel degree: replicas of the model."""
    tensor: int
    """Tensor-parallel degree: ranks that share each layer."""
    pipeline: int
    """Pipeline stages."""
    context: int
    """Context-parallel degree: ranks that share each sequence."""
    sharding: StateSharding
    """State that data-parallel ranks share out."""
    interleave: int
    """Model chunks of each pipeline stage; 1 is a plain pipeline."""
    recompute: Recompute
    """Activations that backward computes again."""
    micro_batch: int
    """Sequences that a replica computes at once."""
    global_batch: int
    """Sequences of one step, over all replicas."""
    precision: NumberFormat
    """Type in which matrix products are computed."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    """Order of the pipeline's passes."""

    @property
    def ranks(self) -> int:
        """Accelerators of the run."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one replica computes a step, of the nearest batch that divides."""
        return max(1, round(self.global_batch / (self.data * self.micro_batch)))


@dataclass(frozen=True)
class Layouts:
    """Many layouts: counts are arrays of one length, everything else is one value for all of them.

    Whether `tensor` is above 1 must also be one answer for all.
    """

    data: NDArray[Any]
    """Data-parallel degree of each layout."""
    tensor: NDArray[Any]
    """Tensor-parallel degree of each layout."""
    pipeline: NDArray[Any]
    """Pipeline stages of each layout."""
    context: int
    """Context-parallel degree of all layouts."""
    sharding: StateSharding
    """State that data-parallel ranks share out."""
    interleave: NDArray[Any]
    """Model chunks of each pipeline stage, for each layout."""
    recompute: Recompute
    """Activations that backward computes again."""
    micro_batch: NDArray[Any]
    """Sequences that a replica computes at once, for each layout."""
    global_batch: int
    """Sequences of one step, over all replicas."""
    precision: NumberFormat
    """Type in which matrix products are computed."""
    schedule: PipelineSchedule
    """Order of the pipeline's passes."""

    @property
    def ranks(self) -> Any:
        """Accelerators of each."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def micro_batches(self) -> Any:
        """Micro-batches that one replica computes a step."""
        return np.maximum(1, np.rint(self.global_batch / (self.data * self.micro_batch)))

    def one(self, index: int) -> Layout:
        """The layout at an index."""
        return Layout(
            data=int(self.data[index]),
            tensor=int(self.tensor[index]),
            pipeline=int(self.pipeline[index]),
            context=self.context,
            sharding=self.sharding,
            interleave=int(self.interleave[index]),
            recompute=self.recompute,
            micro_batch=int(self.micro_batch[index]),
            global_batch=self.global_batch,
            precision=self.precision,
            schedule=self.schedule,
        )


AnyLayout: TypeAlias = Layout | Layouts


def pipeline_schedule(layout: AnyLayout) -> PipelineSchedule:
    """The order of passes; several chunks a stage make 1F1B an interleaved one."""
    interleaved = layout.schedule is PipelineSchedule.ONE_F_ONE_B and np.any(layout.interleave > 1)
    return PipelineSchedule.INTERLEAVED if interleaved else layout.schedule


@dataclass(frozen=True)
class Practice:
    """What a training framework does and a layout does not say, read from the precision and the accelerator.

    Mixed-precision training in fp16 is the practice of 2019 to 2022: attention as separate kernels that write the score
    matrix, activations of layer norms replicated over tensor ranks, gradients reduced after backward in fp16. bf16 and fp8
    came with FlashAttention (which needs Ampere or newer), sequence parallelism and overlapped reduction. GPT shapes that
    combine tensor parallelism with full recompute on Ampere are of those earlier frameworks too, whatever their precision:
    sequence parallelism and selective recompute replaced full recompute there (Korthikanti et al. 2022).

    Under ZeRO-3 a framework is torch's FSDP, otherwise Megatron's kind, with Transformer Engine's kernels: on Hopper its
    attention is FlashAttention-3's or cuDNN's, 1.5 to 2 times as fast as FlashAttention-2 (Shah et al. 2024), which torch calls.
    """

    flash_attention: bool
    """Whether attention is one fused kernel that never writes the score matrix."""
    sequence_parallel: bool
    """Whether tensor ranks also share activations of layer norms, along the sequence."""
    overlapped_reduction: bool
    """Whether gradients are reduced while backward runs."""
    hopper_attention: bool = False
    """Whether attention kernels are those written for Hopper, where the GPU is one."""

    @classmethod
    def of(cls, layout: AnyLayout, generation: AcceleratorGeneration, *, gated_mlp: bool) -> Practice:
        """The practice that goes with a layout; selective recompute came together with sequence parallelism."""
        recompute = layout.recompute
        modern = (
            layout.precision in (NumberFormat.BF16, NumberFormat.FP8) and generation is not AcceleratorGeneration.VOLTA
        )
        if (
            generation is AcceleratorGeneration.AMPERE
            and np.any(layout.tensor > 1)
            and recompute is Recompute.FULL
            and not gated_mlp
        ):
            modern = False
        return cls(
            modern, modern or recompute is Recompute.SELECTIVE, modern, layout.sharding is not StateSharding.ZERO3
        )

    def keeps_products(self, layout: AnyLayout) -> bool:
        """Whether selective recompute works by operators, as under FSDP, and not on the attention core alone, as in Megatron."""
        return self.flash_attention and layout.sharding is StateSharding.ZERO3
