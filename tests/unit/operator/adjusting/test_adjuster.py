"""When a run's plan is changed and when not: every check of the chain, and what never happens whatever is measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.adjusting import (
    NODE_USD,
    PIPELINE,
    ROOMY,
    SETTINGS,
    SPEC,
    change,
    planned,
    situation,
    verdict,
    window,
)
from tests.support.factories.facts import START

from cost_aware_operator.adjusting.calibration import Measured, calibrated
from cost_aware_operator.adjusting.changes import ChangeOutcome, plan_key
from cost_aware_operator.adjusting.situation import Action
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.predict import step_seconds
from cost_aware_operator.planning.plan import Plan


def test_a_pipeline_over_a_slow_link_is_changed_for_a_plan_that_saves_dollars() -> None:
    found = verdict()
    assert found.action is Action.CHANGE
    assert found.plan is not None
    assert plan_key(found.plan) != plan_key(PIPELINE)
    assert found.plan.pipeline < 4
    assert found.predicted_savings_usd is not None
    assert found.predicted_savings_usd > 0
    assert "efficiency 50% is under 80%" in found.message
    assert "for the change" in found.message


HELD: list[tuple[str, dict[str, Any], str]] = [
    ("off", {"settings": replace(SETTINGS, policy=AdjustPolicy.OFF)}, "PolicyOff"),
    ("nothing measured", {"window": None}, "TooFewSamples"),
    ("a window half full", {"window": window(PIPELINE, 0.5, seconds=59)}, "TooFewSamples"),
    ("no price", {"hourly_usd": None}, "PriceUnknown"),
    ("efficient", {"window": window(PIPELINE, 0.8, 20)}, "Efficient"),
    ("just changed", {"changes": (change(at=START + timedelta(minutes=56)),)}, "CoolingDown"),
    ("an unknown model", {"space": None}, "ModelUnknown"),
    ("nearly done", {"remaining_steps": 1}, "NotWorthIt"),
    ("too little saved", {"settings": replace(SETTINGS, minimum_savings_usd=1e6)}, "NotWorthIt"),
    (
        "a model that was wrong before",
        {"changes": (change(predicted_step_usd=1.0, realised_step_usd=20.0),)},
        "PromiseTooSmall",
    ),
]


@pytest.mark.parametrize(("over", "reason"), [h[1:] for h in HELD], ids=[h[0].replace(" ", "-") for h in HELD])
def test_nothing_is_changed_without_reason(over: dict[str, Any], reason: str) -> None:
    found = verdict(**over)
    assert (found.action, found.reason) == (Action.HOLD, reason)
    assert found.message


def test_the_best_plan_stays() -> None:
    best = verdict().plan
    assert best is not None
    found = verdict(plan=best, window=window(best, 0.5, 20))
    assert (found.action, found.reason) == (Action.HOLD, "BestPlan")


def test_recommend_says_what_act_would_do_and_does_nothing() -> None:
    acted, said = verdict(), verdict(settings=replace(SETTINGS, policy=AdjustPolicy.RECOMMEND))
    assert said.action is Action.RECOMMEND
    assert (said.plan, said.message) == (acted.plan, acted.message)


def test_a_barred_plan_is_not_chosen_again() -> None:
    first = verdict().plan
    assert first is not None
    second = verdict(barred=frozenset({plan_key(first)})).plan
    assert second is None or plan_key(second) != plan_key(first)


@pytest.mark.parametrize(("before", "action"), [(0.5, Action.ROLL_BACK), (2.0, Action.HOLD)])
def test_a_change_that_made_it_worse_is_taken_back(before: float, action: Action) -> None:
    now = situation()
    assert now.window is not None
    cost = now.window.wall_step_seconds * now.plan.nodes * NODE_USD / 3600
    origin = replace(PIPELINE, micro_batch=2)
    last = change(
        origin=origin, before_step_usd=before * cost, outcome=ChangeOutcome.CHECKING, at=START + timedelta(minutes=58)
    )
    found = verdict(changes=(last,))
    assert found.action is action
    if action is Action.ROLL_BACK:
        assert found.plan == origin
        assert "predicted" in found.message


def test_a_rollback_is_not_rolled_back() -> None:
    last = change(
        before_step_usd=1e-9, outcome=ChangeOutcome.CHECKING, is_rollback=True, at=START + timedelta(minutes=58)
    )
    assert verdict(changes=(last,)).action is Action.HOLD


def test_a_deadline_that_would_be_missed_makes_the_run_grow() -> None:
    single, _ = planned(nodes={**SPEC["nodes"], "min": 1, "max": 1})
    seen = window(single, 0.99)
    left = 1000 * seen.wall_step_seconds * 0.5
    found = verdict(plan=single, window=seen, remaining_steps=1000, deadline_left_seconds=left, hourly_usd=NODE_USD)
    assert found.action is Action.CHANGE
    assert found.plan is not None
    assert found.plan.nodes > 1
    assert "deadline" in found.message
    poor = verdict(
        plan=single,
        window=seen,
        remaining_steps=1000,
        deadline_left_seconds=left,
        hourly_usd=NODE_USD,
        budget_left_usd=1e-6,
    )
    assert (poor.action, poor.reason) == (Action.HOLD, "NoCandidate")
    assert "the budget" in poor.message


@settings(max_examples=30)
@given(compute=st.floats(0.1, 10), network=st.floats(0.02, 50), plan=st.sampled_from([PIPELINE, planned()[0]]))
def test_calibration_finds_the_machine_that_was_measured(compute: float, network: float, plan: Plan) -> None:
    offer = ROOMY.offers[0]
    gpu = offer.machine.accelerator
    real = replace(
        offer.machine,
        accelerator=replace(
            gpu,
            peak_tflops={p: v * compute for p, v in gpu.peak_tflops.items()},
            memory_gbytes_per_s=gpu.memory_gbytes_per_s * compute,
        ),
        network_gbit_per_s=offer.machine.network_gbit_per_s * network,
    )
    layout = plan.layout(32, offer.precision)
    truth = step_seconds(ROOMY.work.shape, real, layout)
    measured = Measured(float(truth.total), float(truth.compute + truth.optimizer))
    found = calibrated(ROOMY.work.shape, offer, layout, measured).offer
    again = step_seconds(ROOMY.work.shape, found.machine, layout)
    assert float(again.total) == pytest.approx(measured.step_seconds, rel=0.03)
    assert float(again.compute) == pytest.approx(float(truth.compute), rel=0.03)


def test_where_steps_say_nothing_of_the_network_the_ranks_probe_does() -> None:
    offer = ROOMY.offers[0]
    single, _ = planned(nodes={**SPEC["nodes"], "min": 1, "max": 1})
    layout = replace(single.layout(32, offer.precision), data=1, tensor=1, pipeline=1)
    truth = step_seconds(ROOMY.work.shape, offer.machine, layout)
    quiet = Measured(float(truth.total), float(truth.compute + truth.optimizer))
    listed = calibrated(ROOMY.work.shape, offer, layout, quiet).offer.machine
    assert listed.network_gbit_per_s == offer.machine.network_gbit_per_s
    # 2.5 MB/s of each of a node's ranks
    probed = calibrated(ROOMY.work.shape, offer, layout, replace(quiet, network_bytes_per_second=2.5e6)).offer.machine
    found = probed.fabric(FITTED).network.bytes_per_second / offer.machine.gpus_per_node
    assert found == pytest.approx(2.5e6)


@settings(max_examples=40)
@given(
    efficiency=st.floats(0, 1),
    slow=st.floats(0.05, 200),
    remaining=st.integers(0, 10**6),
    ago=st.floats(0, 4000),
    hourly=st.one_of(st.none(), st.floats(0.01, 1000)),
)
def test_a_change_always_promises_more_than_it_costs(
    efficiency: float, slow: float, remaining: int, ago: float, hourly: float | None
) -> None:
    last = change(at=START + timedelta(seconds=3600 - ago))
    found = verdict(
        window=window(PIPELINE, efficiency, slow), remaining_steps=remaining, changes=(last,), hourly_usd=hourly
    )
    assert found.reason
    assert found.message
    if found.action is Action.HOLD:
        assert found.plan is None
        return
    assert found.action is Action.CHANGE
    assert efficiency < 0.8
    assert ago >= 300
    assert found.predicted_savings_usd is not None
    assert found.predicted_savings_usd > 0
    assert found.plan is not None
    assert 1 <= found.plan.nodes <= 8
