"""Everything of a rank that depends on degrees and strategy, so that it can be thrown away and built anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cost_aware_trainer.contract import RunPlan
from cost_aware_trainer.data.samples import SampleOrder, Shard, Uint64Array
from cost_aware_trainer.data.token_files import Corpus
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.compression.sums import BITS
from cost_aware_trainer.distributed.gradients import clip
from cost_aware_trainer.distributed.layout import Shape
from cost_aware_trainer.distributed.mesh import build_mesh
from cost_aware_trainer.distributed.stragglers import book_straggler_wait
from cost_aware_trainer.state.state import Checksums, StatePart, allocate_moments, parts_of
from cost_aware_trainer.telemetry.phases import PhaseClock
from cost_aware_trainer.training.evaluation import heldout_loss
from cost_aware_trainer.training.model_part import Replica
from cost_aware_trainer.training.optimizer import build_optimizer, set_learning_rate


class Arrangement:
    """A rank's mesh, its part of the model and of the optimizer, and its share of every step's samples."""

    def __init__(self, plan: RunPlan, ranks: Ranks, shapes: dict[str, Shape]) -> None:
        self.plan, self.ranks = plan, ranks
        self.mesh = build_mesh(ranks, plan)
        self._shapes = shapes
        self._replica = Replica(plan, self.mesh, shapes)
        self._optimizer = build_optimizer([(held.name, held.parameter) for held in self._replica.held], plan.optimizer)
        allocate_moments(self._optimizer, self._replica.held)
        self.checksums = Checksums(self.mesh, shapes, is_sharded=self._replica.is_sharded)
        self._shard = Shard(plan.batch.global_samples, self.mesh.place.data, plan.degrees.data)

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for its replica."""
        return self._replica.reports

    def initialise(self) -> None:
        """The run's first weights."""
        self._replica.initialise(self._shapes, self.plan.seed)

    def parts(self) -> list[StatePart]:
        """This rank's part of the run's state, in place."""
        return parts_of(self._replica.held, self._optimizer, self._shapes)

    def positions(self, step: int) -> Iterator[Uint64Array]:
        """Global positions of this replica's samples of a step (counted from 0), by micro-batch."""
        return self._shard.micro_batches(step, self.plan.batch.micro_samples)

    def tokens(self, corpus: Corpus, order: SampleOrder, positions: Uint64Array) -> Tensor:
        """The samples at positions, (samples, sequence_length + 1); empty on ranks that need none."""
        if not self._replica.needs_tokens:
            return torch.empty(0)
        return torch.from_numpy(corpus.train_windows(order.at(positions))).to(self.ranks.device)

    def accumulate(self, step: int, micro_batches: Iterator[Tensor]) -> tuple[float, float]:
        """Forward and backward of a step, counted from 1; returns this rank's shares of the summed loss and of the squared norm.

        Gradients are not quantised while the learning rate warms up: they are largest and differ most then, and what rounding
        does to Adam's second moments stays for hundreds of steps (1-bit Adam, 2102.02888, warms up for the same reason).
        """
        plan = self.plan
        scale = 1.0 / (plan.batch.global_samples * plan.model.sequence_length)
        warms_up = step <= plan.optimizer.warmup_steps and plan.strategy.compression in BITS
        loss_sum = self._replica.step(micro_batches, scale, uncompressed=warms_up)
        return loss_sum if self.reports else 0.0, self._replica.squared_gradient_norm()

    def bubble_seconds(self, compute_seconds: float) -> float:
        """What the pipeline's schedule makes a rank wait in a step in which it computes so long; 0 without a pipeline."""
        return self._replica.bubble_seconds(compute_seconds)

    def book_straggler_wait(self, clock: PhaseClock, work_seconds: Sequence[float]) -> None:
        """See `stragglers.book_straggler_wait`."""
        book_straggler_wait(clock, work_seconds, self.mesh.place, self.plan.degrees)

    def update(self, norm: float, rate: float) -> None:
        """Clips by the global norm and applies the optimizer's step."""
        clip(self._replica.held, norm, self.plan.optimizer.gradient_clip)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()

    def drain_residuals(self) -> dict[str, Tensor]:
        """See `Replica.drain_residuals`."""
        return self._replica.drain_residuals()

    def owe(self, residuals: Mapping[str, Tensor]) -> None:
        """See `Replica.owe`."""
        self._replica.owe(residuals)

    def heldout_loss(self, corpus: Corpus) -> float:
        """Mean held-out loss, nats per token."""
        samples, micro_samples = self.plan.evaluation_samples, self.plan.batch.micro_samples
        return heldout_loss(self._replica, corpus, self.mesh, samples, micro_samples)

    def close(self) -> None:
        """Frees process groups: torch's threads for a group live until the last reference to it is gone."""
        self._replica.close()
