import pytest
import torch
from tests.support.factories.told_time import ToldTime

from cost_aware_trainer.telemetry.overlap import Overlap, hidden_seconds
from cost_aware_trainer.telemetry.traffic import Axis, Traffic


@pytest.mark.parametrize(
    ("spans", "until", "seconds"),
    [
        ([], 10.0, 0.0),
        ([(1, 2), (3, 5)], 10.0, 3.0),
        ([(1, 4), (2, 3), (3, 6)], 10.0, 5.0),
        ([(1, 4), (3, 9)], 5.0, 4.0),
        ([(6, 9)], 5.0, 0.0),
    ],
)
def test_what_several_sums_cover_counts_once_and_only_behind_computation(spans, until, seconds):
    assert hidden_seconds(spans, until) == pytest.approx(seconds)


def test_a_sum_that_has_not_said_that_it_ended_ran_to_the_end_of_computation():
    overlap = Overlap(ToldTime())
    end = overlap.begin()
    overlap.device_time.now = 2.0
    end()
    overlap.begin()
    overlap.device_time.now = 5.0
    overlap.computed()
    assert overlap.seconds() == pytest.approx(5.0)


def test_a_step_s_waits_and_sums_are_taken_with_it():
    traffic = Traffic(torch.device("cpu"))
    traffic.overlap.begin()()
    with traffic.exposed(Axis.TENSOR, 5.0):
        traffic.overlap.computed()
    taken = traffic.take_waits()
    assert taken.seconds()[Axis.TENSOR] > 0
    assert set(traffic.take_waits().seconds().values()) == {0.0}
    assert traffic.overlap.seconds() == 0.0
    assert [traffic.take_bytes()[Axis.TENSOR] for _ in range(2)] == [5.0, 0.0]
