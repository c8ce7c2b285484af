import pytest
import torch

from cost_aware_trainer.telemetry.overlap import OverlapMeter, hidden_seconds


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


def test_a_step_s_sums_are_forgotten_with_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("cost_aware_trainer.telemetry.overlap.time.perf_counter", lambda: now[0])
    meter = OverlapMeter(torch.device("cpu"))
    end = meter.begin()
    now[0] = 2.0
    end()
    meter.begin()
    now[0] = 5.0
    meter.computed()
    # the second has not said yet that it has ended
    assert meter.take_seconds() == pytest.approx(5.0)
    assert meter.take_seconds() == 0.0
