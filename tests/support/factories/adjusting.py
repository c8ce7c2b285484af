"""Situations of the adjuster: plans, what was measured under them, and changes that were made before."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.support.factories.facts import BOOK, START, job

from cost_aware_operator.adjusting.adjuster import DynamicParallelismAdjuster
from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.changes import Change, ChangeOutcome, Kind
from cost_aware_operator.adjusting.situation import AdjustSettings, Situation, Verdict, Window
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.costs.models.predict import step_seconds
from cost_aware_operator.planning.plan import Plan, PlanInput, adjusting_space, make_plan

SPEC: dict[str, Any] = {
    "model": {"preset": None, "layers": 8, "hidden": 256, "heads": 8, "kvHeads": 4, "ffn": 1024, "sequenceLength": 256,
              "vocabulary": 512},
    "batch": {"global": 32},
    "nodes": {"min": 1, "max": 8, "instanceTypes": ["p3.2xlarge"]},
    "template": {"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}},
}  # fmt: skip


SETTINGS = AdjustSettings(AdjustPolicy.ACT, 0.8, 60.0, 300.0, 0.0)


NODE_USD = 3.06


def planned(**spec: Any) -> tuple[Plan, Any]:
    given = job(**{**SPEC, **spec}).spec
    plan = make_plan(PlanInput(given, BOOK))
    assert isinstance(plan, Plan)
    return plan, adjusting_space(PlanInput(given, BOOK))


PIPELINE, SPACE = planned(
    parallelism={"data": 1, "tensor": 1, "pipeline": 4}, nodes={**SPEC["nodes"], "min": 4, "max": 4}
)


_, ROOMY = planned()


def window(plan: Plan, efficiency: float, slow_network: float = 1.0, seconds: float = 60.0) -> Window:
    """What ranks of a plan would measure if the models were right, on links that are slower than listed."""
    offer = ROOMY.offers[0]
    machine = replace(offer.machine, network_gbit_per_s=offer.machine.network_gbit_per_s / slow_network)
    found = step_seconds(ROOMY.work.shape, machine, plan.layout(32, offer.precision))
    measured = Measured(float(found.total), float(found.compute + found.optimizer))
    return Window(seconds, 20, efficiency, float(found.total) * 1.02, measured)


def situation(plan: Plan = PIPELINE, **over: Any) -> Situation:
    values: dict[str, Any] = {
        "now": START + timedelta(hours=1),
        "settings": SETTINGS,
        "plan": plan,
        "space": ROOMY,
        "window": window(plan, 0.5, slow_network=20),
        "remaining_steps": 100_000,
        "hourly_usd": plan.nodes * NODE_USD,
        "changes": (),
        "barred": frozenset(),
    }
    return Situation(**(values | over))


def verdict(**over: Any) -> Verdict:
    return DynamicParallelismAdjuster().verdict(situation(**over))


def change(**over: Any) -> Change:
    values: dict[str, Any] = {
        "at": START,
        "attempt": 2,
        "kind": Kind.REBALANCE,
        "origin": PIPELINE,
        "target": PIPELINE,
        "reason": "",
        "before_step_usd": 1.0,
        "predicted_step_usd": 0.5,
        "predicted_savings_usd": 10.0,
        "remaining_steps": 100,
        "outcome": ChangeOutcome.KEPT,
    }
    return Change(**(values | over))
