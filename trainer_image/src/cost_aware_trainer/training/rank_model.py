"""Model of a rank: everything that depends on degrees and strategy, so that it can be thrown away and built again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cost_aware_trainer.contract import Phase, RunPlan
from cost_aware_trainer.data.samples import SampleOrder, Shard, Uint64Array
from cost_aware_trainer.data.token_files import Corpus
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.compression.sums import BITS
from cost_aware_trainer.distributed.layout import Shape
from cost_aware_trainer.distributed.mesh import build_mesh
from cost_aware_trainer.distributed.stragglers import book_straggler_wait
from cost_aware_trainer.state.state import Checksums, StatePart, allocate_moments, parts_of
from cost_aware_trainer.telemetry.phases import Lap
from cost_aware_trainer.telemetry.traffic import PHASE_OF, Waits
from cost_aware_trainer.training.evaluation import heldout_loss
from cost_aware_trainer.training.model_part import ModelPart
from cost_aware_trainer.training.optimizer import build_optimizer, set_learning_rate, update


class RankModel:
    """Mesh of a rank, its part of the model and of the optimizer, and its share of every step's samples."""

    def __init__(self, plan: RunPlan, ranks: Ranks, shapes: dict[str, Shape]) -> None:
        self.plan, self.ranks = plan, ranks
        self.mesh = build_mesh(ranks, plan)
        self._shapes = shapes
        self.part = ModelPart(plan, self.mesh, shapes)
        """Part of the model that this rank holds."""
        self._optimizer = build_optimizer(
            [(held.name, held.parameter) for held in self.part.parameters], plan.optimizer
        )
        allocate_moments(self._optimizer, self.part.parameters)
        self.checksums = Checksums(self.mesh, shapes, is_sharded=self.part.is_sharded)
        self._shard = Shard(plan.batch.global_samples, self.mesh.place.data, plan.degrees.data)

    @property
    def reports(self) -> bool:
        """Whether this rank reports loss and samples of its replica."""
        return self.part.reports

    def initialise(self) -> None:
        """Sets the run's first weights."""
        self.part.initialise(self._shapes, self.plan.seed)

    def parts(self) -> list[StatePart]:
        """Lists this rank's parts of the run's state, in place."""
        return parts_of(self.part.parameters, self._optimizer, self._shapes)

    def positions(self, step: int) -> Iterator[Uint64Array]:
        """Yields global positions of this replica's samples of a step (counted from 0), one micro-batch at a time."""
        return self._shard.micro_batch_positions(step, self.plan.batch.micro_samples)

    def tokens(self, corpus: Corpus, order: SampleOrder, positions: Uint64Array) -> Tensor:
        """Reads the samples at positions, (samples, sequence_length + 1); empty on ranks that need none."""
        if not self.part.needs_tokens:
            return torch.empty(0)
        return self.ranks.to_device(torch.from_numpy(corpus.train_windows(order.at(positions))))

    def accumulate(self, step: int, batches: Iterator[Tensor]) -> tuple[Tensor | float, Tensor]:
        """Runs forward and backward of a step, counted from 1, over the tokens of each micro-batch.

        Gradients are not quantised while the learning rate warms up. They are largest and differ most then, and the effect of
        rounding on Adam's second moments stays for hundreds of steps (1-bit Adam, 2102.02888, warms up for the same reason).

        Returns:
            this rank's shares of the summed loss and of the gradient's squared norm, on the device.
        """
        plan = self.plan
        scale = 1.0 / (plan.batch.global_samples * plan.model.sequence_length)
        warms_up = step <= plan.optimizer.warmup_steps and plan.strategy.compression in BITS
        loss_sum = self.part.step(batches, scale, uncompressed=warms_up)
        return loss_sum if self.reports else 0.0, self.part.squared_gradient_norm()

    def book(self, lap: Lap, waits: Waits) -> None:
        """Moves a step's waits, which lie in the time of its forward and backward passes, to phases of their own."""
        for axis, seconds in waits.seconds().items():
            lap.move(Phase.COMPUTE, PHASE_OF[axis], seconds)
        # the schedule explains this part of the waits for neighbours; the rest is the sends themselves
        bubble_seconds = self.part.bubble_seconds(lap.phase_seconds[Phase.COMPUTE])
        lap.move(Phase.PIPELINE_COMMUNICATION, Phase.PIPELINE_BUBBLE, bubble_seconds)

    def book_straggler_wait(self, lap: Lap, seconds_of: Sequence[float]) -> None:
        """See `stragglers.book_straggler_wait`."""
        book_straggler_wait(lap, seconds_of, self.mesh.place, self.plan.degrees)

    def update(self, loss_and_norm: Tensor, rate: float) -> None:
        """Clips by the global norm and applies the optimizer's step, unless loss or norm, on the device, are not finite."""
        set_learning_rate(self._optimizer, rate)
        update(self._optimizer, loss_and_norm, self.plan.optimizer.gradient_clip)

    def drain_residuals(self) -> dict[str, Tensor]:
        """See `ModelPart.drain_residuals`."""
        return self.part.drain_residuals()

    def carry_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """See `ModelPart.carry_residuals`."""
        self.part.carry_residuals(residuals)

    def heldout_loss(self, corpus: Corpus) -> float:
        """Mean held-out loss, nats per token."""
        samples, micro_batch = self.plan.evaluation_samples, self.plan.batch.micro_samples
        return heldout_loss(self.part, corpus, self.mesh, samples, micro_batch)

    def close(self) -> None:
        """Drops the process groups: torch's threads for a group live until the last reference to it is gone."""
        self.part.close()
