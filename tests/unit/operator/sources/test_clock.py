"""A jump of one clock is followed only where another says the same: pods are paid by the second."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as some

from cost_aware_operator.sources.clock import SLEW_SECONDS, TOLERATED_SECONDS, SteadyClock

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = 86_400.0


@dataclass
class Machine:
    """A machine whose date may be off."""

    seconds: float = 0.0
    off: float = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds + self.off)

    def monotonic(self) -> float:
        return 1000.0 + self.seconds

    def true(self, off: float = 0.0) -> datetime:
        return START + timedelta(seconds=self.seconds + off)


def error(clock: SteadyClock, machine: Machine) -> float:
    return abs((clock.now() - machine.true()).total_seconds())


def test_a_jump_by_a_day_is_not_followed_and_is_told() -> None:
    machine = Machine()
    clock = SteadyClock(machine)
    clock.heard(machine.true())
    for off in (DAY, -DAY, 3600.0, 0.0):
        machine.seconds, machine.off = machine.seconds + 5, off
        assert error(clock, machine) < 0.01
        clock.heard(machine.true())
        assert error(clock, machine) < 0.01
        assert ("is not followed" in clock.problem()) is (off != 0)


def test_a_machine_that_slept_is_followed_when_the_server_says_so_too() -> None:
    machine = Machine()
    clock = SteadyClock(machine)
    clock.heard(machine.true())
    # the monotonic clock stood still for two hours
    machine.off = 7200.0
    assert clock.now() == START
    clock.heard(START + timedelta(seconds=7200))
    assert clock.now() == START + timedelta(seconds=7200)
    assert clock.problem() == ""


def test_a_machine_whose_date_is_wrong_from_the_start_goes_by_the_server_s() -> None:
    machine = Machine(off=DAY)
    clock = SteadyClock(machine)
    clock.heard(machine.true())
    assert error(clock, machine) < 1
    machine.seconds += 5
    assert error(clock, machine) < 1
    assert "+86,400 s off" in clock.problem()


def test_one_api_server_of_several_with_a_wrong_date_is_not_followed_and_is_told() -> None:
    machine = Machine()
    clock = SteadyClock(machine)
    clock.heard(machine.true())
    clock.heard(machine.true(DAY))
    assert error(clock, machine) < 0.01
    assert "the API server's clock is +86,400 s off" in clock.problem()
    clock.heard(machine.true())
    assert clock.problem() == ""


@given(some.lists(some.tuples(some.floats(0, 600), some.floats(-DAY, DAY)), max_size=30))
def test_whatever_the_date_does_the_time_stays_right(jumps: list[tuple[float, float]]) -> None:
    machine = Machine()
    clock = SteadyClock(machine)
    clock.heard(machine.true())
    for seconds, off in jumps:
        machine.seconds, machine.off = machine.seconds + seconds, off
        assert error(clock, machine) <= TOLERATED_SECONDS + SLEW_SECONDS
        clock.heard(machine.true())
