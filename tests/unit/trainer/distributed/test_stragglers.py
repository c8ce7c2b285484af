import pytest

from cost_aware_trainer.contract import DegreesPlan, Phase
from cost_aware_trainer.distributed.layout import Coordinates
from cost_aware_trainer.distributed.stragglers import WorkMeter, book_straggler_wait, lateness_seconds
from cost_aware_trainer.telemetry.phases import PhaseClock


class Clock(PhaseClock):
    def __init__(self):
        self.now = 0.0
        super().__init__(lambda: self.now)

    def spend(self, phase, seconds):
        with self.phase(phase):
            self.now += seconds


def test_only_ranks_of_the_same_stage_are_compared():
    degrees = DegreesPlan(data=2, tensor=2, pipeline=2)
    work = [1.0, 2.0, 5.0, 1.0, 90.0, 90.0, 90.0, 90.0]
    assert lateness_seconds(work, Coordinates(data=0, tensor=0, pipeline=0), degrees) == (1.0, 4.0)
    assert lateness_seconds(work, Coordinates(data=1, tensor=0, pipeline=0), degrees) == (0.0, 0.0)
    assert lateness_seconds(work, Coordinates(data=1, tensor=1, pipeline=1), degrees) == (0.0, 0.0)


def test_no_more_is_moved_than_was_waited_and_the_step_keeps_its_length():
    clock = Clock()
    for phase, seconds in ((Phase.COMPUTE, 1.0), (Phase.TENSOR_COMMUNICATION, 0.5), (Phase.COMMUNICATION, 2.0)):
        clock.spend(phase, seconds)
    book_straggler_wait(clock, [1.0, 1.75, 2.0, 1.0], Coordinates(0, 0, 0), DegreesPlan(data=2, tensor=2))
    lap = clock.lap()
    assert lap.phase_seconds[Phase.STRAGGLER_WAIT] == pytest.approx(1.0)
    assert lap.phase_seconds[Phase.TENSOR_COMMUNICATION] == 0.0
    assert lap.phase_seconds[Phase.COMMUNICATION] == pytest.approx(1.5)
    assert sum(lap.phase_seconds.values()) == pytest.approx(lap.step_seconds) == pytest.approx(3.5)


def test_work_after_a_vote_counts_in_the_next_and_other_phases_never():
    clock = Clock()
    meter = WorkMeter(clock)
    clock.spend(Phase.DATA, 1.0)
    clock.spend(Phase.COMMUNICATION, 10.0)
    assert meter.seconds() == pytest.approx(1.0)
    clock.spend(Phase.OPTIMIZER, 0.5)
    clock.spend(Phase.CHECKPOINT, 7.0)
    meter.end(clock.lap())
    clock.spend(Phase.COMPUTE, 2.0)
    assert meter.seconds() == pytest.approx(2.5)
    clock.spend(Phase.OPTIMIZER, 0.5)
    meter.end(None)
    clock.lap()
    assert meter.seconds() == 0.0
