"""One rank of a training run: from a plan to a result, step by step.

Started by torchrun, under the agent or by hand:

    python -m torch.distributed.run --nproc-per-node=N -m cost_aware_trainer --plan PLAN.json --steps-log LOG.jsonl
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from cost_aware_trainer.contract import (
    AgentPhase,
    LaunchStage,
    Metric,
    Phase,
    Reconfiguration,
    Reconfigured,
    RunPlan,
    RunResult,
)
from cost_aware_trainer.contract.rank_environment import StepsLog, Surroundings
from cost_aware_trainer.data.prefetch import Prefetcher
from cost_aware_trainer.data.samples import SampleOrder, add_checksums, checksum, checksum_text
from cost_aware_trainer.data.streaming import open_data
from cost_aware_trainer.data.token_files import Corpus, DataError
from cost_aware_trainer.distributed.collectives import Ranks, StepVote, combine, combine_bytes, disconnect
from cost_aware_trainer.distributed.stragglers import WorkMeter
from cost_aware_trainer.models.decoder import model_flops_per_token, parameter_shapes
from cost_aware_trainer.state.checkpoint import Checkpointer, RunProgress
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.memory.tier import MemoryTier
from cost_aware_trainer.state.reconfigure import Carried, Succession, check_successor, hand_over
from cost_aware_trainer.state.saves import PeriodicSaves
from cost_aware_trainer.state.state import StatePart, residual_parts
from cost_aware_trainer.state.validation import InvalidRunError
from cost_aware_trainer.telemetry.launch_stages import Stopwatch
from cost_aware_trainer.telemetry.metrics import RankMetrics, peak_memory_bytes
from cost_aware_trainer.telemetry.phases import PhaseClock
from cost_aware_trainer.telemetry.traffic import PHASE_OF, Axis
from cost_aware_trainer.training.optimizer import learning_rate
from cost_aware_trainer.training.rank_model import Arrangement

logger = logging.getLogger(__name__)


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer a finite number."""


def open_corpus(plan: RunPlan, ranks: Ranks) -> Corpus:
    """Opens the plan's data on every rank; rank 0 verifies the hashes too.

    Raises:
        InvalidRunError: on all ranks, if any of them cannot use its data folder.
    """
    corpus, problem = None, ""
    try:
        with ranks.heart.phase("fetch"):
            corpus = open_data(plan.data_folder, plan.model.sequence_length, verify_hashes=ranks.is_first)
    except DataError as error:
        problem = f"data_folder, rank {ranks.rank}: {error}"
    agreed = ranks.first_problem(problem)
    if corpus is None or agreed:
        raise InvalidRunError(agreed)
    return corpus


