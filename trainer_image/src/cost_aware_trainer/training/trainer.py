"""Bundled trainer: one rank of a run, from a plan to a result, step by step.

Started by torchrun, under the agent or by hand:

    python -m torch.distributed.run --nproc-per-node=N -m cost_aware_trainer --plan PLAN.json --steps-log LOG.jsonl
"""

from __future__ import annotations

import gc
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping

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
from cost_aware_trainer.contract.rank_environment import RankEnvironment, StepsLog
from cost_aware_trainer.data.prefetch import Prefetcher
from cost_aware_trainer.data.samples import SampleOrder, add_checksums, checksum
from cost_aware_trainer.distributed.collectives import Ranks, disconnect
from cost_aware_trainer.distributed.stragglers import WorkMeter
from cost_aware_trainer.distributed.votes import Agreed, Ballot, StepVote
from cost_aware_trainer.models.decoder import model_flops_per_token, parameter_shapes
from cost_aware_trainer.state.checkpoint import Checkpointer
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.memory.tier import MemoryTier
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.reconfigure import Carried, Succession, check_successor, hand_over
from cost_aware_trainer.state.saves import PeriodicSaves
from cost_aware_trainer.state.state import StatePart, residual_parts
from cost_aware_trainer.telemetry.device_time import DeviceTime
from cost_aware_trainer.telemetry.launch_stages import Stopwatch
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.telemetry.phases import PhaseClock
from cost_aware_trainer.training.corpus import open_corpus
from cost_aware_trainer.training.optimizer import learning_rate
from cost_aware_trainer.training.rank_model import RankModel
from cost_aware_trainer.training.step_report import run_result
from cost_aware_trainer.training.under_way import StepUnderWay, take_ended

logger = logging.getLogger(__name__)


class DivergedError(RuntimeError):
    """Loss or gradient that is no longer a finite number."""


