"""The adjuster over whole runs on a virtual clock: no flapping, never much worse than leaving the run alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.facts import job, merged
from tests.support.factories.simulated import ACT, OFF, SPEC, submitted

from cost_aware_operator.adjusting.changes import Kind
from cost_aware_operator.adjusting.simulate import World, simulate
from cost_aware_operator.cli.main import main

DEGREES = [(1, 1, 4, 4), (8, 1, 1, 8), (2, 2, 1, 4), (1, 1, 1, 1), (1, 4, 2, 8)]


@settings(max_examples=12)
@given(
    degrees=st.sampled_from(DEGREES),
    compute=st.floats(0.2, 5),
    network=st.floats(0.005, 5),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 1000),
    dearer=st.one_of(st.just(1.0), st.floats(0.5, 3)),
)
def test_it_never_flaps_and_never_costs_much_more_than_leaving_the_run_alone(
    degrees: tuple[int, int, int, int], compute: float, network: float, noise: float, seed: int, dearer: float
) -> None:
    plan, space = submitted(degrees)
    world = World(compute, network, noise, price=lambda seconds: dearer if seconds > 1000 else 1.0)
    static, acting = (simulate(space, plan, policy, world, seed) for policy in (OFF, ACT))
    assert static.changes == ()
    for before, after in pairwise(acting.changes):
        waited = (after.at - before.at).total_seconds()
        assert after.is_rollback or waited >= ACT.cooldown_seconds
    assert sum(c.is_rollback for c in acting.changes) <= len(acting.changes) / 2
    switching = sum(
        world.downtime_seconds[c.kind] * max(c.origin.nodes, c.target.nodes) * 3.06 / 3600 * max(1.0, dearer)
        for c in acting.changes
    )
    # a change that was wrong runs for a window before it is taken back
    wrong = sum(2 * ACT.window_seconds * c.target.nodes * 3.06 / 3600 * max(1.0, dearer) for c in acting.changes)
    assert acting.usd <= acting.submitted_usd * (1 + 2 * noise) + switching + wrong
    assert static.usd == pytest.approx(static.submitted_usd, rel=max(1e-6, 5 * noise))
    if dearer == 1.0:
        assert acting.usd <= static.usd * (1 + 2 * noise) + switching + wrong


@settings(max_examples=12)
@given(
    degrees=st.sampled_from(DEGREES),
    network=st.floats(0.005, 5),
    budget=st.floats(0.05, 20),
    lost=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_the_budget_is_never_exceeded_whatever_is_changed_and_lost(
    degrees: tuple[int, int, int, int], network: float, budget: float, lost: int, seed: int
) -> None:
    plan, space = submitted(degrees)
    world = World(network=network, gone=lambda seconds: lost if 300 <= seconds < 900 else 0)
    static, acting = (simulate(space, plan, policy, world, seed, budget) for policy in (OFF, ACT))
    for run in (static, acting):
        assert run.usd <= budget + 1e-6
        assert run.steps_left == 0 or run.usd == pytest.approx(budget)
    if static.steps_left and not acting.changes:
        assert acting.steps_left == static.steps_left


def test_a_pipeline_over_a_network_a_hundred_times_too_slow_is_left() -> None:
    plan, space = submitted((1, 1, 4, 4))
    world = World(network=0.01)
    static, acting = simulate(space, plan, OFF, world), simulate(space, plan, ACT, world)
    assert acting.usd < 0.6 * static.usd
    assert acting.changes[0].kind in (Kind.RESIZE, Kind.REBALANCE)
    assert acting.plan.pipeline < 4
    promised, realised = acting.changes[0].predicted_savings_usd, acting.changes[0].realised_savings_usd
    assert realised == pytest.approx(promised, rel=0.1)


def test_the_best_plan_is_left_alone_and_costs_nothing_more() -> None:
    plan, space = submitted((1, 1, 1, 1))
    world = World(noise=0.02)
    static, acting = simulate(space, plan, OFF, world), simulate(space, plan, ACT, world)
    assert acting.changes == ()
    assert acting.usd == static.usd


def test_the_command_tells_both_runs_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fixed = {"nodes": {"min": 1, "max": 4}, "parallelism": {"data": 1, "tensor": 1, "pipeline": 4}}
    spec = merged(job(**merged(SPEC, fixed)).spec.to_document(), {"efficiency": {"threshold": 0.9}})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"kind": "CostAwareTrainingJob", "spec": spec}))
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(file), "--network", "0.01"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Saves" in said
    assert "steps left" in said
    with pytest.raises(SystemExit):
        main(["simulate", str(file), "--spot", "1:60"])
    assert "'1:60' is not NODES:FROM:TO: write for example 1:3600:7200" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(file), "--spot", "1:60:600"])
    assert ended.value.code == 0
    assert "found no node" in capsys.readouterr().out
    assert "efficiency" in said
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(file), "--network", "0"])
    assert ended.value.code == 2
    assert "--network: 0.0 is not from 0.001 to 1000: write 0.001" in capsys.readouterr().err
