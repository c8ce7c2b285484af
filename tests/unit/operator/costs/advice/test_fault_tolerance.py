"""Failures: probabilities, intervals against a search and a simulation, strategies that move the right way."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.advice.fault_tolerance import FaultToleranceAnalyzer
from cost_aware_operator.costs.advice.survival import Run, Strategy, StrategyCost
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.goodput import expected_goodput, optimal_interval
from cost_aware_operator.costs.tables.hazards import node_hazard

ANALYZER = FaultToleranceAnalyzer()
RUN = Run(
    nodes=16,
    hours=240.0,
    node_hourly_usd=55.04,
    node_failures_per_hour=node_hazard(8, spot=False),
    state_gb=1120.0,
    restart_seconds=180.0,
    storage_gbytes_per_s=5.0,
    storage_usd_per_gib_month=0.08,
    network_gbytes_per_s=200.0,
    copy_gbytes_per_s=100.0,
    free_host_gb=1000.0,
)
SPOT = replace(RUN, node_failures_per_hour=node_hazard(8, spot=True), node_hourly_usd=20.0)


def test_llama_3_s_hazard_gives_its_mean_time_between_failures() -> None:
    """419 in 54 days of 2,048 nodes: one in 3.1 hours; a node of eight fails every 6,300 hours."""
    assert 1 / (2048 * node_hazard(8, spot=False)) == pytest.approx(3.09, abs=0.01)
    assert 1 / node_hazard(8, spot=False) == pytest.approx(6335, abs=5)


def test_failure_probability() -> None:
    hazard = -math.log(0.99)  # the seed's 1 % an hour
    assert ANALYZER.failure_probability(4, 24, hazard) == pytest.approx(1 - 0.99**96)
    assert ANALYZER.failure_probability(4, 0, hazard) == 0


@pytest.mark.parametrize(
    ("stall", "mtbf", "recovery"), [(5, 900, 120), (1, 10_000, 300), (60, 20_000, 600), (30, 300, 60)]
)
def test_no_interval_gives_more_goodput_than_the_optimal_one(stall: float, mtbf: float, recovery: float) -> None:
    chosen = expected_goodput(optimal_interval(stall, mtbf), stall, recovery, mtbf)
    best = max(expected_goodput(t, stall, recovery, mtbf) for t in range(1, 20_000, 3))
    assert chosen >= 0.998 * best


def test_young_s_interval_where_failures_are_rare() -> None:
    assert optimal_interval(5, 1e6) == pytest.approx(math.sqrt(2 * 5 * 1e6), rel=0.01)
    assert optimal_interval(0.78, 3600, write_seconds=436) == 436


def test_eight_spot_nodes_save_every_two_minutes() -> None:
    """research/trainer.md, D: a loss every 10 to 25 minutes and C = 5 s ask for 80 to 120 s."""
    assert 70 <= optimal_interval(5, 10 * 60) <= optimal_interval(5, 25 * 60) <= 125


def test_goodput_is_what_a_simulation_finds() -> None:
    chance, (interval, stall, recovery, mtbf) = random.Random(1), (100.0, 5.0, 120.0, 900.0)
    clock, segments = 0.0, 20_000
    for _ in range(segments):
        while (fails := chance.expovariate(1 / mtbf)) < interval + stall:
            clock += fails
            while (again := chance.expovariate(1 / mtbf)) < recovery:
                clock += again
            clock += recovery
        clock += interval + stall
    found = segments * interval / clock
    assert expected_goodput(interval, stall, recovery, mtbf) == pytest.approx(found, rel=0.02)


def test_a_checkpoint_pays_on_demand_and_nothing_pays_for_a_short_run() -> None:
    choice = ANALYZER.choose(replace(RUN, free_host_gb=100.0), 0.99)
    assert choice.best is not None
    assert choice.best.strategy is Strategy.CHECKPOINT
    assert choice.best.goodput > 0.98
    roomy = ANALYZER.choose(RUN, 0.99)
    assert roomy.best is not None
    assert roomy.best.detail == "3 copies in memory, backed by storage", "free memory is used before hours are lost"
    short = ANALYZER.choose(replace(RUN, hours=0.5, nodes=8), 0.99)
    assert short.best is not None
    assert short.best.strategy is Strategy.NONE


def test_on_spot_copies_in_memory_are_dearer_to_lose_and_storage_slower() -> None:
    options = {(o.strategy, o.detail): o for o in ANALYZER.choose(SPOT, 0.9).options}
    none = options[Strategy.NONE, "begin again"]
    assert none.usd is None
    assert "never end" in none.reason
    stored = options[Strategy.CHECKPOINT, "to storage, 2 kept"]
    assert 0.1 < stored.goodput < 0.9
    two, three = (
        options[Strategy.REPLICATION, "2 copies in memory"],
        options[Strategy.REPLICATION, "3 copies in memory"],
    )
    assert two.memory_gb_per_node < three.memory_gb_per_node
    assert two.reliability <= three.reliability


def backed(run: Run) -> StrategyCost:
    return ANALYZER.replication(run, backed=True)


def test_a_checkpoint_behind_copies_keeps_the_run_when_all_copies_are_lost() -> None:
    bare, safe = ANALYZER.replication(SPOT), backed(SPOT)
    assert bare.usd is None, "8 losses an hour, and 1 % of them take all copies"
    assert safe.usd is not None
    assert safe.reliability > 0.999 > bare.reliability
    stored = ANALYZER.checkpoint(SPOT)
    assert stored.usd is not None
    assert safe.usd < stored.usd, "most losses are made good from memory"
    assert safe.goodput > stored.goodput


def test_what_backs_copies_is_rare_and_costs_its_snapshot_and_its_storage() -> None:
    bare, safe = ANALYZER.replication(RUN), backed(RUN)
    assert safe.memory_gb_per_node == bare.memory_gb_per_node + RUN.node_state_gb
    assert safe.durable_interval_seconds is not None
    assert bare.durable_interval_seconds is None
    assert safe.durable_interval_seconds > 5 * safe.interval_seconds
    never_both = replace(RUN, correlated_share=0.0, node_failures_per_hour=1e-9)
    bare, safe = ANALYZER.replication(never_both), backed(never_both)
    assert bare.usd is not None
    assert safe.usd is not None
    assert safe.usd - bare.usd == pytest.approx(2 * 1120e9 / 2**30 * 0.08 * 240 / 730, rel=0.01)


def test_backing_is_offered_and_needs_its_memory() -> None:
    details = [o.detail for o in ANALYZER.choose(RUN, 0.9).options]
    assert "2 copies in memory, backed by storage" in details
    tight = replace(RUN, free_host_gb=300.0)
    assert ANALYZER.replication(tight).usd is not None
    assert backed(tight).reason == "free_host_gb: needs 350 a node, but 300 are free: write 350 or more"


def test_two_levels_of_saving_are_what_a_simulation_finds() -> None:
    """Failures go back to the last copy in memory; more than one in five goes back to the last durable save."""
    run = replace(RUN, nodes=2, node_failures_per_hour=1.5, correlated_share=0.2, hours=100.0, restart_seconds=60.0)
    how = backed(run)
    assert how.durable_interval_seconds is not None
    chance, mtbf = random.Random(3), 3600 / run.failures_per_hour
    lost_all = run.correlated_share + 1.5 * how.recovery_seconds / 3600
    moved = run.state_gb / run.storage_gbytes_per_s
    clock = done = copied = stored = written = 0.0
    durable_from = 0.0
    fails = chance.expovariate(1 / mtbf)
    while done < 100 * run.hours * 3600:
        copy, save = copied + how.interval_seconds - done, stored + how.durable_interval_seconds - done
        ahead = min(copy, save)
        if clock + ahead < fails:
            clock, done = clock + ahead, done + ahead
            if copy <= save:
                clock, copied = clock + how.stall_seconds, done
            else:
                if clock >= durable_from:
                    written = stored
                clock, stored = clock + run.node_state_gb / run.copy_gbytes_per_s, done
                durable_from = clock + moved
            continue
        clock = max(clock, fails)
        if chance.random() < lost_all:
            done = copied = stored = stored if clock >= durable_from else written
            clock += run.restart_seconds + moved
        else:
            done, clock = copied, clock + how.recovery_seconds
        fails = clock + chance.expovariate(1 / mtbf)
    assert how.goodput == pytest.approx(done / clock, rel=0.04)


def test_existing_replicas_cost_nothing_and_lose_no_interval() -> None:
    free = ANALYZER.replication(replace(RUN, data_replicas=4, correlated_share=0.0))
    copied = ANALYZER.replication(replace(RUN, correlated_share=0.0))
    assert (free.memory_gb_per_node, free.network_gb, free.stall_seconds) == (0, 0, 0)
    assert free.goodput > copied.goodput
    assert free.usd is not None
    assert copied.usd is not None
    assert free.usd < copied.usd


def test_a_code_needs_less_memory_than_as_many_copies() -> None:
    assert ANALYZER.erasure_coding(RUN, 4, 2).memory_gb_per_node < ANALYZER.replication(RUN, 3).memory_gb_per_node


def test_what_does_not_fit_says_how_much_would() -> None:
    full = ANALYZER.replication(replace(RUN, free_host_gb=100.0))
    assert full.usd is None
    assert full.reason == "free_host_gb: needs 280 a node, but 100 are free: write 280 or more"


def test_a_requirement_that_none_meets_names_the_best() -> None:
    choice = ANALYZER.choose(RUN, 1.0)
    assert choice.best is None
    assert choice.reason.startswith("reliability: none reaches 1, the best, ")
    assert "reaches 0.99" in choice.reason


def test_the_answer_s_reliability_is_its_own() -> None:
    choice = ANALYZER.choose(RUN, 0.5)
    assert choice.best in choice.options
    assert choice.best is not None
    assert choice.best.reliability >= 0.5
    assert choice.best.usd == min(o.usd for o in choice.options if o.usd is not None and o.reliability >= 0.5)


@given(
    st.sampled_from(
        ["node_hourly_usd", "node_failures_per_hour", "restart_seconds", "hours", "storage_usd_per_gib_month"]
    ),
    st.floats(1, 20),
)
def test_dollars_never_fall_when_something_gets_worse(name: str, factor: float) -> None:
    worse = replace(RUN, **{name: getattr(RUN, name) * factor})
    for call in (ANALYZER.none, ANALYZER.checkpoint, ANALYZER.replication, backed, ANALYZER.erasure_coding):
        before, after = call(RUN).usd, call(worse).usd
        assert before is not None
        assert after is None or after >= before * (1 - 1e-3)


@given(st.sampled_from(["storage_gbytes_per_s", "network_gbytes_per_s", "copy_gbytes_per_s"]), st.floats(1, 100))
def test_dollars_never_rise_with_bandwidth(name: str, factor: float) -> None:
    for call in (ANALYZER.checkpoint, ANALYZER.replication, backed, ANALYZER.erasure_coding):
        slow, fast = call(RUN).usd, call(replace(RUN, **{name: getattr(RUN, name) * factor})).usd
        assert slow is not None
        assert fast is not None
        assert fast <= slow * (1 + 1e-3)


@given(
    st.fixed_dictionaries({f.name: st.one_of(st.floats(), st.integers(-5, 10**7)) for f in fields(Run)}), st.floats()
)
def test_any_run_gives_finite_dollars_or_names_the_field(values: dict[str, float], wanted: float) -> None:
    try:
        choice = ANALYZER.choose(Run(**values), wanted)  # type: ignore[arg-type]
    except AnalysisError as error:
        assert "write" in str(error)  # noqa: PT017
        return
    check(choice.options)


@given(
    nodes=st.integers(1, 10**6),
    hours=st.floats(1e-6, 1e6),
    hazard=st.floats(0, 1e6),
    state=st.floats(1e-6, 1e9),
    speed=st.floats(1e-6, 1e6),
    restart=st.floats(0, 1e9),
)
def test_valid_extremes_stay_finite(
    nodes: int, hours: float, hazard: float, state: float, speed: float, restart: float
) -> None:
    run = Run(nodes, hours, 1.0, hazard, state, restart, speed, 0.1, speed, speed, 1e9, correlated_share=0.0)
    check(ANALYZER.choose(run, 0.9).options)


def check(options: tuple[object, ...]) -> None:
    for option in options:
        for name in ("usd", "recovery_usd", "hours", "goodput", "reliability", "network_gb", "expected_failures"):
            value = getattr(option, name)
            assert value is None or 0 <= value < math.inf, (name, option)