class Trainer:
    """Trainer of a run on one rank.

    Raises (when built):
        InvalidRunError: data or checkpoints do not fit the plan.
        CheckpointError: a good checkpoint could not be loaded.
    """

    def __init__(
        self,
        plan: RunPlan,
        ranks: Ranks,
        environment: RankEnvironment,
        metrics: RankMetrics,
        steps_log: StepsLog,
        wants_stop: Callable[[], bool],
        succession: Succession | None = None,
        start: Stopwatch | None = None,
    ) -> None:
        watch = start or Stopwatch()
        self._plan, self._ranks, self._attempt = plan, ranks, environment.attempt
        self._metrics, self._steps_log, self._wants_stop = metrics, steps_log, wants_stop
        self._environment, self._succession = environment, succession
        self.corpus = open_corpus(plan, ranks)
        """Data of the run."""
        self._order = SampleOrder(self.corpus.windows, plan.seed)
        self._shapes = parameter_shapes(plan.model)
        self._flops_per_token = model_flops_per_token(plan.model)
        self.rank_model = RankModel(plan, ranks, self._shapes)
        """Model of this rank under the present plan."""
        self._prefetcher = Prefetcher(self._read_tokens)
        self.checkpointer = Checkpointer(plan.checkpoint, ranks, self._facts())
        """Checkpoints of the run."""
        self._memory = MemoryTier(plan, ranks, self._facts())
        self._progress = RunProgress()
        self._heldout_loss: float | None = None
        self._is_superseded = False
        watch.end(LaunchStage.REBUILD)
        self._resume()
        watch.end(LaunchStage.LOAD)
        self._stage_seconds = watch.stage_seconds
        self._clock = PhaseClock(DeviceTime.of(ranks.device), on_phase=self._beat)
        self._work = WorkMeter()
        self._started = self._progress.step
        self._under_way: list[StepUnderWay] = []
        self.saves = PeriodicSaves(self.checkpointer, ranks, metrics, plan.checkpoint.interval_seconds)
        """Periodic saves to those checkpoints."""

    def _beat(self, phase: Phase) -> None:
        self._ranks.heartbeat.beat(phase.value, self._started)

    def _facts(self) -> RunFacts:
        return RunFacts(
            model=self._plan.model.to_document(),
            seed=self._plan.seed,
            global_samples=self._plan.batch.global_samples,
            data_sha256=self.corpus.manifest.train.sha256,
        )

    def _resume(self) -> None:
        self.checkpointer.check_folder()
        rank_model = self.rank_model
        self._progress = self._recalled(rank_model.parts()) or RunProgress()
        if not self._progress.step:
            self.checkpointer.saved_step = 0
            rank_model.initialise()
        step = self._progress.step
        if self._ranks.is_first:
            logger.info("resuming after step %d" if step else "no checkpoint, starting at step %d", step)
        self._metrics.set(Metric.RESUMED_STEP, step)
        self._metrics.set(Metric.CHECKPOINT_STEP, self.checkpointer.saved_step)
        self._metrics.set(Metric.STEP, self._progress.step)
        self._metrics.set(Metric.TOTAL_STEPS, self._plan.steps)

    def _recalled(self, parts: list[StatePart]) -> RunProgress | None:
        """Fills `parts` from the newest good state, in the nodes' memory or on the volume; None if there is none."""
        newest = self.checkpointer.saved_step = self.checkpointer.newest_step()
        recalled = self._memory.resume(parts, newest)
        if recalled:
            return recalled
        found = self.checkpointer.resume(parts, self.rank_model.checksums, self._shapes)
        residuals = self.checkpointer.take_residuals()
        step = found.step if found else 0
        # if the volume's newest checkpoint is damaged, the copies in memory may be newer than its newest good one
        recalled = self._memory.resume(parts, step) if step < newest else None
        if recalled:
            return recalled
        if found is None:
            self.checkpointer.begin_anew()
        self._memory.forget()
        self.rank_model.carry_residuals(residuals)
        return RunProgress.saved_in(found) if found else None

    def run(self) -> RunResult:
        """Trains until the last step, or until any rank is asked to stop. A checkpoint of that step is then on disk.

        Raises:
            DivergedError: loss or gradient are not finite; the last good checkpoint is kept.
            CheckpointError: the run could not be saved.
        """
        try:
            stopped = False
            while self._started < self._plan.steps and not stopped:
                stopped = self.step()
                if self._is_superseded and not stopped and self._started < self._plan.steps:
                    self.reconfigure()
        finally:
            self.close()
        if self._progress.step < self._plan.steps:
            return self.result(AgentPhase.CHECKPOINTED, "stopped as asked, with a checkpoint")
        if self._heldout_loss is None:
            self._evaluate()
        return self.result(AgentPhase.COMPLETED)

    def close(self) -> None:
        """Waits for saves that are under way, and ends the threads. `run` does it itself."""
        self.checkpointer.close()
        self._memory.close(is_complete=self._progress.step >= self._plan.steps)
        self._prefetcher.close()
        self.corpus.close()

    def result(self, outcome: AgentPhase, message: str = "") -> RunResult:
        """Result of the run at its present step."""
        return run_result(
            outcome,
            self._progress,
            total_steps=self._plan.steps,
            global_samples=self._plan.batch.global_samples,
            heldout_loss=self._heldout_loss,
            save_seconds=self.saves.waited_seconds,
            message=message,
        )

    def step(self) -> bool:
        """Trains one optimizer step on the global batch. Returns True if the run is to stop after it.

        Where the device works behind the host, it always has a step to do: what ranks agree on in one is read in the next, unless
        the state is needed as it is after this one.
        """
        step = self._start()
        votes = self._read_votes(leaving=1 if self._clock.device_time.is_late else 0)
        is_last = step.number == self._plan.steps
        evaluates = step.number % self._plan.evaluate_every_steps == 0 or is_last
        if evaluates or any(vote.asks for vote in votes):
            votes += self._read_votes(leaving=0)
        asked = Agreed.any_of(votes) if votes else None
        stops = asked is not None and asked.wants_stop and not is_last
        self._is_superseded = asked is not None and asked.is_ready
        # Before the save: what turns out to be spoilt is not saved, and no peer is waited for between a save and the log's line
        # of its step, which a lost peer would cost. Only a stop has no time to evaluate first.
        if evaluates and not stops:
            step.heldout_loss = self._evaluate()
        if asked:
            self._do(asked, is_last=is_last)
        if evaluates and stops:
            step.heldout_loss = self._evaluate()
        step.sent_bytes = self.rank_model.mesh.traffic.take_bytes()
        step.marks = self._clock.end_lap()
        self._report()
        return stops

    def _start(self) -> StepUnderWay:
        """Starts a step: forward and backward over this rank's share of it, the sums over the ranks, the vote, and the update."""
        rank_model, self._trained = self.rank_model, 0
        self._started = number = self._started + 1
        loss_sum, squared_norm = rank_model.accumulate(number, self._read_batches(number))
        waits, until_vote = rank_model.mesh.traffic.take_waits(), None
        if not self._clock.device_time.is_late:
            until_vote = self._clock.so_far()
            rank_model.book(until_vote, waits)
        flags = self._wants_stop(), self.saves.is_due(), self.saves.has_failed(), self._next_plan() is not None
        copying, work_seconds = (self._memory.is_due, self._memory.poll()), self._work.seconds(until_vote)
        vote = StepVote(loss_sum, self._trained, squared_norm, *flags, *copying, work_seconds=work_seconds)
        with self._clock.phase(Phase.COMMUNICATION):
            ballot = Ballot.cast(self._ranks, vote)
        with self._clock.phase(Phase.OPTIMIZER):
            rate = learning_rate(self._plan.optimizer, number, self._plan.steps)
            self.checkpointer.hold()
            rank_model.update(ballot.loss_and_norm, rate)
        self._under_way.append(StepUnderWay(number, rate, ballot, waits))
        return self._under_way[-1]

    def _read_votes(self, leaving: int) -> list[Agreed]:
        """Reads the votes of all steps under way but the last `leaving`, in order.

        Raises:
            DivergedError: the loss or the gradient of one is not finite. Its update, and all after it, were not applied.
        """
        votes = []
        for step in self._under_way[: len(self._under_way) - leaving]:
            if step.agreed is None:
                step.agreed = agreed = step.ballot.read()
                loss = agreed.loss_sum / (self._plan.batch.global_samples * self._plan.model.sequence_length)
                if not (math.isfinite(loss) and math.isfinite(agreed.squared_norm)):
                    raise DivergedError(
                        f"step {step.number}: loss {loss}, gradient norm {agreed.gradient_norm}: not finite; the checkpoint of "
                        f"step {self.checkpointer.saved_step} is kept; lower optimizer.learning_rate or warm up longer"
                    )
                step.progress = self._progress = self._progress.advanced(agreed.checksum, loss)
                votes.append(agreed)
        return votes

    def _do(self, asked: Agreed, *, is_last: bool) -> None:
        """Does what the ranks agreed on, with the state after the last step that was started."""
        if asked.save_failed:
            self.saves.settle()
        if asked.wants_stop or asked.wants_checkpoint or is_last:
            self.save(wait=asked.wants_stop or is_last, stops=asked.wants_stop and not is_last)
        if asked.wants_copy and not (asked.is_copying or asked.wants_stop or is_last):
            with self._clock.phase(Phase.CHECKPOINT):
                parts = self.rank_model.parts()
                self.saves.check_finite(self._progress, parts)
                self._memory.save(self._progress, self._attempt, parts)

    def _read_batches(self, number: int) -> Iterator[Tensor]:
        """Reads this replica's samples of a step when they are needed, and notes what is trained."""
        rank_model = self.rank_model
        for positions in rank_model.positions(number - 1):
            with self._clock.phase(Phase.DATA):
                tokens = self._prefetcher.take((int(positions[0]), len(positions)))
                if rank_model.reports:
                    self._trained = add_checksums(self._trained, checksum(positions, self._order.at(positions)))
            yield tokens
        following = rank_model.positions(number)
        self._prefetcher.ahead((int(positions[0]), len(positions)) for positions in following)

    def _read_tokens(self, samples: tuple[int, int]) -> Tensor:
        """Reads the samples at (first position, count), for this rank's place."""
        first, count = samples
        positions = np.arange(first, first + count, dtype=np.uint64)
        return self.rank_model.tokens(self.corpus, self._order, positions)

    def _next_plan(self) -> Reconfiguration | None:
        """Plan of a newer attempt, if this rank has seen one."""
        newest = self._succession.newest() if self._succession else None
        return newest if newest and newest.attempt > self._attempt else None

    def reconfigure(self) -> None:
        """Goes on under the newest plan in the same process. The state travels from memory to memory.

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
        self.saves.settle()
        self._memory.leave()
        watch.end(LaunchStage.DRAIN)
        residuals = self.rank_model.drain_residuals()
        carried = Carried.of(self._plan, self._progress.step, self.rank_model.parts(), residuals)
        # samples that were read ahead are for the old place
        self._prefetcher.ahead(())
        self.rank_model.close()
        del self.rank_model
        watch.end(LaunchStage.SAVE)
        disconnect()
        # Objects that refer to each other in a circle would keep groups alive, and with them their threads.
        gc.collect()
        self._ranks = succession.rejoin(f"attempt-{newest.attempt}")
        self.saves.join(self._ranks, newest.plan.checkpoint.interval_seconds)
        self._memory.join(newest.plan, self._ranks)
        self.rank_model = RankModel(newest.plan, self._ranks, self._shapes)
        watch.end(LaunchStage.REBUILD)
        residuals = hand_over(carried, newest.plan, self.rank_model.parts(), self._shapes, self._ranks)
        self.rank_model.carry_residuals(residuals)
        watch.end(LaunchStage.LOAD)
        self._plan, self._attempt = newest.plan, newest.attempt
        self._metrics.start_attempt(newest.attempt)
        self._metrics.set(Metric.RESUMED_STEP, self._progress.step)
        self._stage_seconds = watch.stage_seconds
        self._ranks.heartbeat.begin_anew()
        # The steps' clock starts again: this time belongs to no step.
        self._clock.end_lap()
        self._work.forget()

    def _tell_reconfigured(self, stage_seconds: Mapping[LaunchStage, float]) -> None:
        """Tells the agent how long it took from the order to the end of the first step, in the same process."""
        self._metrics.add(Metric.RECONFIGURATIONS, 1)
        seconds = {f"{stage.value}_seconds": value for stage, value in stage_seconds.items()}
        told = Reconfigured(attempt=self._attempt, step=self._progress.step, **seconds)
        self._environment.write_reconfigured(told)
        if self._ranks.is_first:
            logger.info("attempt %d goes on in process after %.3f s", self._attempt, told.total_seconds)

    def save(self, *, wait: bool, stops: bool = False) -> None:
        """Saves the state. If the ranks stop here, it includes residuals, because nobody adds them to a next gradient then."""
        self._read_votes(leaving=0)
        with self._clock.phase(Phase.CHECKPOINT):
            parts = self.rank_model.parts()
            residuals = self.rank_model.drain_residuals() if stops else {}
            parts += residual_parts(parts, residuals) if residuals else []
            self.saves.save(self._progress, self._attempt, parts, self.rank_model.checksums, wait=wait)

    def _evaluate(self) -> float:
        with self._clock.phase(Phase.EVALUATION):
            loss = self.rank_model.heldout_loss(self.corpus)
        # Waits of an evaluation belong to its own phase.
        self.rank_model.mesh.traffic.take_waits()
        if not math.isfinite(loss):
            self._heldout_loss = None
            raise DivergedError(
                f"step {self._progress.step}: the held-out loss is {loss}: the last update spoilt the weights; lower "
                "optimizer.learning_rate or warm up longer"
            )
        self._heldout_loss = loss
        self._metrics.set(Metric.HELDOUT_LOSS, loss)
        if self._ranks.is_first:
            logger.info("step %d: held-out loss %.4f", self._progress.step, loss)
        return loss

    def _report(self) -> None:
        """Shows all steps that are known to have ended in this rank's metrics and, on rank 0, in the steps log."""
        plan = self._plan
        # Every sample counts on all ranks of its replica, so over the run's ranks they add up to the global batch.
        samples = plan.batch.global_samples / plan.degrees.ranks
        tokens = samples * plan.model.sequence_length
        for step, agreed, lap in take_ended(self._under_way, self._ranks):
            self.rank_model.book(lap, step.waits)
            self._work.end(lap)
            self.rank_model.book_straggler_wait(lap, agreed.work_seconds_of)
            stage_seconds, self._stage_seconds = self._stage_seconds, {}
            report = step.report(
                self._ranks,
                lap,
                attempt=self._attempt,
                global_samples=plan.batch.global_samples,
                samples=samples,
                tokens=tokens,
                model_flops=tokens * self._flops_per_token,
                stage_seconds=stage_seconds,
            )
            report.show(self._metrics)
            if stage_seconds and self._attempt != self._environment.attempt:
                self._tell_reconfigured(report.stage_seconds)
            self._steps_log.write(report.log_entry())
