"""Part of the model that this rank holds under a plan's degrees: it is built, filled, stepped and evaluated here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cost_aware_trainer.contract import Compression, Precision, RunPlan, Sharding
from cost_aware_trainer.distributed.compression.reduce_scatter import CompressedReduceScatter
from cost_aware_trainer.distributed.compression.sums import BITS, CompressedSum, element_bytes
from cost_aware_trainer.distributed.data_sum import BUCKET_BYTES, DataSum
from cost_aware_trainer.distributed.fsdp_waits import waits_timed
from cost_aware_trainer.distributed.gradients import HeldParameter, squared_norm, sum_shared
from cost_aware_trainer.distributed.layout import Box, ModelStage, box_of, stages_of
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.distributed.tensor_parallel import TensorAxis
from cost_aware_trainer.models.decoder import Decoder, initial_value, shape_of
from cost_aware_trainer.telemetry.traffic import Axis
from cost_aware_trainer.training.pipeline import Pipeline


class ModelPart:
    """Stages of one data-parallel replica that one rank holds. Their memory is allocated, but not filled.

    Gradients are *sums* over samples. The loss is divided by the global batch before the backward pass, so gradients do not
    depend on the degrees.
    """

    def __init__(self, plan: RunPlan, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._plan, self.mesh = plan, mesh
        self._tensor = TensorAxis(mesh.group(Axis.TENSOR), mesh.place.tensor, plan.degrees.tensor, mesh.traffic)
        self.is_sharded = plan.strategy.sharding is not Sharding.NONE and plan.degrees.data > 1
        self._micro_batches = plan.micro_batches
        self.scatters: list[tuple[CompressedReduceScatter, nn.Module]] = []
        """Compressed reduce-scatter of each sharded module."""
        stages = stages_of(mesh.place.pipeline, plan)
        self._stages = [(stage, self._build(stage)) for stage in stages]
        self.parameters = self._parameters_of(shapes)
        """Parts of parameters that this rank holds."""
        self.scattered_parameters = self._flattened()
        """Parameters of each of `scatters`, in the order of its flat gradient."""
        self.residuals: dict[str, Tensor] = {}
        """Residuals that the next step adds to its gradients, by parameter."""
        self.data_sum = self._watch() if plan.degrees.data > 1 and not self.is_sharded else None
        """Sum over replicas; None if there is one replica, or if the data axis is sharded."""
        self._pipeline = Pipeline(plan, mesh, self._tensor, self._stages) if plan.degrees.pipeline > 1 else None
        self.needs_tokens = any(stage.is_first or stage.is_last for stage in stages)
        """Whether this rank holds an end of the pipeline."""
        self.reports = any(stage.is_last for stage in stages) and mesh.place.tensor == 0
        """Whether this rank, alone of its replica, reports the loss and the trained samples."""

    def _build(self, stage: ModelStage) -> Decoder:
        strategy, device = self._plan.strategy, self.mesh.ranks.device
        with torch.device("meta"):
            decoder = Decoder(shape_of(self._plan.model, strategy, self._tensor), stage)
        if strategy.compile:
            for layer in decoder.layers.values():
                layer.compile()
        if self.is_sharded:
            self._shard(decoder)
        decoder.to_empty(device=device)
        return decoder

    def _shard(self, decoder: Decoder) -> None:
        """Splits weights, gradients and optimizer state over the data axis (ZeRO, 1910.02054), a layer at a time."""
        strategy = self._plan.strategy
        policy = MixedPrecisionPolicy()
        if strategy.precision is Precision.BF16:
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        keeps = strategy.sharding is not Sharding.ZERO3
        for module in (*decoder.layers.values(), decoder):
            sharded = fully_shard(module, mesh=self.mesh.data, reshard_after_forward=not keeps, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum
            sharded.set_force_sum_reduction_for_comms(True)
            if strategy.compression is not Compression.NONE:
                self.scatters.append((CompressedReduceScatter(strategy.compression), module))
                sharded.set_custom_reduce_scatter(self.scatters[-1][0])

    def _parameters_of(self, shapes: Mapping[str, tuple[int, ...]]) -> list[HeldParameter]:
        plan, place = self._plan, self.mesh.place
        sharding = plan.strategy.sharding
        return [
            HeldParameter(
                name,
                parameter,
                box_of(name, shapes[name], place, plan.degrees, sharding),
                is_copy=name == "embedding.weight" and not stage.is_first,
            )
            for stage, decoder in self._stages
            for name, parameter in decoder.named_parameters()
        ]

    def _watch(self) -> DataSum:
        group, compression = self.mesh.group(Axis.DATA), self._plan.strategy.compression
        compressed = CompressedSum(group, compression) if group and compression is not Compression.NONE else None
        planned_mib = self._plan.strategy.bucket_mib
        bucket_bytes = BUCKET_BYTES if planned_mib is None else planned_mib * 2**20
        data_sum = DataSum(self.mesh, self._micro_batches, compressed, bucket_bytes)
        data_sum.watch(self.parameters)
        return data_sum

    def fill(self, value_of: Callable[[str, Box], Tensor]) -> None:
        """Sets every parameter's part to `value_of` its name and box."""
        for held in self.parameters:
            held.value.copy_(value_of(held.name, held.box))

    def initialise(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """Sets all parameters to the run's first values, which depend only on their names and the seed."""
        model = self._plan.model
        self.fill(lambda name, box: initial_value(name, shapes[name], model, seed)[box.slices()])

    def step(self, batches: Iterable[Tensor], scale: float, *, uncompressed: bool = False) -> Tensor:
        """Runs forward and backward over this replica's micro-batches, and sums gradients over all ranks that share a parameter.

        Args:
            batches: tokens (samples, sequence_length + 1) of each micro-batch.
            scale: factor on the summed loss, of which the gradients are.
            uncompressed: whether the sum over the data axis goes without compression.

        Returns:
            the summed loss, on the device, if `reports` is true; otherwise a number without meaning.
        """
        for held in self.parameters:
            held.parameter.grad = None
        if self.data_sum:
            self.data_sum.begin(uncompressed=uncompressed)
        for scatter, _ in self.scatters:
            scatter.is_uncompressed = uncompressed
        pipeline = self._pipeline
        with waits_timed(self.mesh.traffic) if self.is_sharded else self.weights_cast():
            loss_sum = pipeline.step(list(batches), scale) if pipeline else self._accumulate(batches, scale)
        if self.data_sum:
            self.data_sum.finish()
        sum_shared(self.mesh, self.parameters, [held.gradient for held in self.parameters])
        self._add_residuals()
        if self.is_sharded:
            self.mesh.traffic.count(Axis.DATA, self._scattered_bytes(Compression.NONE if uncompressed else None))
        return loss_sum

    @contextmanager
    def weights_cast(self) -> Iterator[None]:
        """Casts weights to the precision of compute once for all passes inside the block. fully_shard casts what it gathers."""
        with ExitStack() as stack:
            for _, decoder in self._stages if not self.is_sharded else ():
                stack.enter_context(decoder.weights_cast())
            yield

    def _accumulate(self, batches: Iterable[Tensor], scale: float) -> Tensor:
        (_, decoder), *_ = self._stages
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.ranks.device)
        for index, tokens in enumerate(batches):
            if isinstance(decoder, FSDPModule):
                self._share_out(decoder, is_last=index == self._micro_batches - 1)
            loss = self._tensor.summed_loss(decoder(tokens[:, :-1]), tokens[:, 1:])
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        return loss_sum

    def _share_out(self, decoder: FSDPModule, *, is_last: bool) -> None:
        """Lets only the step's last backward pass do what need not be done in each: ZeRO-1 and 2 keep their weights gathered."""
        sharding = self._plan.strategy.sharding
        if sharding is Sharding.ZERO1:
            decoder.set_requires_gradient_sync(is_last)
        if sharding is not Sharding.ZERO3:
            decoder.set_reshard_after_backward(is_last)

    def _scattered_bytes(self, compression: Compression | None = None) -> float:
        """Bytes of gradients that fully_shard sends in a step; `waits_timed` counts the weights that it gathers.

        Gradients are scattered in each micro-batch, by ZeRO-1 and pipelines in the last.
        """
        strategy = self._plan.strategy
        elements = sum(held.value.numel() for held in self.parameters) * (self._plan.degrees.data - 1)
        often = 1 if self._pipeline or strategy.sharding is Sharding.ZERO1 else self._micro_batches
        return float(often * elements * element_bytes(compression or strategy.compression))

    def _add_residuals(self) -> None:
        residuals, self.residuals = self.residuals, {}
        for held in self.parameters:
            if held.name in residuals:
                held.gradient.add_(residuals[held.name])

    def carry_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Keeps residuals, whole sums for this rank's parts by parameter, and adds them to the next step's summed gradients."""
        self.residuals = dict(residuals)

    def drain_residuals(self) -> dict[str, Tensor]:
        """Takes out the residuals of compression: for each parameter that this rank holds, the sum over all ranks.

        Empty if no rank has residuals. Every rank must call it, between steps.
        """
        if self._plan.strategy.compression not in BITS or self._plan.degrees.data == 1:
            return {}
        kept = self._drained_shards() if self.is_sharded else {}
        if self.data_sum is not None and self.data_sum.compressed is not None:
            kept = self.data_sum.compressed.drain()
        residuals = [
            kept[held.key].view_as(held.value) if held.key in kept else torch.zeros_like(held.value)
            for held in self.parameters
        ]
        sum_shared(self.mesh, self.parameters, residuals)
        return {held.name: residual for held, residual in zip(self.parameters, residuals, strict=True)}

    def _drained_shards(self) -> dict[str, Tensor]:
        """Takes out the residuals of sharded parameters by `HeldParameter.key`, not yet summed over ranks of other axes."""
        assert self.mesh.data is not None  # noqa: S101  what is sharded has replicas
        group, ranks = self.mesh.data.get_group(), self._plan.degrees.data
        kept: dict[str, Tensor] = {}
        for (scatter, _), owned in zip(self.scatters, self.scattered_parameters, strict=True):
            chunk, start = scatter.drain(group), 0
            if chunk is None:
                continue
            for held in owned:
                kept[held.key] = chunk[start : start + held.value.numel()]
                # fully_shard cuts the first dimension into equal pieces, the last ones filled up
                rows, *rest = held.parameter.shape
                start += -(-rows // ranks) * math.prod(rest)
        return kept

    def _flattened(self) -> list[list[HeldParameter]]:
        """Lists each reduce-scatter's parameters in the order of its flat gradient: its module's, without those of earlier modules."""
        held_of = {id(held.parameter): held for held in self.parameters}
        return [
            [held for p in module.parameters() if (held := held_of.pop(id(p), None)) is not None]
            for _, module in self.scatters
        ]

    def bubble_seconds(self, compute_seconds: float) -> float:
        """See `Pipeline.bubble_seconds`; 0 without a pipeline."""
        return self._pipeline.bubble_seconds(compute_seconds) if self._pipeline else 0.0

    def squared_gradient_norm(self) -> Tensor:
        """Share of this rank in the squared norm of the whole model's gradient, on the device."""
        return squared_norm(self.mesh, self.parameters, is_sharded=self.is_sharded)

    def losses(self, tokens: Tensor) -> Tensor | None:
        """Computes losses of tokens (samples, sequence_length + 1) by position on the last stage; None on other stages.

        All ranks of the replica must call it with the same tokens.
        """
        if self._pipeline:
            logits = self._pipeline.forward(tokens[:, :-1])
        else:
            (_, decoder), *_ = self._stages
            logits = decoder(tokens[:, :-1])
        return None if logits is None else self._tensor.losses(logits, tokens[:, 1:])

    def close(self) -> None:
        """Drops parameters and process groups."""
        if self.data_sum:
            self.data_sum.close()
