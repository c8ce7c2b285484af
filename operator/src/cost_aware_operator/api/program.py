"""What a job trains: the model, and the program that trains it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from cost_aware_operator.api.base import ApiModel, cel, rules

DnsName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Argument = Annotated[str, StringConstraints(max_length=4096)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ModelPreset(StrEnum):
    """Shapes by name; `planning.presets` holds them."""

    BYTE_GPT = "byte-gpt"
    LLAMA_1B = "llama-1b"
    LLAMA_8B = "llama-8b"


class ComputePrecision(StrEnum):
    """The type of activations and matrix products; weights and optimizer state are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"


class DataSpec(ApiModel):
    """Volume and folder of the bundled trainer's token files."""

    volume: DnsName
    """A PersistentVolumeClaim of the job's namespace, mounted read-only."""
    folder: Annotated[str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_./-]*$")] = "."
    """The folder in it that holds train.bin, heldout.bin and manifest.json."""


class TrainerConfig(ApiModel):
    """Settings of the bundled decoder trainer."""

    steps: Positive
    """Optimizer steps of the whole run."""
    data: DataSpec
    """The token files."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Determines initialisation and sample order."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-3
    """AdamW's peak learning rate."""
    minimum_learning_rate: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """Learning rate at which the cosine schedule ends."""
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 20
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """AdamW's weight decay, on matrices only."""
    gradient_clip: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """The largest gradient norm that is not scaled down."""
    evaluate_every_steps: Positive = 50
    """Steps between held-out evaluations."""
    evaluation_samples: Positive = 128
    """Held-out samples of one evaluation."""
    precision: ComputePrecision | None = None
    """Number format of activations and products; absent means bf16 on GPUs that have it, fp32 elsewhere."""
    compile: bool = False
    """Whether torch.compile compiles the model's layers: worth its minute on GPUs and long runs."""


class TrainerSpec(ApiModel):
    """What torchrun starts: the bundled trainer (`config`), a Python module, or a command."""

    model_config = ApiModel.model_config | {
        "json_schema_extra": rules(
            cel(
                "[has(self.config), has(self.module), has(self.command)].filter(x, x).size() == 1",
                "trainer: write exactly one of config (the bundled trainer), module or command",
            ),
            cel("!has(self.args) || !has(self.config)", "trainer.args: the bundled trainer takes config, not args"),
        )
    }

    config: TrainerConfig | None = None
    """The bundled decoder trainer's settings."""
    module: Annotated[str, StringConstraints(max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")] | None = None
    """A Python module of the image, started as torchrun's `-m`."""
    command: Annotated[tuple[Argument, ...], Field(min_length=1, max_length=64)] | None = None
    """A script of the image and its arguments, started by torchrun."""
    args: Annotated[tuple[Argument, ...], Field(max_length=256)] | None = None
    """Arguments after the module or the command."""


class ModelSpec(ApiModel):
    """The decoder's shape, or a preset's name."""

    model_config = ApiModel.model_config | {
        "json_schema_extra": rules(
            cel(
                "has(self.preset) != (has(self.layers) || has(self.hidden) || has(self.heads) || has(self.kvHeads)"
                " || has(self.ffn) || has(self.sequenceLength) || has(self.vocabulary))",
                "model: write either preset, or the whole shape (layers, hidden, heads, ffn, sequenceLength, vocabulary)",
            ),
            cel(
                "has(self.preset) || (has(self.layers) && has(self.hidden) && has(self.heads) && has(self.ffn)"
                " && has(self.sequenceLength) && has(self.vocabulary))",
                "model: without preset, layers, hidden, heads, ffn, sequenceLength and vocabulary are all needed",
            ),
            cel(
                "!has(self.preset) || !has(self.tiedEmbeddings) || !self.tiedEmbeddings",
                "model.tiedEmbeddings does not go with preset: write the whole shape instead",
            ),
            cel(
                "!has(self.hidden) || !has(self.heads) || self.hidden % self.heads == 0",
                "model.hidden must be divisible by model.heads: choose heads that divides hidden",
            ),
            cel(
                "!has(self.hidden) || !has(self.heads) || (self.hidden / self.heads) % 2 == 0",
                "model.hidden / model.heads must be even: rotary embeddings turn pairs of channels",
            ),
            cel(
                "!has(self.kvHeads) || !has(self.heads) || self.heads % self.kvHeads == 0",
                "model.heads must be divisible by model.kvHeads: choose kvHeads that divides heads",
            ),
        )
    }

    preset: ModelPreset | None = None
    """A known shape."""
    layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Decoder blocks."""
    hidden: Annotated[int, Field(ge=2, le=262144)] | None = None
    """Width of the residual stream."""
    heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Attention heads."""
    kv_heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Key and value heads; absent means as many as heads."""
    ffn: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """Width of the gated feed-forward layer."""
    sequence_length: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Tokens of one sample."""
    vocabulary: Annotated[int, Field(ge=2, le=16777216)] | None = None
    """Token ids; 256 for bytes."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding's matrix."""
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] = 10_000.0
    """Base of the rotary positions' frequencies; that of converted weights, 500000 for Llama 3."""
    rms_norm_eps: Annotated[float, Field(gt=0, le=0.1)] = 1e-6
    """Number that keeps RMSNorm from dividing by 0; that of converted weights."""
