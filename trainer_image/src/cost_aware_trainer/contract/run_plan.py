"""The run plan: all that determines a run, as the operator orders it and as a file starts it by hand.

A part of the contract, which gives its names on; nothing but the standard library is imported here either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cost_aware_trainer.contract.messages import Message


class Schedule(StrEnum):
    """In which order a pipeline's ranks work through forward and backward passes."""

    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    """ZB1P of 2401.10241, on interleaved stages."""
    ZERO_BUBBLE_V = "zero-bubble-v"
    """ZBV of 2401.10241: two stages on each rank, in the shape of a V."""


class Sharding(StrEnum):
    """What the data axis splits instead of replicating."""

    NONE = "none"
    ZERO1 = "zero1"
    """Weights at rest, and optimizer state; gradients are summed once a step."""
    ZERO2 = "zero2"
    """As zero1, and gradients are split after each micro-batch."""
    ZERO3 = "zero3"
    """As zero2, and weights are gathered anew for each backward pass."""


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping them."""

    NONE = "none"
    SELECTIVE = "selective"
    """Attention's own, between its projections."""
    FULL = "full"
    """All but each layer's input."""


class Precision(StrEnum):
    """The type of activations and matrix products; weights and optimizer state are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Compression(StrEnum):
    """What gradients are sent as between replicas. int8 and int4 are quantised in blocks, with error feedback."""

    NONE = "none"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Redundancy(StrEnum):
    """What nodes keep of each other's states in memory, so that the loss of one needs no reading from the volume."""

    NONE = "none"
    REPLICA = "replica"
    """Each node a copy of the one before it: any may be lost that are no neighbours."""
    PARITY = "parity"
    """An XOR over up to 15 nodes, spread over them: one of them may be lost."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan(Message):
    """The bundled decoder's shape. With `tied_embeddings` the output head is the embedding matrix."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence_length: int
    vocabulary: int
    tied_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class DegreesPlan(Message):
    """How many ways the run is split; the product is the number of ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class StrategyPlan(Message):
    """How the degrees are used. No field changes what is trained, but `precision` and `compression` round.

    `interleave` is the number of pipeline stages on each rank; `stage_layers` the layers of each of the
    pipeline × interleave stages, and empty for an even split. `bucket_mib` is how much of the gradients replicas sum at once
    (without `sharding`), and None for the trainer's own choice.
    """

    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
    interleave: int = 1
    stage_layers: tuple[int, ...] = ()
    sharding: Sharding = Sharding.NONE
    recompute: Recompute = Recompute.NONE
    precision: Precision = Precision.FP32
    compression: Compression = Compression.NONE
    compile: bool = False
    bucket_mib: float | None = None


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Message):
    """Samples of one optimizer step (never changes in a run), and of one forward pass on one rank (may change)."""

    global_samples: int
    micro_samples: int


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan(Message):
    """AdamW with a linear warm-up and a cosine decay to `minimum_learning_rate` at the last step."""

    learning_rate: float = 3e-3
    minimum_learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    gradient_clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan(Message):
    """Where and how often the run is saved, and whether its nodes keep copies for each other in memory, how often."""

    folder: str
    interval_seconds: float = 60.0
    keep: int = 2
    redundancy: Redundancy = Redundancy.NONE
    redundancy_interval_seconds: float = 15.0


@dataclass(frozen=True, kw_only=True)
class RunPlan(Message):
    """All that determines a run. Degrees, strategy and micro-batch may change between attempts, the rest may not.

    `data_folder` holds `train.bin`, `heldout.bin` and `manifest.json` as `cost_aware_trainer.data` prepares them.
    """

    steps: int
    model: ModelPlan
    batch: BatchPlan
    checkpoint: CheckpointPlan
    data_folder: str
    degrees: DegreesPlan = field(default_factory=DegreesPlan)
    strategy: StrategyPlan = field(default_factory=StrategyPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    seed: int = 0
    evaluate_every_steps: int = 50
    evaluation_samples: int = 128
