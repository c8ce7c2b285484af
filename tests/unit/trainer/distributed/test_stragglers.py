import pytest
from tests.support.factories.told_time import ToldTime

from cost_aware_trainer.contract import DegreesPlan, Phase
from cost_aware_trainer.distributed.layout import Coordinates
from cost_aware_trainer.distributed.stragglers import WorkMeter, book_straggler_wait, lateness_seconds
from cost_aware_trainer.telemetry.phases import PhaseClock


class Clock(PhaseClock):
    def __init__(self):
        super().__init__(ToldTime())

    def spend(self, phase, seconds):
        with self.phase(phase):
            self.device_time.now += seconds


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
    lap = clock.end_lap().lap()
    book_straggler_wait(lap, [1.0, 1.75, 2.0, 1.0], Coordinates(0, 0, 0), DegreesPlan(data=2, tensor=2))
    assert lap.phase_seconds[Phase.STRAGGLER_WAIT] == pytest.approx(1.0)
    assert lap.phase_seconds[Phase.TENSOR_COMMUNICATION] == 0.0
    assert lap.phase_seconds[Phase.COMMUNICATION] == pytest.approx(1.5)
    assert sum(lap.phase_seconds.values()) == pytest.approx(lap.step_seconds) == pytest.approx(3.5)


def test_work_after_a_vote_counts_in_the_next_and_other_phases_never():
    clock, meter = Clock(), WorkMeter()
    clock.spend(Phase.DATA, 1.0)
    clock.spend(Phase.COMMUNICATION, 10.0)
    assert meter.seconds(clock.so_far()) == pytest.approx(1.0)
    clock.spend(Phase.OPTIMIZER, 0.5)
    clock.spend(Phase.CHECKPOINT, 7.0)
    meter.end(clock.end_lap().lap())
    clock.spend(Phase.COMPUTE, 2.0)
    assert meter.seconds(clock.so_far()) == pytest.approx(2.5)
    clock.spend(Phase.OPTIMIZER, 0.5)
    clock.end_lap()
    meter.forget()
    assert meter.seconds(clock.so_far()) == 0.0


def test_where_a_step_s_work_is_not_known_at_its_vote_the_last_known_step_s_is_told_whole():
    clock, meter = Clock(), WorkMeter()
    assert meter.seconds(None) == 0.0
    for seconds in (1.0, 3.0):
        clock.spend(Phase.DATA, seconds)
        clock.spend(Phase.COMMUNICATION, 10.0)
        clock.spend(Phase.OPTIMIZER, 0.5)
        meter.end(clock.end_lap().lap())
        assert meter.seconds(None) == pytest.approx(seconds + 0.5)
