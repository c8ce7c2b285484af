"""Session for your own model, in a run that can be stopped, moved, and resumed under any number of replicas. See docs/trainer.md.

Example:
    with TrainingSession(model, optimizer, folder=…, samples=len(images), global_samples=32, steps=500) as session:
        for x, y in session.batches(lambda indices: (images[indices], labels[indices])):
            session.step(F.cross_entropy(model(x), y, reduction="sum"))
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from cost_aware_trainer.contract import (
    EXIT_INVALID,
    AgentPhase,
    CheckpointPlan,
    LaunchStage,
    Metric,
    OnAllDamaged,
    Phase,
    RunResult,
)
from cost_aware_trainer.contract.rank_environment import RankEnvironment, StepsLog, StopSignal
from cost_aware_trainer.data.samples import SampleOrder, Shard, add_checksums, checksum
from cost_aware_trainer.distributed.collectives import Ranks, Rendezvous, disconnect
from cost_aware_trainer.distributed.data_sum import DataSum, GradientError
from cost_aware_trainer.distributed.gradients import held_whole
from cost_aware_trainer.distributed.mesh import data_mesh
from cost_aware_trainer.distributed.votes import Ballot, StepVote
from cost_aware_trainer.state.checkpoint import CheckpointError
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.validation import InvalidRunError
from cost_aware_trainer.telemetry.launch_stages import Stopwatch
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.training.sessions.checkpoints import SessionCheckpoints
from cost_aware_trainer.training.sessions.checks import (
    check_helpers,
    check_model,
    check_numbers,
    is_of_peer,
    seed_all,
)
from cost_aware_trainer.training.sessions.optimizer import DivergedSessionError, SessionOptimizer
from cost_aware_trainer.training.sessions.reports import SessionReports
from cost_aware_trainer.training.step_report import run_result
from cost_aware_trainer.training.under_way import StepUnderWay

Batch = TypeVar("Batch")


class TrainingSession:
    """Session of one rank in a data-parallel run of a user's own model, from its checkpoint to its result.

    Every rank builds the same model and optimizer; rank 0's weights count. The loss is a *sum* over samples. The session
    divides it by `global_samples` and sums gradients over replicas, so the result does not depend on their number.

    Args:
        model: on any device; it is moved to the rank's own before the optimizer's state exists.
        optimizer: of the model's parameters, with tensors as its state; not stepped yet.
        folder: folder of the checkpoints, shared by all nodes; its parent must exist.
        samples: number of samples; `batches` asks for them by index.
        global_samples: samples of one step; a multiple of the number of ranks × `micro_batches`.
        steps: optimizer steps of the whole run.
        seed: seed of the samples' order.
        micro_batches: number of micro-batches, which is that of `backward` calls, in a step on each rank.
        learning_rate: rate of a step (from 1), if it changes; a pure function, so that there is nothing to save.
        clip_norm: largest gradient norm that is not scaled down.
        interval_seconds: seconds between periodic checkpoints.
        keep: number of newest checkpoints that stay.
        on_all_damaged: what to do where all of them are damaged: stop and keep them, or begin again with them set aside.
        data_fingerprint: text that identifies the data; a resumed run with another text is refused.
        scaler: loss scaler of fp16 training; the session scales losses, and steps and updates it.
        stateful: objects whose state comes back after a restart, by name: learning-rate schedulers, a loader, random number
            generators; anything with `state_dict` and `load_state_dict`. The script steps them as it likes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        folder: str | Path,
        samples: int,
        global_samples: int,
        steps: int,
        seed: int = 0,
        micro_batches: int = 1,
        learning_rate: Callable[[int], float] | None = None,
        clip_norm: float = math.inf,
        interval_seconds: float = 60.0,
        keep: int = 2,
        on_all_damaged: OnAllDamaged = OnAllDamaged.STOP,
        data_fingerprint: str = "",
        scaler: GradScaler | None = None,
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.optimizer, self.steps, self.global_samples = model, optimizer, steps, global_samples
        self._weights = SessionOptimizer(model, optimizer, scaler, learning_rate, clip_norm)
        self._samples, self._micro_batches, self._seed = samples, micro_batches, seed
        self._plan = CheckpointPlan(
            folder=str(folder),
            interval_seconds=interval_seconds,
            keep=keep,
            on_all_damaged=OnAllDamaged(on_all_damaged),
        )
        self._facts = RunFacts(
            model={"parameters": sum(parameter.numel() for parameter in model.parameters())},
            seed=seed,
            global_samples=global_samples,
            data_sha256=data_fingerprint or f"{samples} samples",
        )
        self._environment = RankEnvironment.from_environment()
        self._stop = StopSignal(self._environment)
        self._order = SampleOrder(samples, seed)
        self._progress = RunProgress()
        self._heldout_loss: float | None = None
        self._trained = self._backwards = 0
        self._loss_sum = torch.zeros(())
        self._stopped = False
        self._scaler, self._stateful = scaler, dict(stateful or {})
        self._has_looked = False

    def __enter__(self) -> Self:
        """Joins the other ranks and resumes from the newest checkpoint. A run that can never work exits with EXIT_INVALID."""
        start = Stopwatch.of_start(self._environment.launch)
        try:
            check_numbers(samples=self._samples, global_samples=self.global_samples, steps=self.steps)
            check_model(self.model, self.optimizer)
            self._stop.listen()
            self._join(start)
            start.end(LaunchStage.REBUILD)
            self._resume()
            start.end(LaunchStage.LOAD)
        except InvalidRunError as error:
            self._refuse(error)
        except CheckpointError as error:
            self._environment.write_result(RunResult(outcome=AgentPhase.FAILED, message=str(error)))
            raise
        self._reports = SessionReports(
            self._mesh,
            self._metrics,
            StepsLog(Path(self._plan.folder) / "steps.jsonl" if self.ranks.is_first else None),
            attempt=self._environment.attempt,
            global_samples=self.global_samples,
            stage_seconds=start.stage_seconds,
            on_phase=self._beat,
        )
        self._clock = self._reports.clock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes the result for the agent: completed, stopped with a checkpoint, or failed with its reason."""
        if error is None:
            self._reports.show()
            try:
                self._save_if_due()
            except CheckpointError as failure:
                self._write_result(AgentPhase.FAILED, str(failure))
                raise
        self._checkpoints.checkpointer.close()
        self._data_sum.close()
        self._reports.close()
        if isinstance(error, DivergedSessionError | CheckpointError):
            self._write_result(AgentPhase.FAILED, str(error))
        elif isinstance(error, Exception) and not is_of_peer(error):
            # The rank that fails first says why; its peers only see that it has gone.
            why = f"rank {self.ranks.rank}, step {self.step_number + 1}: {type(error).__name__}: {error}"
            self._write_result(AgentPhase.FAILED, why, of_any_rank=True)
        if error is None:
            is_complete = self.step_number >= self.steps
            self._write_result(
                AgentPhase.COMPLETED if is_complete else AgentPhase.CHECKPOINTED,
                "" if is_complete else "stopped as asked, with a checkpoint",
            )
            disconnect()
            self.ranks.heartbeat.close()

    def _beat(self, phase: Phase) -> None:
        self.ranks.heartbeat.beat(phase.value, self.step_number + 1)

    def _join(self, start: Stopwatch) -> None:
        rendezvous = Rendezvous.from_environment()
        unit = rendezvous.size * self._micro_batches
        if self.global_samples % unit:
            raise InvalidRunError(
                f"global_samples: {self.global_samples} is no multiple of {rendezvous.size} ranks × {self._micro_batches} "
                f"micro-batches; write {(self.global_samples // unit + 1) * unit}, or start another number of ranks"
            )
        self.ranks: Ranks = rendezvous.join("first")
        start.end(LaunchStage.RENDEZVOUS)
        self._shard = Shard(self.global_samples, self.ranks.rank, self.ranks.size)
        self._mesh = data_mesh(self.ranks)
        self.model.to(self.ranks.device)
        self._data_sum = DataSum(self._mesh, self._micro_batches, use_differs=True)
        watched = [held for held in held_whole(self.model) if held.parameter.requires_grad]
        self._frozen = [held for held in held_whole(self.model) if not held.parameter.requires_grad]
        if self.ranks.size > 1:
            self._data_sum.watch(watched)
        self._metrics = RankMetrics(self.ranks.rank)
        self._metrics.serve(self.ranks.local_rank)

    def _resume(self) -> None:
        """Fills model and optimizer from the newest good checkpoint, or makes all ranks begin with rank 0's weights."""
        self._checkpoints = SessionCheckpoints(self.model, self.optimizer, self._scaler, self._stateful, self.ranks)
        self._progress = self._checkpoints.resume(self._plan, self._facts, self._metrics) or self._progress
        for metric in (Metric.RESUMED_STEP, Metric.CHECKPOINT_STEP, Metric.STEP):
            self._metrics.set(metric, self.step_number)
        self._metrics.set(Metric.TOTAL_STEPS, self.steps)

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self.ranks.device

    @property
    def step_number(self) -> int:
        """Last completed step; 0 before the first."""
        return self._progress.step

    @property
    def samples_checksum(self) -> str:
        """Order-free hash over all samples that made the weights; it depends neither on the number of replicas nor on stops."""
        return self._progress.samples_checksum

    def batches(self, load: Callable[[NDArray[np.int64]], Batch]) -> Iterator[Batch]:
        """Yields this rank's micro-batches, until the last step or until the run is asked to stop at a boundary.

        `load` gets indices (micro-batch,) from 0 to `samples` - 1; its time counts as data. Before each step the random
        numbers of torch, numpy and Python are seeded from the run's seed, the step and the rank. A checkpoint that is due is
        saved when the loop's body has ended, so that it holds what the body did after `step`, to a scheduler for example.

        Raises:
            RuntimeError: the loop's body did not call `step` after the step's last micro-batch.
            CheckpointError: the run could not be saved.
        """
        micro_batch = self.global_samples // self.ranks.size // self._micro_batches
        while self.step_number < self.steps and not self._stopped:
            before = self.step_number
            seed_all(hash((self._seed, before, self.ranks.rank)) & 0x7FFFFFFF)
            for positions in self._shard.micro_batch_positions(before, micro_batch):
                with self._clock.phase(Phase.DATA):
                    indices = self._order.at(positions)
                    self._trained = add_checksums(self._trained, checksum(positions, indices))
                    batch = load(indices.astype(np.int64))
                yield batch
            if self.step_number == before:
                raise RuntimeError(
                    "batches: the loop went on without a step; call session.step() after the backward pass"
                )
            self._save_if_due()

    def backward(self, loss_sum: Tensor) -> None:
        """Runs the backward pass of one micro-batch's summed loss. Replicas' gradients are summed meanwhile.

        Raises:
            GradientError: a parameter's gradient cannot be summed over the ranks.
        """
        if self._backwards == 0:
            self._begin_step()
        self._backwards += 1
        self._weights.backward(loss_sum / self.global_samples)
        self._loss_sum = self._loss_sum.to(loss_sum.device) + loss_sum.detach().double()

    def _begin_step(self) -> None:
        """Saves what is due of the step before, and prepares the sum of gradients."""
        self._save_if_due()
        if not self._has_looked:
            self._has_looked = True
            known = [*self._stateful.values(), *([self._scaler] if self._scaler else [])]
            try:
                check_helpers(self.optimizer, known)
            except InvalidRunError as error:
                self._refuse(error)
        if name := next((held.name for held in self._frozen if held.parameter.requires_grad), ""):
            raise GradientError(
                f"{name}: it did not require a gradient when the session began, so that its gradient would not be summed; set "
                "requires_grad before, and freeze it afterwards if it is to be trained later"
            )
        if self.ranks.size > 1:
            self._data_sum.begin()

    def step(self, loss_sum: Tensor | None = None) -> float:
        """Ends a step: applies the summed gradients, and notes whether to save or stop after the loop's body. Returns the mean loss.

        `loss_sum` is the last micro-batch's summed loss, if `backward` was not called for it.

        Raises:
            DivergedSessionError: the loss or the gradient is not finite.
            CheckpointError: an earlier save failed.
        """
        if loss_sum is not None:
            self.backward(loss_sum)
        if self._backwards != self._micro_batches:
            raise RuntimeError(f"step: {self._backwards} backward passes in it, micro_batches is {self._micro_batches}")
        self._backwards = 0
        if self.ranks.size > 1:
            self._data_sum.finish()
        self._weights.unscale()
        waits = self._mesh.traffic.take_waits()
        saves, buffers = self._checkpoints.saves, self._checkpoints.buffers
        flags, changed = (self._stop.is_set(), saves.is_due(), saves.has_failed()), buffers.have_changed()
        # replicas have the same gradient after the sum: one of them reports it
        norm = self._weights.squared_norm() if self.ranks.is_first else 0.0
        work_seconds = self._reports.work_seconds(waits)
        vote = StepVote(self._loss_sum, self._trained, norm, *flags, buffers_changed=changed, work_seconds=work_seconds)
        with self._clock.phase(Phase.COMMUNICATION):
            ballot = Ballot.cast(self.ranks, vote)
            agreed = ballot.read()
            buffers.share(learn=agreed.buffers_changed)
        self._loss_sum, self._trained = torch.zeros(()), 0
        loss = agreed.loss_sum / self.global_samples
        with self._clock.phase(Phase.OPTIMIZER):
            self._weights.update(
                self.step_number + 1, loss, agreed.gradient_norm, self._checkpoints.checkpointer.saved_step
            )
        self._progress, self._stopped = self._progress.advanced(agreed.checksum, loss), agreed.wants_stop
        if agreed.save_failed:
            saves.settle()
        is_last = agreed.wants_stop or self.step_number == self.steps
        self._checkpoints.note(is_last=is_last, is_due=agreed.wants_checkpoint)
        rate = float(self.optimizer.param_groups[0]["lr"])
        step = StepUnderWay(self.step_number, rate, ballot, waits, agreed, self._progress, self._heldout_loss)
        self._reports.end(step)
        return loss

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Books the block as evaluation, without gradients and with the model in its evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        with self._clock.phase(Phase.EVALUATION), torch.no_grad():
            yield
        self.model.train(was_training)

    def sum(self, *values: float) -> list[float]:
        """Sums values over all ranks, losses and counts for example. Every rank must call it."""
        return self.ranks.sum(list(values))

    def report_heldout_loss(self, loss: float) -> None:
        """Shows a held-out loss in metrics and in the result; raises DivergedSessionError if it is not finite."""
        if not math.isfinite(loss):
            raise DivergedSessionError(f"step {self.step_number}: the held-out loss is {loss}: not finite")
        self._heldout_loss = loss
        self._metrics.set(Metric.HELDOUT_LOSS, loss)

    def _save_if_due(self) -> None:
        if self._checkpoints.is_due:
            with self._clock.phase(Phase.CHECKPOINT):
                self._checkpoints.save(self._progress, self._environment.attempt)

    def _refuse(self, error: InvalidRunError) -> NoReturn:
        """Ends a run that can never work, with its reason for the agent."""
        self._environment.write_result(RunResult(outcome=AgentPhase.INVALID, message=str(error)))
        print(f"invalid run: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_INVALID)

    def _write_result(self, outcome: AgentPhase, message: str, *, of_any_rank: bool = False) -> None:
        result = run_result(
            outcome,
            self._progress,
            total_steps=self.steps,
            global_samples=self.global_samples,
            heldout_loss=self._heldout_loss,
            save_seconds=self._checkpoints.saves.waited_seconds,
            message=message,
        )
        if self.ranks.local_rank == 0 or of_any_rank:
            self._environment.write_result(result)
