"""Times of a session's steps, and what metrics and the steps log show of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cost_aware_trainer.contract import DegreesPlan, LaunchStage, Phase
from cost_aware_trainer.contract.rank_environment import StepsLog
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.distributed.stragglers import WorkMeter, book_straggler_wait
from cost_aware_trainer.telemetry.device_time import DeviceTime
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.telemetry.phases import Lap, PhaseClock
from cost_aware_trainer.telemetry.traffic import Waits
from cost_aware_trainer.training.under_way import StepUnderWay, take_ended


class SessionReports:
    """Clock of a session's steps, and their reports. Where the device works behind the host, a step is reported after the next.

    Args:
        mesh: data axis of the session.
        metrics: this rank's.
        log: steps log, which only rank 0 writes.
        attempt: attempt that the steps belong to.
        global_samples: samples of a step on all ranks.
        stage_seconds: seconds of the attempt's stages until its first step.
        on_phase: called with every phase that begins.
    """

    def __init__(
        self,
        mesh: Mesh,
        metrics: RankMetrics,
        log: StepsLog,
        *,
        attempt: int,
        global_samples: int,
        stage_seconds: Mapping[LaunchStage, float],
        on_phase: Callable[[Phase], None],
    ) -> None:
        self.clock = PhaseClock(DeviceTime.of(mesh.ranks.device), on_phase=on_phase)
        """Clock of the steps."""
        self._mesh, self._metrics, self._log = mesh, metrics, log
        self._attempt, self._global_samples, self._stage_seconds = attempt, global_samples, stage_seconds
        self._work = WorkMeter()
        self._under_way: list[StepUnderWay] = []

    def work_seconds(self, waits: Waits) -> float:
        """Seconds of this rank's own work, for the step's vote: see `WorkMeter`."""
        if self.clock.device_time.is_late:
            return self._work.seconds(None)
        until_vote = self.clock.so_far()
        _book(until_vote, waits)
        return self._work.seconds(until_vote)

    def end(self, step: StepUnderWay) -> None:
        """Ends a step on the host."""
        if self.clock.device_time.is_late:
            self.show()
        step.sent_bytes, step.marks = self._mesh.traffic.take_bytes(), self.clock.end_lap()
        self._under_way.append(step)
        if not self.clock.device_time.is_late:
            self.show()

    def show(self) -> None:
        """Shows the steps that have ended, and waits for their ends on the device."""
        ranks = self._mesh.ranks
        for step, agreed, lap in take_ended(self._under_way, ranks):
            _book(lap, step.waits)
            self._work.end(lap)
            book_straggler_wait(lap, agreed.work_seconds_of, self._mesh.place, DegreesPlan(data=ranks.size))
            stage_seconds, self._stage_seconds = self._stage_seconds, {}
            report = step.report(
                ranks,
                lap,
                attempt=self._attempt,
                global_samples=self._global_samples,
                samples=self._global_samples / ranks.size,
                stage_seconds=stage_seconds,
            )
            report.show(self._metrics)
            self._log.write(report.log_entry())

    def close(self) -> None:
        """Closes the steps log."""
        self._log.close()


def _book(lap: Lap, waits: Waits) -> None:
    """Moves a step's waits for other replicas, which lie in the time of its passes, to communication."""
    for seconds in waits.seconds().values():
        lap.move(Phase.COMPUTE, Phase.COMMUNICATION, seconds)
