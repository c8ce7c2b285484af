"""Pipeline axis: the stages of one rank under torch's schedules, and a forward-only pass for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    schedules,
)

from cost_aware_trainer.contract import RunPlan, Schedule
from cost_aware_trainer.distributed.layout import ModelStage, pipeline_rank_of, stage_count
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.distributed.tensor_parallel import TensorAxis
from cost_aware_trainer.models.decoder import COMPUTE_TYPES
from cost_aware_trainer.telemetry.traffic import Axis

_SCHEDULES: dict[Schedule, Any] = {
    Schedule.GPIPE: ScheduleGPipe,
    Schedule.ONE_FORWARD_ONE_BACKWARD: Schedule1F1B,
    Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Schedule.ZERO_BUBBLE_V: ScheduleZBVZeroBubble,
}
_SINGLE_STAGE = (Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD)


class Pipeline:
    """Stages of one rank of a pipelined run. The rank of the last stage computes the losses."""

    def __init__(
        self, plan: RunPlan, mesh: Mesh, tensor: TensorAxis, stages: Sequence[tuple[ModelStage, nn.Module]]
    ) -> None:
        self._plan, self._mesh, self._tensor, self._stages = plan, mesh, tensor, stages
        group = mesh.group(Axis.PIPELINE)
        assert group is not None  # noqa: S101  a pipeline has at least two ranks
        self._group = group
        self._dtype = COMPUTE_TYPES[plan.strategy.precision]
        self._stage_count = stage_count(plan)
        self._loss_scale = 1.0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.ranks.device)
        self._is_first = any(stage.is_first for stage, _ in stages)
        self._is_last = any(stage.is_last for stage, _ in stages)
        self._schedule = self._build_schedule()

    def _build_schedule(self) -> Any:
        plan = self._plan
        stages = [self._torch_stage(stage, module) for stage, module in self._stages]
        kind = plan.strategy.schedule
        scheduled: Any = stages[0] if kind in _SINGLE_STAGE else stages
        return _SCHEDULES[kind](scheduled, plan.micro_batches, loss_fn=self._loss, scale_grads=False)

    def _torch_stage(self, stage: ModelStage, module: nn.Module) -> PipelineStage:
        """Makes a stage with given shapes, so that torch need not find them out with a step of its own."""
        model, samples, degree = self._plan.model, self._plan.batch.micro_samples, self._plan.degrees.tensor
        with torch.device("meta"):
            tokens = torch.empty((samples, model.sequence_length), dtype=torch.int64)
            between = self._between(samples).requires_grad_()
            logits = torch.empty((samples, model.sequence_length, model.vocabulary // degree), dtype=self._dtype)
        return PipelineStage(
            module,
            stage.index,
            self._stage_count,
            self._mesh.ranks.device,
            input_args=(tokens if stage.is_first else between,),
            output_args=(logits.requires_grad_() if stage.is_last else between,),
            group=self._group,
        )

    def _between(self, samples: int) -> Tensor:
        """Makes an uninitialised activation as it travels between stages."""
        model = self._plan.model
        positions = model.sequence_length // self._plan.degrees.tensor
        return torch.empty((samples, positions, model.hidden), dtype=self._dtype)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self._tensor.summed_loss(logits, targets)
        self._loss_sum += loss.detach()
        return loss * self._loss_scale

    def step(self, batches: Sequence[Tensor], scale: float) -> Tensor:
        """Runs forward and backward over all micro-batches of tokens (samples, sequence_length + 1).

        Ranks with neither end of the pipeline need no tokens. Returns, until the next step, the summed loss
        on the last stage's device; 0 on others.
        """
        self._loss_scale = scale
        self._loss_sum.zero_()
        count = self._plan.micro_batches
        inputs = [(tokens[:, :-1],) for tokens in batches] if self._is_first else [() for _ in range(count)]
        targets = [tokens[:, 1:] for tokens in batches] if self._is_last else None
        with self._waits_timed():
            self._schedule.step(arg_mbs=inputs, target_mbs=targets, return_outputs=False)
        self._count_bytes(count)
        return self._loss_sum

    @contextmanager
    def _waits_timed(self) -> Iterator[None]:
        """Counts waits for neighbours inside the block as exposed. torch's schedules all wait through one function."""
        original = schedules._wait_batch_p2p

        def timed(work: list[dist.Work]) -> None:
            with self._mesh.traffic.exposed(Axis.PIPELINE):
                original(work)

        schedules._wait_batch_p2p = timed
        try:
            yield
        finally:
            schedules._wait_batch_p2p = original

    def bubble_seconds(self, compute_seconds: float) -> float:
        """Seconds that the schedule makes a rank wait in a step with this compute time, if stages are equal.

        They are (p - 1)/m of its work for GPipe and 1F1B (Huang et al. 2019), divided by the v stages a rank if interleaved
        (Narayanan et al. 2021). Zero-bubble schedules leave a third of that, as weight gradients fill the rest (Qi et al. 2023).
        """
        kind, stages = self._plan.strategy.schedule, self._plan.degrees.pipeline
        share: float = (stages - 1) / self._plan.micro_batches / self._plan.strategy.interleave
        return share * compute_seconds * (1 / 3 if kind in (Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_V) else 1)

    def _count_bytes(self, micro_batches: int) -> None:
        """Counts sent bytes: activations of every stage except the last, gradients of every stage except the first.

        Nothing is counted between two stages of this rank.
        """
        sends = 0
        for stage, _ in self._stages:
            for neighbour in (stage.index - 1, stage.index + 1):
                if 0 <= neighbour < self._stage_count:
                    sends += pipeline_rank_of(neighbour, self._plan) != self._mesh.place.pipeline
        model = self._plan.model
        each = self._plan.batch.micro_samples * model.sequence_length // self._plan.degrees.tensor * model.hidden
        self._mesh.traffic.count(Axis.PIPELINE, float(micro_batches * sends * each * self._dtype.itemsize))

    def forward(self, tokens: Tensor) -> Tensor | None:
        """Computes logits of tokens (samples, positions) on the last stage's rank; None elsewhere. Every rank must call it."""
        x: Tensor | None = None
        for stage, module in sorted(self._stages, key=lambda pair: pair[0].index):
            x = tokens if stage.is_first else self._receive(stage.index - 1, tokens.shape[0], x)
            x = module(x)
            if not stage.is_last:
                self._send(stage.index + 1, x)
        return x if self._is_last else None

    def _receive(self, source: int, samples: int, local: Tensor | None) -> Tensor:
        rank = pipeline_rank_of(source, self._plan)
        if rank == self._mesh.place.pipeline:
            assert local is not None  # noqa: S101  this rank has just computed it
            return local
        x = self._between(samples).to(self._mesh.ranks.device)
        dist.recv(x, group=self._group, group_src=rank)
        return x

    def _send(self, target: int, x: Tensor) -> None:
        rank = pipeline_rank_of(target, self._plan)
        if rank != self._mesh.place.pipeline:
            dist.send(x.contiguous(), group=self._group, group_dst=rank)
