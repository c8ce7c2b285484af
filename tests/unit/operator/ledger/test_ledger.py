"""The ledger closes: pod-seconds x price, nothing lost, nothing twice, whatever is asked when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.factories.ledger import at, pod

from cost_aware_operator.ledger.accounts import CLOCKS_APART
from cost_aware_operator.ledger.ledger import Cause, LedgerState, TrainedSteps, accrue
from cost_aware_trainer.contract import Phase


def test_a_pod_costs_its_seconds_times_its_price() -> None:
    state = accrue(LedgerState(), [pod()], TrainedSteps(), at(100))
    assert state.accrued_usd == pytest.approx(0.1)
    assert state.pod_seconds == pytest.approx(100)


def test_a_pod_stops_costing_when_it_ends() -> None:
    state = accrue(LedgerState(), [pod(end=30)], TrainedSteps(), at(100))
    state = accrue(state, [pod(end=30)], TrainedSteps(), at(200))
    assert state.accrued_usd == pytest.approx(0.03)


def test_seconds_booked_after_an_end_that_was_told_late_are_taken_back() -> None:
    state = accrue(LedgerState(), [pod(otherwise=Cause.RESTART)], TrainedSteps(), at(12))
    state = accrue(state, [pod(end=10, otherwise=Cause.IDLE)], TrainedSteps(), at(13))
    assert state.pod_seconds == pytest.approx(10)
    assert state.accrued_usd == pytest.approx(0.010)


def test_an_unknown_price_is_counted_as_unpriced_seconds_and_not_as_no_dollars() -> None:
    state = accrue(LedgerState(), [pod(price=None)], TrainedSteps(), at(50))
    assert (state.accrued_usd, state.unpriced_pod_seconds) == (0.0, pytest.approx(50))
    assert state.seconds == {Cause.IDLE: pytest.approx(50)}


def test_phases_divide_the_dollars_by_cause() -> None:
    phases = {
        Phase.COMPUTE: 60.0,
        Phase.OPTIMIZER: 10.0,
        Phase.COMMUNICATION: 20.0,
        Phase.CHECKPOINT: 5.0,
        Phase.DATA: 1.0,
    }
    state = accrue(
        LedgerState(), [pod(attempt=1, phase_seconds=phases, otherwise=Cause.RESTART)], TrainedSteps(), at(100)
    )
    assert state.by_cause(Cause.PRODUCTIVE) == pytest.approx(0.070)
    assert state.by_cause(Cause.COMMUNICATION) == pytest.approx(0.020)
    assert state.by_cause(Cause.CHECKPOINT) == pytest.approx(0.005)
    assert state.by_cause(Cause.IDLE) == pytest.approx(0.001)
    assert state.by_cause(Cause.RESTART) == pytest.approx(0.004)


def test_a_new_attempt_s_counters_begin_at_zero() -> None:
    state = accrue(LedgerState(), [pod(attempt=1, phase_seconds={Phase.COMPUTE: 50.0})], TrainedSteps(), at(60))
    state = accrue(state, [pod(attempt=2, phase_seconds={Phase.COMPUTE: 10.0})], TrainedSteps(), at(80))
    assert state.by_cause(Cause.PRODUCTIVE) == pytest.approx(0.060)


def test_steps_that_are_trained_again_become_lost_work() -> None:
    first = pod(attempt=1, phase_seconds={Phase.COMPUTE: 100.0})
    state = accrue(LedgerState(), [first], TrainedSteps(attempt=1, step=100, resumed_step=0), at(100))
    second = pod(attempt=2, phase_seconds={Phase.COMPUTE: 0.0})
    state = accrue(state, [second], TrainedSteps(attempt=2, step=60, resumed_step=60), at(100))
    assert state.by_cause(Cause.LOST_WORK) == pytest.approx(0.040)
    assert state.by_cause(Cause.PRODUCTIVE) == pytest.approx(0.060)
    assert state.goodput == pytest.approx(0.6)
    again = accrue(state, [second], TrainedSteps(attempt=2, step=60, resumed_step=60), at(100))
    assert again == state


def test_a_pod_that_vanished_unseen_is_paid_until_its_replacement_began() -> None:
    state = accrue(LedgerState(), [pod()], TrainedSteps(), at(10))
    for now in (40, 51, 60):
        state = accrue(state, [pod(uid="b", start=30)], TrainedSteps(), at(now))
    assert state.pod_seconds == pytest.approx(30 + 30)


def test_a_pod_that_a_list_lacks_before_the_watch_tells_its_end_is_paid_to_that_end() -> None:
    state = accrue(LedgerState(), [pod()], TrainedSteps(), at(10))
    state = accrue(state, [], TrainedSteps(), at(13))
    state = accrue(state, [pod(end=12)], TrainedSteps(), at(14))
    assert state.pod_seconds == pytest.approx(12)


def test_late_news_of_a_pod_that_was_paid_is_not_paid_again() -> None:
    state = accrue(LedgerState(), [pod(end=20)], TrainedSteps(), at(21))
    state = accrue(state, [], TrainedSteps(), at(22))
    state = accrue(state, [pod(end=20)], TrainedSteps(), at(23))
    assert state.pod_seconds == pytest.approx(20)
    state = accrue(state, [pod(end=23)], TrainedSteps(), at(24))
    assert state.pod_seconds == pytest.approx(20)


def vanished(start: float = 60.0, **told: float) -> LedgerState:
    """Pod a is seen until 50 s; from `start` on another runs in its place, and 15 s later what is `told` of ends is known."""
    state = accrue(LedgerState(), [pod(uid="a")], TrainedSteps(), at(50))
    later = [pod(uid="b", start=start)]
    for now in (start + 2, start + 13):
        state = accrue(state, later, TrainedSteps(), at(now))
    state = accrue(state, later, TrainedSteps(), at(start + 15), told={uid: at(end) for uid, end in told.items()})
    return accrue(state, later, TrainedSteps(), at(start + 20))


@pytest.mark.parametrize("end", [43.0, 50.0, 57.5])
def test_a_pod_that_vanished_unseen_is_paid_to_the_end_that_it_left_word_of(end: float) -> None:
    state = vanished(a=end)
    assert state.pod_seconds == pytest.approx(end + 20)
    assert state.accrued_usd == pytest.approx(0.001 * (end + 20))
    assert state.without_end() == {"b"}, "nobody needs to be asked again"


@pytest.mark.parametrize(("end", "paid"), [(-400.0, 0.0), (70.0, 70.0), (1e6, 60.0 + CLOCKS_APART.total_seconds())])
def test_no_word_of_an_end_reaches_beyond_what_is_known(end: float, paid: float) -> None:
    """Clocks of nodes may be apart, so the start of the next pod bounds it only so far."""
    assert vanished(a=end).pod_seconds == pytest.approx(paid + 20)


def test_a_word_that_comes_before_the_account_is_closed_closes_it() -> None:
    state = accrue(LedgerState(), [pod(uid="a")], TrainedSteps(), at(50))
    state = accrue(state, [], TrainedSteps(), at(51), told={"a": at(48)})
    assert state.pod_seconds == pytest.approx(48)
    for now in (52, 70, 700):
        state = accrue(state, [], TrainedSteps(), at(now), told={"a": at(48)})
        assert state.pod_seconds == pytest.approx(48)
    assert state.accounts == ()


def test_a_word_about_a_pod_whose_end_was_seen_changes_nothing() -> None:
    state = accrue(LedgerState(), [pod(end=30)], TrainedSteps(), at(100))
    state = accrue(state, [], TrainedSteps(), at(101), told={"a": at(20)})
    assert state.pod_seconds == pytest.approx(30)
    assert state.without_end() == set()


def test_an_operator_that_was_away_for_long_still_asks_for_the_ends_of_pods() -> None:
    state = accrue(LedgerState(), [pod(uid="a")], TrainedSteps(), at(50))
    for now in (3000, 3015, 3030):
        state = accrue(state, [pod(uid="b", start=2000)], TrainedSteps(), at(now))
    assert state.without_end() == {"a", "b"}
    assert accrue(state, [], TrainedSteps(), at(3031), told={"a": at(900)}).pod_seconds == pytest.approx(900 + 1030)


def test_pods_that_are_long_gone_are_forgotten() -> None:
    state = accrue(LedgerState(), [pod(end=20)], TrainedSteps(), at(21))
    state = accrue(state, [], TrainedSteps(), at(3600))
    assert accrue(state, [pod(end=20)], TrainedSteps(), at(3601)).pod_seconds == pytest.approx(20), "late news"
    assert accrue(state, [], TrainedSteps(), at(4201)).accounts == ()


def test_bytes_between_zones_cost_and_bytes_within_one_do_not() -> None:
    apart = [pod(0, "a", zone="x", attempt=1, phase_seconds={}, sent_bytes=1e9), pod(1, "b", zone="y")]
    together = [pod(0, "a", zone="x", attempt=1, phase_seconds={}, sent_bytes=1e9), pod(1, "b", zone="x")]
    assert accrue(LedgerState(), apart, TrainedSteps(), at(1)).transfer_usd == pytest.approx(0.02)
    assert accrue(LedgerState(), together, TrainedSteps(), at(1)).transfer_usd == 0.0


def test_the_state_survives_being_written_down() -> None:
    state = accrue(LedgerState(), [pod(attempt=1, phase_seconds={Phase.COMPUTE: 5.0})], TrainedSteps(1, 3, 0), at(7))
    assert LedgerState.model_validate_json(state.model_dump_json()) == state


@given(
    lives=st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=5),
    looks=st.lists(st.floats(0, 1000), max_size=12),
    crash_at=st.integers(0, 12),
    busy=st.floats(0, 1.5),
    told_late=st.floats(0, 3),
    unseen=st.lists(st.booleans(), min_size=13, max_size=13),
)
def test_dollars_equal_pod_seconds_times_price_whatever_is_looked_at_when(
    lives: list[tuple[float, float]],
    looks: list[float],
    crash_at: int,
    busy: float,
    told_late: float,
    unseen: list[bool],
) -> None:
    """Looks at random times, one of which is lost as if the operator had died before saving."""
    state = LedgerState()
    # the last look is when whatever ended by 1000 has been told of: nine seconds unseen, three told late
    for i, now in enumerate([*sorted(looks), 1012.0]):
        pods = []
        for n, (start, length) in enumerate(lives):
            if start > now:
                continue
            end = start + length
            if unseen[i] and end < now < end + 9:
                continue  # deleted, and the watch has not told it yet
            seen = min(now, end) - start
            pods.append(
                pod(
                    n,
                    f"pod-{n}",
                    start=start,
                    end=end if end + told_late <= now else None,
                    attempt=1,
                    phase_seconds={Phase.COMPUTE: seen * busy * 0.7, Phase.COMMUNICATION: seen * busy * 0.3},
                )
            )
        after = accrue(state, pods, TrainedSteps(), at(now))
        if i != crash_at:
            state = after
    if crash_at >= len(looks):
        return
    truth = sum(length for _, length in lives)
    assert state.pod_seconds == pytest.approx(truth, abs=1e-3)
    assert state.accrued_usd == pytest.approx(truth * 0.001, abs=1e-6)
    assert all(usd >= 0 for usd in state.usd.values())
    assert sum(state.seconds.values()) == pytest.approx(truth, abs=1e-3)
