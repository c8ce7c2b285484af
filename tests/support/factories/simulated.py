"""Runs for the simulator: a plan as it was submitted, and whether the adjuster acts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.factories.facts import BOOK, job, merged

from cost_aware_operator.adjusting.situation import AdjustSettings
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.planning.plan import Plan, PlanInput, adjusting_space, make_plan

SPEC: dict[str, Any] = {
    "trainer": {"config": {"steps": 400}},
    "model": {"preset": None, "layers": 8, "hidden": 256, "heads": 8, "kvHeads": 4, "ffn": 1024, "sequenceLength": 256,
              "vocabulary": 512},
    "batch": {"global": 32},
    "nodes": {"min": 1, "max": 8, "instanceTypes": ["p3.2xlarge"]},
    "template": {"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}},
}  # fmt: skip


ACT = AdjustSettings(AdjustPolicy.ACT, 0.8, 60.0, 300.0, 0.0)


OFF = replace(ACT, policy=AdjustPolicy.OFF)


def submitted(degrees: tuple[int, int, int, int]) -> tuple[Plan, Any]:
    data, tensor, pipeline, nodes = degrees
    fixed = {
        "nodes": {"min": nodes, "max": nodes},
        "parallelism": {"data": data, "tensor": tensor, "pipeline": pipeline},
    }
    plan = make_plan(PlanInput(job(**merged(SPEC, fixed)).spec, BOOK))
    space = adjusting_space(PlanInput(job(**SPEC).spec, BOOK))
    assert isinstance(plan, Plan)
    return plan, space
