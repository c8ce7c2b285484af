"""The ledger against the truth, for any lives of pods: to the cent in the end, and it never goes back.

The truth is what nodes did, by a clock that nobody has: each node's is up to a minute off it. The operator's is kept right by the API
server's (`sources/clock.py`). Pods overlap, are replaced, are deleted while others go on, and vanish while the operator is away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.support.factories.facts import START

from cost_aware_operator.costs.tables.prices import Price
from cost_aware_operator.ledger.accounts import CLOCKS_APART, LAG_SECONDS
from cost_aware_operator.ledger.ledger import Fees, LedgerState, PodFacts, TrainedSteps, accrue
from cost_aware_trainer.contract import Phase

HOURLY_USD = 98.32
CENT = 0.01
LATE_SECONDS = 3.0
"""How late news of a pod's end are, at most."""
STARTS_WITHIN = LAG_SECONDS - LATE_SECONDS
"""How long a kubelet takes to begin a pod that it was given, at most: it hides a clock that is behind by as much."""


@dataclass(frozen=True)
class Life:
    """One pod's life, in true seconds."""

    uid: str
    index: int
    scheduled: float
    started: float
    ended: float
    clock_off: float
    """How far its node's clock is ahead of the truth."""
    gone: float
    """When its object is gone."""
    late: float
    """How late the API server hears of its start and its end."""

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def when(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@some.composite
def lives(draw: some.DrawFn) -> list[Life]:
    found: list[Life] = []
    for index in range(draw(some.integers(1, 3))):
        at = draw(some.floats(0, 200))
        for number in range(draw(some.integers(1, 4))):
            started = at + draw(some.floats(0, STARTS_WITHIN))
            ended = started + draw(some.floats(1, 900))
            late = draw(some.floats(0, LATE_SECONDS))
            found.append(
                Life(
                    uid=f"{index}-{number}",
                    index=index,
                    scheduled=at,
                    started=started,
                    ended=ended,
                    clock_off=draw(some.floats(-60, 60)),
                    gone=ended + late + draw(some.floats(0, 300)),
                    late=late,
                )
            )
            # a replacement comes when the one before it has ended, or while it ends
            at = ended + draw(some.floats(0, 60))
    return found


def seen(life: Life, now: float) -> PodFacts | None:
    """What the API server has of a pod: its node's word, by its node's clock."""
    if now < life.started + life.late or now >= life.gone:
        return None
    over = now >= life.ended + life.late
    return PodFacts(
        uid=life.uid,
        index=life.index,
        started_at=when(life.started + life.clock_off),
        ended_at=when(life.ended + life.clock_off) if over else None,
        instance_type="p5.48xlarge",
        zone=None,
        price=Price(HOURLY_USD, "test", "2026-01-01"),
        scheduled_at=when(life.scheduled),
    )


def looks(draw: some.DrawFn, until: float) -> list[float]:
    """When the operator looks: every few seconds, but for the times when it is away."""
    at, found = 0.0, []
    while at < until:
        at += draw(some.sampled_from([2.0, 5.0, 5.0, 5.0, 15.0, 400.0]))
        found.append(at)
    return found


def audited(given: Sequence[Life], times: Sequence[float]) -> LedgerState:
    """The ledger after all looks, which is not less after any than before it."""
    state, known = LedgerState(), set[str]()
    for now in times:
        pods = [one for life in given if (one := seen(life, now)) is not None]
        known |= {pod.uid for pod in pods}
        # who vanished unseen has left word, by its node's clock
        vanished = {
            life.uid: when(life.ended + life.clock_off) for life in given if life.uid in known and now >= life.gone
        }
        before = state
        state = accrue(state, pods, TrainedSteps(), when(now), Fees(), vanished, LAG_SECONDS)
        assert state.accrued_usd >= before.accrued_usd - 1e-9, f"at {now}: {before.accrued_usd} -> {state.accrued_usd}"
        assert state.pod_seconds >= before.pod_seconds - 1e-6
        assert sum(state.seconds.values()) - state.pod_seconds < 1e-6
    return state


@settings(max_examples=300)
@given(some.data())
def test_the_ledger_equals_the_truth_to_the_cent_and_never_decreases(data: some.DataObject) -> None:
    given_lives = data.draw(lives())
    times = looks(data.draw, max(life.gone for life in given_lives) + 30)
    state = audited(given_lives, times)
    # a pod that lived and went while nobody looked is not known to the ledger; its object was never seen
    met = [life for life in given_lives if any(seen(life, now) for now in times)]
    truth = sum(life.seconds for life in met) * HOURLY_USD / 3600
    assert abs(state.accrued_usd - truth) < CENT, f"{state.accrued_usd} and not {truth}"


def test_a_node_whose_clock_is_a_day_off_does_not_book_a_day() -> None:
    for off in (86_400.0, -86_400.0):
        life = Life("a", 0, 0.0, 1.0, 601.0, off, 700.0, 1.0)
        state = audited([life], [5.0 * n for n in range(1, 60)])
        assert state.pod_seconds < 300, "while it runs"
        state = audited([life], [5.0 * n for n in range(1, 150)])
        assert abs(state.pod_seconds - 600) < 1e-6


def test_a_node_whose_clock_jumps_by_a_day_while_a_pod_runs_does_not_book_a_day() -> None:
    for off in (86_400.0, -86_400.0):
        state, life = LedgerState(), Life("a", 0, 0.0, 1.0, 601.0, 0.0, 10_000.0, 1.0)
        for now in (5.0, 300.0, 590.0, 605.0, 620.0, 2000.0):
            pod = seen(life, now)
            assert pod is not None
            if pod.ended_at is not None:
                pod = replace(pod, ended_at=pod.ended_at + timedelta(seconds=off))
            state = accrue(state, [pod], TrainedSteps(), when(now), Fees(), {}, LAG_SECONDS)
        assert abs(state.pod_seconds - 600) <= CLOCKS_APART.total_seconds() + 15 + LAG_SECONDS


def test_nobody_s_word_on_the_volume_makes_a_pod_that_ran_free() -> None:
    life = Life("a", 0, 0.0, 0.0, 3600.0, 0.0, 3600.0, 0.0)
    state = LedgerState()
    for now in range(5, 3600, 5):
        pod = seen(life, now)
        assert pod is not None
        state = accrue(state, [pod], TrainedSteps(), when(now), Fees(), {}, LAG_SECONDS)
    for told in (0.0, 1e9):
        after = accrue(state, [], TrainedSteps(), when(3610), Fees(), {"a": when(told)}, LAG_SECONDS)
        assert abs(after.pod_seconds - 3600) <= CLOCKS_APART.total_seconds() + 15


def test_a_job_that_meets_thousands_of_pods_keeps_a_small_ledger_and_pays_each_once() -> None:
    state = LedgerState()
    pods: list[PodFacts] = []
    phases = dict.fromkeys(Phase, 1.0)
    for number in range(3000):
        life = Life(f"{number:036d}", number % 50, number * 60.0, number * 60.0, number * 60.0 + 50, 0.0, 1e9, 0.0)
        pod = seen(life, life.ended + 1)
        assert pod is not None
        pods.append(replace(pod, phase_seconds=phases))
        if number % 100 == 99:
            for _ in range(2):
                state = accrue(state, pods, TrainedSteps(), when(life.ended + 1), Fees(), {}, LAG_SECONDS)
    assert state.pod_seconds == pytest.approx(3000 * 50)
    assert len(state.model_dump_json()) < 300_000, "a ConfigMap takes 1 MiB"
    later = when(life.ended + 1)
    state = accrue(state, pods[:10], TrainedSteps(), later + timedelta(seconds=60), Fees(), {}, LAG_SECONDS)
    state = accrue(state, pods, TrainedSteps(), later + timedelta(seconds=120), Fees(), {}, LAG_SECONDS)
    assert state.pod_seconds == pytest.approx(3000 * 50), "late news of pods that are gone"
    for hours in (1, 2):
        state = accrue(state, [], TrainedSteps(), later + timedelta(hours=hours), Fees(), {}, LAG_SECONDS)
    assert (state.accounts, state.settled) == ((), {})
