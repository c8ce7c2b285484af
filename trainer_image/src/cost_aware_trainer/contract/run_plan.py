"""The run plan: all that determines a run, as the operator orders it and as a file starts it by hand.

This module is a part of the contract, which passes its names on. It imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from cost_aware_trainer.contract.messages import ADDED_IN_2, Message


class Schedule(StrEnum):
    """Order in which a pipeline's ranks work through forward and backward passes."""

    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    """ZB1P of 2401.10241, on interleaved stages."""
    ZERO_BUBBLE_V = "zero-bubble-v"
    """ZBV of 2401.10241: two stages on each rank, in the shape of a V."""


class Sharding(StrEnum):
    """State that the data axis splits instead of replicating."""

    NONE = "none"
    ZERO1 = "zero1"
    """Splits weights at rest and optimizer state; gradients are summed once a step."""
    ZERO2 = "zero2"
    """Does what zero1 does, and also splits gradients after each micro-batch."""
    ZERO3 = "zero3"
    """Does what zero2 does, and also gathers weights again for each backward pass."""


class Recompute(StrEnum):
    """Activations that the backward pass computes again instead of keeping them."""

    NONE = "none"
    SELECTIVE = "selective"
    """Recomputes attention's own activations, between its projections."""
    FULL = "full"
    """Recomputes everything but each layer's input."""


class Precision(StrEnum):
    """Number type of activations and matrix products. Weights and optimizer state are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Compression(StrEnum):
    """Number format in which replicas send gradients. int8 and int4 are quantised in blocks, with error feedback."""

    NONE = "none"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Redundancy(StrEnum):
    """Copies of each other's state that nodes keep in memory, so that after the loss of one the volume is not read."""

    NONE = "none"
    REPLICA = "replica"
    """Each node keeps a copy of the node before it. Any nodes may be lost of which no two are neighbours."""
    PARITY = "parity"
    """An XOR over up to 15 nodes, spread over them. One of them may be lost."""


class OnAllDamaged(StrEnum):
    """Answer to a folder that holds checkpoints of which none is whole."""

    STOP = "stop"
    """The run does not start, and nothing in the folder is changed."""
    RESTART = "restart"
    """Damaged checkpoints are moved aside, and the run starts at its first step."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan(Message):
    """Shape of the bundled decoder."""

    layers: int
    """Decoder blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Key and value heads; divides `heads`."""
    ffn: int
    """Width of the gated feed-forward layer."""
    sequence_length: int
    """Tokens of one sample."""
    vocabulary: int
    """Number of token ids."""
    tied_embeddings: bool = False
    """Whether the output head is the embedding matrix."""
    rope_theta: float = field(default=10_000.0, metadata=ADDED_IN_2)
    """Base of the rotary positions' frequencies."""
    rms_norm_eps: float = field(default=1e-6, metadata=ADDED_IN_2)
    """Number that keeps RMSNorm from dividing by 0."""


@dataclass(frozen=True, kw_only=True)
class DegreesPlan(Message):
    """Number of parts into which each axis splits the run. The product is the number of ranks."""

    data: int = 1
    """Replicas, each of which trains its share of every step."""
    tensor: int = 1
    """Ranks that split each matrix, and the positions between layers."""
    pipeline: int = 1
    """Ranks that split the layers."""

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class StrategyPlan(Message):
    """Use that is made of the degrees. No field changes what is trained, except that `precision` and `compression` round."""

    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
    """Order of a pipeline's passes."""
    interleave: int = 1
    """Pipeline stages on each rank."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each of the pipeline × interleave stages; empty for an even split."""
    sharding: Sharding = Sharding.NONE
    """State that replicas split instead of holding it twice."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass computes again."""
    precision: Precision = Precision.FP32
    """Number type of activations and matrix products."""
    compression: Compression = Compression.NONE
    """Number format in which replicas send gradients."""
    compile: bool = False
    """Whether torch.compile compiles each layer."""
    bucket_mib: float | None = None
    """MiB of gradients that replicas sum at once, without `sharding`; None for the trainer's own choice."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Message):
    """Samples of a step and of a forward pass."""

    global_samples: int
    """Samples of one optimizer step; never changes in a run."""
    micro_samples: int
    """Micro-batch: samples of one forward pass on one rank; may change in a run."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan(Message):
    """AdamW with a linear warm-up, and a cosine decay that ends at the last step."""

    learning_rate: float = 3e-3
    """Largest rate, reached at the end of the warm-up."""
    minimum_learning_rate: float = 3e-4
    """Rate of the last step."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices; norms and embeddings have none."""
    gradient_clip: float = 1.0
    """Largest gradient norm that is not scaled down."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan(Message):
    """Places and intervals of the run's saves, on the volume and in nodes' memory."""

    folder: str
    """Folder of the checkpoints. Its parent must exist, and all nodes must share it."""
    interval_seconds: float = 60.0
    """Seconds between periodic checkpoints."""
    keep: int = 2
    """Number of newest checkpoints that stay."""
    redundancy: Redundancy = Redundancy.NONE
    """Copies that nodes keep for each other in memory."""
    redundancy_interval_seconds: float = 15.0
    """Seconds between those copies."""
    on_all_damaged: OnAllDamaged = field(default=OnAllDamaged.STOP, metadata=ADDED_IN_2)
    """Answer to a folder whose checkpoints are all damaged."""


@dataclass(frozen=True, kw_only=True)
class RunPlan(Message):
    """All that determines a run. Degrees, strategy and micro-batch may change between attempts, the rest may not."""

    steps: int
    """Optimizer steps of the whole run."""
    model: ModelPlan
    """Shape of the bundled decoder."""
    batch: BatchPlan
    """Samples of a step and of a forward pass."""
    checkpoint: CheckpointPlan
    """Places and intervals of saves."""
    data_folder: str
    """Path or address of `train.bin`, `heldout.bin` and `manifest.json`, as `cost_aware_trainer.data` prepares them."""
    degrees: DegreesPlan = field(default_factory=DegreesPlan)
    """Number of parts into which each axis splits the run."""
    strategy: StrategyPlan = field(default_factory=StrategyPlan)
    """Use that is made of the degrees."""
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    """Settings of AdamW."""
    seed: int = 0
    """Seed of the first weights and of the sample order."""
    evaluate_every_steps: int = 50
    """Steps between held-out evaluations; there is one at the end in any case."""
    evaluation_samples: int = 128
    """Held-out samples of one evaluation, always the same ones."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that each replica trains in a step."""
        return self.batch.global_samples // self.degrees.data // self.batch.micro_samples

    def same_run_as(self, other: RunPlan) -> bool:
        """Whether both plans train one run, so that living ranks can go on from one to the other.

        They may differ in degrees, strategy and micro-batch, and in nothing else.
        """
        batch = replace(self.batch, micro_samples=other.batch.micro_samples)
        return replace(self, degrees=other.degrees, strategy=other.strategy, batch=batch) == other

    def same_layout_as(self, other: RunPlan) -> bool:
        """Whether ranks do the same work under both plans: degrees, strategy and batch are equal.

        Two plans that differ only in the size of gradient buckets have the same layout.
        """
        strategy = replace(self.strategy, bucket_mib=other.strategy.bucket_mib)
        return (self.degrees, strategy, self.batch) == (other.degrees, other.strategy, other.batch)
