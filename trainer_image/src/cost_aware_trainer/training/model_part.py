"""This rank's part of the model under a plan's degrees: built, filled, stepped and evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cost_aware_trainer.contract import Compression, Precision, RunPlan, Sharding
from cost_aware_trainer.distributed.compression.reduce_scatter import CompressedReduceScatter
from cost_aware_trainer.distributed.compression.sums import BITS, CompressedSum, element_bytes
from cost_aware_trainer.distributed.fsdp_waits import waits_timed
from cost_aware_trainer.distributed.gradients import BUCKET_BYTES, DataSum, Held, squared_norm, sum_shared
from cost_aware_trainer.distributed.layout import Box, ModelStage, box_of, stages_of
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.distributed.tensor_parallel import TensorAxis
from cost_aware_trainer.models.decoder import Decoder, initial_value, shape_of
from cost_aware_trainer.telemetry.traffic import Axis
from cost_aware_trainer.training.pipeline import Pipeline


class Replica:
    """One rank's stages of one data-parallel replica. Memory is allocated, but not filled.

    Gradients are *sums* over samples: the loss is divided by the global batch before the backward pass, so no degree
    enters into them.
    """

    def __init__(self, plan: RunPlan, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._plan, self._mesh = plan, mesh
        self._tensor = TensorAxis(mesh.group(Axis.TENSOR), mesh.place.tensor, plan.degrees.tensor, mesh.traffic)
        self.is_sharded = plan.strategy.sharding is not Sharding.NONE and plan.degrees.data > 1
        self._micro_batches = plan.batch.global_samples // plan.degrees.data // plan.batch.micro_samples
        self._scatters: list[tuple[CompressedReduceScatter, nn.Module]] = []
        stages = stages_of(mesh.place.pipeline, plan)
        self._parts = [(stage, self._build(stage)) for stage in stages]
        self.held = self._hold(shapes)
        self._flat = self._flattened()
        self._owed: dict[str, Tensor] = {}
        self._data_sum = self._watch() if plan.degrees.data > 1 and not self.is_sharded else None
        self._pipeline = Pipeline(plan, mesh, self._tensor, self._parts) if plan.degrees.pipeline > 1 else None
        self.needs_tokens = any(stage.is_first or stage.is_last for stage in stages)
        """Whether this rank holds an end of the pipeline."""
        self.reports = any(stage.is_last for stage in stages) and mesh.place.tensor == 0
        """Whether this rank alone speaks for its replica: of its loss, and of what was trained."""

    def _build(self, stage: ModelStage) -> Decoder:
        strategy, device = self._plan.strategy, self._mesh.ranks.device
        with torch.device("meta"):
            part = Decoder(shape_of(self._plan.model, strategy, self._tensor), stage)
        if strategy.compile:
            for layer in part.layers.values():
                layer.compile()
        if self.is_sharded:
            self._shard(part)
        part.to_empty(device=device)
        return part

    def _shard(self, part: Decoder) -> None:
        """Splits weights, gradients and optimizer state over the data axis (ZeRO, 1910.02054), a layer at a time."""
        strategy = self._plan.strategy
        policy = MixedPrecisionPolicy()
        if strategy.precision is Precision.BF16:
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        keeps = strategy.sharding is not Sharding.ZERO3
        for module in (*part.layers.values(), part):
            sharded = fully_shard(module, mesh=self._mesh.data, reshard_after_forward=not keeps, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum
            sharded.set_force_sum_reduction_for_comms(True)
            if strategy.compression is not Compression.NONE:
                self._scatters.append((CompressedReduceScatter(strategy.compression), module))
                sharded.set_custom_reduce_scatter(self._scatters[-1][0])

    def _hold(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Held]:
        plan, place = self._plan, self._mesh.place
        sharding = plan.strategy.sharding
        return [
            Held(
                name,
                parameter,
                box_of(name, shapes[name], place, plan.degrees, sharding),
                is_copy=name == "embedding.weight" and not stage.is_first,
            )
            for stage, part in self._parts
            for name, parameter in part.named_parameters()
        ]

    def _watch(self) -> DataSum:
        group, compression = self._mesh.group(Axis.DATA), self._plan.strategy.compression
        compressed = CompressedSum(group, compression) if group and compression is not Compression.NONE else None
        planned_mib = self._plan.strategy.bucket_mib
        bucket_bytes = BUCKET_BYTES if planned_mib is None else planned_mib * 2**20
        data_sum = DataSum(self._mesh, self._micro_batches, compressed, bucket_bytes)
        data_sum.watch(self.held)
        return data_sum

    def fill(self, value_of: Callable[[str, Box], Tensor]) -> None:
        """Sets every parameter's part to what `value_of` gives for its name and box."""
        for held in self.held:
            held.value.copy_(value_of(held.name, held.box))

    def initialise(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """Sets all parameters to the run's first values, which depend on their names and the seed only."""
        model = self._plan.model
        self.fill(lambda name, box: initial_value(name, shapes[name], model, seed)[box.slices()])

    def step(self, micro_batches: Iterable[Tensor], scale: float, *, uncompressed: bool = False) -> float:
        """Forward and backward over this replica's micro-batches of tokens (samples, sequence_length + 1).

        Gradients of `scale` × the summed loss are then summed over all ranks that share a parameter, over the data axis without
        compression if `uncompressed`. Returns the summed loss where `reports` is true, and something to ignore elsewhere.
        """
        for held in self.held:
            held.parameter.grad = None
        if self._data_sum:
            self._data_sum.begin(uncompressed=uncompressed)
        for scatter, _ in self._scatters:
            scatter.rests = uncompressed
        pipeline = self._pipeline
        with waits_timed(self._mesh.traffic) if self.is_sharded else nullcontext():
            loss_sum = pipeline.step(list(micro_batches), scale) if pipeline else self._accumulate(micro_batches, scale)
        if self._data_sum:
            self._data_sum.finish()
        sum_shared(self._mesh, self.held, [held.gradient for held in self.held])
        self._add_owed()
        if self.is_sharded:
            self._mesh.traffic.count(Axis.DATA, self._sharded_bytes(Compression.NONE if uncompressed else None))
        return loss_sum

    def _accumulate(self, micro_batches: Iterable[Tensor], scale: float) -> float:
        (_, part), *_ = self._parts
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._mesh.ranks.device)
        for index, tokens in enumerate(micro_batches):
            if isinstance(part, FSDPModule) and self._plan.strategy.sharding is Sharding.ZERO1:
                part.set_requires_gradient_sync(index == self._micro_batches - 1)
            loss = self._tensor.summed_loss(part(tokens[:, :-1]), tokens[:, 1:])
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        return float(loss_sum)

    def _sharded_bytes(self, compression: Compression | None = None) -> float:
        """What fully_shard sends in a step: one gather of weights and one scatter of gradients, or more of both."""
        degree, strategy = self._plan.degrees.data, self._plan.strategy
        weights_bytes = sum(held.value.numel() for held in self.held) * (degree - 1)
        gathered_bytes = weights_bytes * (2 if strategy.precision is Precision.BF16 else 4)
        often = 1 if self._pipeline or strategy.sharding is Sharding.ZERO1 else self._micro_batches
        gathers = (2 if strategy.sharding is Sharding.ZERO3 else 1) * self._micro_batches
        return float(
            gathers * gathered_bytes + often * weights_bytes * element_bytes(compression or strategy.compression)
        )

    def _add_owed(self) -> None:
        owed, self._owed = self._owed, {}
        for held in self.held:
            if held.name in owed:
                held.gradient.add_(owed[held.name])

    def owe(self, residuals: Mapping[str, Tensor]) -> None:
        """Adds residuals, whole sums for this rank's parts by parameter, to the next step's summed gradients."""
        self._owed = dict(residuals)

    def drain_residuals(self) -> dict[str, Tensor]:
        """What compression still owes the run, taken out: for each parameter that this rank holds the sum over all ranks.

        Empty where nothing is owed by any rank; every rank must call it between steps.
        """
        if self._plan.strategy.compression not in BITS or self._plan.degrees.data == 1:
            return {}
        kept = self._drained_shards() if self.is_sharded else {}
        if self._data_sum is not None and self._data_sum.compressed is not None:
            kept = self._data_sum.compressed.drain()
        residuals = [
            kept[held.key].view_as(held.value) if held.key in kept else torch.zeros_like(held.value)
            for held in self.held
        ]
        sum_shared(self._mesh, self.held, residuals)
        return {held.name: residual for held, residual in zip(self.held, residuals, strict=True)}

    def _drained_shards(self) -> dict[str, Tensor]:
        """The same of sharded parameters, before those that ranks share otherwise are summed; by `Held.key`."""
        assert self._mesh.data is not None  # noqa: S101  what is sharded has replicas
        group, ranks = self._mesh.data.get_group(), self._plan.degrees.data
        kept: dict[str, Tensor] = {}
        for (scatter, _), owned in zip(self._scatters, self._flat, strict=True):
            chunk, start = scatter.drain(group), 0
            if chunk is None:
                continue
            for held in owned:
                kept[held.key] = chunk[start : start + held.value.numel()]
                # fully_shard cuts the first dimension into equal pieces, the last ones filled up
                rows, *rest = held.parameter.shape
                start += -(-rows // ranks) * math.prod(rest)
        return kept

    def _flattened(self) -> list[list[Held]]:
        """What each reduce-scatter has in its flat gradient, in order: its module's parameters without those of modules before it."""
        held_of = {id(held.parameter): held for held in self.held}
        return [
            [held for p in module.parameters() if (held := held_of.pop(id(p), None)) is not None]
            for _, module in self._scatters
        ]

    def bubble_seconds(self, compute_seconds: float) -> float:
        """See `Pipeline.bubble_seconds`; 0 without a pipeline."""
        return self._pipeline.bubble_seconds(compute_seconds) if self._pipeline else 0.0

    def squared_gradient_norm(self) -> float:
        """This rank's share of the squared norm of the whole model's gradient."""
        return squared_norm(self._mesh, self.held, is_sharded=self.is_sharded)

    def losses(self, tokens: Tensor) -> Tensor | None:
        """Losses of tokens (samples, sequence_length + 1) by position, where `reports` may be true; None elsewhere.

        All ranks of the replica must call it with the same tokens.
        """
        if self._pipeline:
            logits = self._pipeline.forward(tokens[:, :-1])
        else:
            (_, part), *_ = self._parts
            logits = part(tokens[:, :-1])
        return None if logits is None else self._tensor.losses(logits, tokens[:, 1:])

    def close(self) -> None:
        """Lets go of parameters and process groups."""
        if self._data_sum:
            self._data_sum.close()