class Trainer:
    """All that one rank holds of a run.

    Raises (when built):
        InvalidRunError: data or checkpoints do not fit the plan.
        CheckpointError: a good checkpoint could not be loaded.
    """

    def __init__(
        self,
        plan: RunPlan,
        ranks: Ranks,
        surroundings: Surroundings,
        metrics: RankMetrics,
        steps_log: StepsLog,
        wants_stop: Callable[[], bool],
        succession: Succession | None = None,
        start: Stopwatch | None = None,
    ) -> None:
        watch = start or Stopwatch()
        self._plan, self._ranks, self._attempt = plan, ranks, surroundings.attempt
        self._metrics, self._steps_log, self._wants_stop = metrics, steps_log, wants_stop
        self._surroundings, self._succession = surroundings, succession
        self._corpus = open_corpus(plan, ranks)
        self._order = SampleOrder(self._corpus.windows, plan.seed)
        self._shapes = parameter_shapes(plan.model)
        self._flops_per_token = model_flops_per_token(plan.model)
        self._arrangement = Arrangement(plan, ranks, self._shapes)
        self._prefetcher = Prefetcher(self._read_tokens)
        self._checkpointer = Checkpointer(plan.checkpoint, ranks, self._facts())
        self._memory = MemoryTier(plan, ranks, self._facts())
        self._progress = RunProgress()
        self._heldout_loss: float | None = None
        self._is_superseded = False
        watch.end(LaunchStage.REBUILD)
        self._resume()
        watch.end(LaunchStage.LOAD)
        self._stage_seconds = watch.stage_seconds
        self._clock = PhaseClock(synchronise=ranks.synchronise, on_phase=self._beat)
        self._work = WorkMeter(self._clock)
        self._saves = PeriodicSaves(self._checkpointer, ranks, metrics, plan.checkpoint.interval_seconds)

    def _beat(self, phase: Phase) -> None:
        self._ranks.heart.beat(phase.value, self._progress.step + 1)

    def _facts(self) -> RunFacts:
        return RunFacts(
            model=dataclasses.asdict(self._plan.model),
            seed=self._plan.seed,
            global_samples=self._plan.batch.global_samples,
            data_sha256=self._corpus.manifest.train.sha256,
        )

    def _resume(self) -> None:
        self._checkpointer.check_folder()
        arrangement = self._arrangement
        self._progress = self._recalled(arrangement.parts()) or RunProgress()
        if not self._progress.step:
            self._checkpointer.saved_step = 0
            arrangement.initialise()
        step = self._progress.step
        if self._ranks.is_first:
            logger.info("resuming after step %d" if step else "no checkpoint, starting at step %d", step)
        self._metrics.set(Metric.RESUMED_STEP, step)
        self._metrics.set(Metric.CHECKPOINT_STEP, self._checkpointer.saved_step)
        self._metrics.set(Metric.STEP, self._progress.step)
        self._metrics.set(Metric.TOTAL_STEPS, self._plan.steps)

    def _recalled(self, parts: list[StatePart]) -> RunProgress | None:
        """Fills `parts` from the newest good state, in the nodes' memory or on the volume; None where there is none."""
        newest = self._checkpointer.saved_step = self._checkpointer.newest_step()
        recalled = self._memory.resume(parts, newest)
        if recalled:
            return recalled
        found = self._checkpointer.resume(parts, self._arrangement.checksums, self._shapes)
        owed = self._checkpointer.take_residuals()
        step = found.step if found else 0
        # where the volume's newest turned out to be damaged, what is in memory may be newer than its newest good one
        recalled = self._memory.resume(parts, step) if step < newest else None
        if recalled:
            return recalled
        self._memory.forget()
        self._arrangement.owe(owed)
        return RunProgress(found.step, int(found.samples_checksum, 16), found.loss) if found else None

    def run(self) -> RunResult:
        """Trains until the last step or until any rank is asked to stop; a checkpoint of that step is then on disk.

        Raises:
            DivergedError: loss or gradient are not finite; the last good checkpoint is kept.
            CheckpointError: the run could not be saved.
        """
        try:
            stopped = False
            while self._progress.step < self._plan.steps and not stopped:
                stopped = self._step()
                if self._is_superseded and not stopped and self._progress.step < self._plan.steps:
                    self._reconfigure()
        finally:
            self._checkpointer.close()
            self._memory.close(is_complete=self._progress.step >= self._plan.steps)
            self._prefetcher.close()
        if self._progress.step < self._plan.steps:
            return self.result(AgentPhase.CHECKPOINTED, "stopped as asked, with a checkpoint")
        if self._heldout_loss is None:
            self._evaluate()
        return self.result(AgentPhase.COMPLETED)

    def result(self, outcome: AgentPhase, message: str = "") -> RunResult:
        """The run's result as it stands."""
        return RunResult(
            outcome=outcome,
            step=self._progress.step,
            total_steps=self._plan.steps,
            loss=self._progress.loss,
            heldout_loss=self._heldout_loss,
            samples=self._progress.step * self._plan.batch.global_samples,
            samples_checksum=checksum_text(self._progress.checksum),
            message=message,
            save_seconds=self._saves.waited_seconds,
        )

    def _step(self) -> bool:
        """One optimizer step on the global batch; True if the run is to stop after it."""
        step = self._progress.step + 1
        vote = self._accumulate()
        with self._clock.phase(Phase.COMMUNICATION):
            agreed = combine(self._ranks, vote)
        self._arrangement.book_straggler_wait(self._clock, agreed.work_seconds_of)
        loss = agreed.loss_sum / (self._plan.batch.global_samples * self._plan.model.sequence_length)
        gradient_norm = math.sqrt(agreed.squared_norm)
        rate = self._update(step, loss, gradient_norm)
        self._progress = RunProgress(step, add_checksums(self._progress.checksum, agreed.checksum), loss)
        self._is_superseded = agreed.is_ready
        if agreed.save_failed:
            self._saves.settle()
        is_last = step == self._plan.steps
        if agreed.wants_stop or agreed.wants_checkpoint or is_last:
            self._save(wait=agreed.wants_stop or is_last, stops=agreed.wants_stop and not is_last)
        if agreed.wants_copy and not (agreed.is_copying or agreed.wants_stop or is_last):
            with self._clock.phase(Phase.CHECKPOINT):
                self._memory.save(self._progress, self._attempt, self._arrangement.parts())
        if step % self._plan.evaluate_every_steps == 0 or is_last:
            self._evaluate()
        self._report(gradient_norm, rate)
        return agreed.wants_stop

    def _accumulate(self) -> StepVote:
        """Forward and backward over this rank's share of the step, whose gradients are then summed over the ranks."""
        arrangement, self._trained = self._arrangement, 0
        loss_sum, squared_norm = arrangement.accumulate(self._progress.step + 1, self._micro_batches())
        self._clock.settle()
        for axis, seconds in arrangement.mesh.traffic.take_seconds().items():
            self._clock.move(Phase.COMPUTE, PHASE_OF[axis], seconds)
        # of what a rank waits for its neighbours, the schedule explains this much; the rest is the sends themselves
        bubble_seconds = arrangement.bubble_seconds(self._clock.booked(Phase.COMPUTE))
        self._clock.move(Phase.PIPELINE_COMMUNICATION, Phase.PIPELINE_BUBBLE, bubble_seconds)
        flags = self._wants_stop(), self._saves.is_due(), self._saves.has_failed(), self._next_plan() is not None
        return StepVote(
            loss_sum,
            self._trained,
            squared_norm,
            *flags,
            self._memory.is_due,
            self._memory.poll(),
            self._work.seconds(),
        )

    def _micro_batches(self) -> Iterator[Tensor]:
        """This replica's samples of the step, read when they are needed, noting what is trained."""
        arrangement = self._arrangement
        for positions in arrangement.positions(self._progress.step):
            with self._clock.phase(Phase.DATA):
                tokens = self._prefetcher.take((int(positions[0]), len(positions)))
                if arrangement.reports:
                    self._trained = add_checksums(self._trained, checksum(positions, self._order.at(positions)))
            yield tokens
        following = arrangement.positions(self._progress.step + 1)
        self._prefetcher.ahead((int(positions[0]), len(positions)) for positions in following)

    def _read_tokens(self, samples: tuple[int, int]) -> Tensor:
        """Reads the samples at so many positions from a first one on, for this rank's place."""
        first, count = samples
        positions = np.arange(first, first + count, dtype=np.uint64)
        return self._arrangement.tokens(self._corpus, self._order, positions)

    def _next_plan(self) -> Reconfiguration | None:
        """The plan of a newer attempt, if this rank has seen one."""
        newest = self._succession.newest() if self._succession else None
        return newest if newest and newest.attempt > self._attempt else None

    def _reconfigure(self) -> None:
        """Goes on under the newest plan, in the same process; the state travels from memory to memory.

        Raises:
            InvalidRunError: the plan is impossible; nothing has changed yet.
            CheckpointError: a checkpoint that was being written failed.
        """
        succession = self._succession
        assert succession is not None  # noqa: S101  the ranks have voted for what it told
        next_plan, started_seconds = self._next_plan(), succession.written_seconds_ago()
        document = json.loads(next_plan.to_json()) if next_plan else None
        newest = Reconfiguration.from_document(self._ranks.broadcast_json(document))
        check_successor(self._plan, newest.plan, self._ranks.size)
        watch = Stopwatch(started_seconds)
        self._saves.settle()
        self._memory.leave()
        watch.end(LaunchStage.DRAIN)
        residuals = self._arrangement.drain_residuals()
        carried = Carried.of(self._plan, self._progress.step, self._arrangement.parts(), residuals)
        # what was read ahead is for the old place
        self._prefetcher.ahead(())
        self._arrangement.close()
        del self._arrangement
        watch.end(LaunchStage.SAVE)
        disconnect()
        # What refers to itself in a circle would keep groups alive, and with them their threads.
        gc.collect()
        self._ranks = succession.rejoin(f"attempt-{newest.attempt}")
        self._saves.join(self._ranks, newest.plan.checkpoint.interval_seconds)
        self._memory.join(newest.plan, self._ranks)
        self._arrangement = Arrangement(newest.plan, self._ranks, self._shapes)
        watch.end(LaunchStage.REBUILD)
        self._arrangement.owe(hand_over(carried, newest.plan, self._arrangement.parts(), self._shapes, self._ranks))
        watch.end(LaunchStage.LOAD)
        self._plan, self._attempt = newest.plan, newest.attempt
        self._metrics.start_attempt(newest.attempt)
        self._metrics.set(Metric.RESUMED_STEP, self._progress.step)
        self._stage_seconds = watch.stage_seconds
        self._ranks.heart.begin_anew()
        # The steps' clock starts anew: this time belongs to none of them.
        self._clock.lap()
        self._work.end(None)

    def _note_first_step(self, stage_seconds: dict[LaunchStage, float]) -> None:
        """Says how long it took to get here, from the order on; in process, to the agent too."""
        self._metrics.set_stages(stage_seconds)
        if self._attempt == self._surroundings.attempt:
            return
        self._metrics.add(Metric.RECONFIGURATIONS, 1)
        seconds = {f"{stage.value}_seconds": value for stage, value in stage_seconds.items()}
        told = Reconfigured(attempt=self._attempt, step=self._progress.step, **seconds)
        self._surroundings.write_reconfigured(told)
        if self._ranks.is_first:
            logger.info("attempt %d goes on in process after %.3f s", self._attempt, told.total_seconds)

    def _update(self, step: int, loss: float, norm: float) -> float:
        """Clips, sets the rate and applies the step; returns the rate."""
        with self._clock.phase(Phase.OPTIMIZER):
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise DivergedError(
                    f"step {step}: loss {loss}, gradient norm {norm}: not finite; the checkpoint of "
                    f"step {self._checkpointer.saved_step} is kept; lower optimizer.learning_rate or warm up longer"
                )
            rate = learning_rate(self._plan.optimizer, step, self._plan.steps)
            self._arrangement.update(norm, rate)
        return rate

    def _save(self, *, wait: bool, stops: bool = False) -> None:
        """Saves; with what compression still owes where the ranks stop here, for only then nobody adds it to a next gradient."""
        arrangement = self._arrangement
        with self._clock.phase(Phase.CHECKPOINT):
            parts = arrangement.parts()
            residuals = arrangement.drain_residuals() if stops else {}
            parts += residual_parts(parts, residuals) if residuals else []
            self._saves.save(self._progress, self._attempt, parts, arrangement.checksums, wait=wait)

    def _evaluate(self) -> None:
        with self._clock.phase(Phase.EVALUATION):
            self._heldout_loss = self._arrangement.heldout_loss(self._corpus)
        # Evaluation has a phase of its own, whatever it waits for.
        self._arrangement.mesh.traffic.take_seconds()
        self._metrics.set(Metric.HELDOUT_LOSS, self._heldout_loss)
        if self._ranks.is_first:
            logger.info("step %d: held-out loss %.4f", self._progress.step, self._heldout_loss)

    def _report(self, gradient_norm: float, rate: float) -> None:
        """Metrics of this rank; rank 0's line in the steps log."""
        plan, progress = self._plan, self._progress
        sent_bytes = self._arrangement.mesh.traffic.take_bytes()
        sent_bytes[Axis.DATA] += combine_bytes(self._ranks)
        lap = self._clock.lap()
        self._work.end(lap)
        stage_seconds, self._stage_seconds = self._stage_seconds, {}
        if stage_seconds:
            stage_seconds[LaunchStage.FIRST_STEP] = lap.step_seconds
            self._note_first_step(stage_seconds)
        # Every sample counts on all ranks of its replica; over the run's ranks they add up to the global batch.
        samples = plan.batch.global_samples / plan.degrees.ranks
        gauges = {
            Metric.STEP: progress.step,
            Metric.LOSS: progress.loss or 0.0,
            Metric.GRADIENT_NORM: gradient_norm,
            Metric.LEARNING_RATE: rate,
            Metric.MEMORY_BYTES: peak_memory_bytes(self._ranks.device),
        }
        for gauge, value in gauges.items():
            self._metrics.set(gauge, value)
        self._metrics.add(Metric.STEPS, 1)
        self._metrics.add(Metric.SAMPLES, samples)
        tokens = samples * plan.model.sequence_length
        self._metrics.add(Metric.TOKENS, tokens)
        self._metrics.add(Metric.MODEL_FLOPS, tokens * self._flops_per_token)
        self._metrics.add(Metric.COMMUNICATION_BYTES, sum(sent_bytes.values()))
        overlapped_seconds = self._arrangement.mesh.traffic.overlap.take_seconds()
        self._metrics.add(Metric.OVERLAPPED_SECONDS, overlapped_seconds)
        self._metrics.add_lap(lap)
        entry = {
            "attempt": self._attempt,
            "step": progress.step,
            "loss": progress.loss,
            "heldout_loss": self._heldout_loss if progress.step % plan.evaluate_every_steps == 0 else None,
            "sample_first": (progress.step - 1) * plan.batch.global_samples,
            "sample_last": progress.step * plan.batch.global_samples - 1,
            "step_seconds": lap.step_seconds,
            "seconds": {phase.value: seconds for phase, seconds in lap.phase_seconds.items()},
            "overlapped_seconds": overlapped_seconds,
            **({"reconfiguration_seconds": stage_seconds} if stage_seconds else {}),
            "bytes": {axis.value: sent for axis, sent in sent_bytes.items()},
        }
        self._steps_log.write(entry)
