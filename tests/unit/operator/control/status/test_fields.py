"""The figures of the status mean what the documentation says: efficiency, MFU, goodput, prediction error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.factories.facts import BOOK, decide, job, publish, running, sample

from cost_aware_operator.app.telemetry import Telemetry
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.observing.samples import Scrape
from cost_aware_operator.planning.plan import Plan, PlanInput, Predicted, make_plan
from cost_aware_operator.workload.views import NodeView

GPU: dict[str, Any] = {
    "nodes": {"instanceTypes": ["p3.2xlarge"], "ranksPerNode": 1},
    "template": {"resources": {"limits": {"nvidia.com/gpu": "1", "memory": "32Gi"}}},
}
VOLTA_FP32 = 15.7e12


def measured(compute: float = 0.9, flops: float = 0.0, memory: float = 0.0, **over: Any) -> Facts:
    """A run whose ranks do so many operations a second."""
    one = {"memory_bytes": memory}
    scrapes = tuple(
        Scrape(at, tuple(sample(i, at, compute, model_flops=flops * at, **one) for i in range(2)))
        for at in (20.0, 40.0)
    )
    samples = {f"pod-{i}": (scrapes[-1].ranks[i],) for i in range(2)}
    return running(scrapes=scrapes, samples=samples, **over)


def test_efficiency_is_throughput_per_rank_over_the_reference_that_the_job_measures() -> None:
    status = decide(measured(0.5)).status.efficiency
    assert status is not None
    assert status.rank_tokens_per_second == pytest.approx(100)
    assert status.reference_tokens_per_second == pytest.approx(200)
    assert status.current == pytest.approx(status.rank_tokens_per_second / status.reference_tokens_per_second)


def test_mfu_is_operations_by_the_clock_over_the_listed_peak() -> None:
    status = decide(measured(flops=0.3 * VOLTA_FP32, given=job(**GPU))).status.efficiency
    assert status is not None
    assert status.mfu == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize(
    ("what", "over"),
    [
        ("CPUs, whose listed peak is of none in particular", {}),
        (
            "a node of unknown hardware",
            {"given": job(**GPU), "nodes": {"node-0": NodeView("node-0", "x9", None, False)}},
        ),
    ],
)
def test_without_a_known_peak_there_is_no_mfu_and_no_series_of_it(what: str, over: dict[str, Any]) -> None:
    given = measured(flops=1e12, **({"given": job(template={"resources": {"limits": {"cpu": "1"}}})} | over))
    status = decide(given).status.efficiency
    assert status is not None
    assert status.mfu is None, what
    telemetry = Telemetry(lambda: 0.0, lambda: 0.0)
    publish(telemetry, given)
    assert telemetry.registry.get_sample_value("catj_mfu_ratio", {"namespace": "team", "job": "gpt"}) is None


def test_goodput_and_badput_are_shares_of_all_paid_time() -> None:
    status = decide(measured(0.75)).status.goodput
    assert status is not None
    assert status.productive == pytest.approx(0.75)
    assert status.communication == pytest.approx(0.25)
    assert sum(status.model_dump().values()) == pytest.approx(1.0, abs=1e-3)


def test_the_error_of_a_prediction_stands_beside_what_is_measured() -> None:
    given = measured(memory=2.0 * 2**30)
    plan = make_plan(PlanInput(given.job.spec, BOOK))
    assert isinstance(plan, Plan)
    plan = replace(plan, predicted=Predicted(1.2, 0.9, 1.0, None), memory_gib=1.5)
    given = replace(given, record=given.record.model_copy(update={"plan": plan}))
    status = decide(given).status.plan
    assert status is not None
    assert status.measured is not None
    assert (status.measured.step_seconds, status.measured.memory_gib) == (pytest.approx(1.0), pytest.approx(2.0))
    assert status.measured.step_error == pytest.approx(0.2)
    assert status.measured.memory_error == pytest.approx(0.25)
    telemetry = Telemetry(lambda: 0.0, lambda: 0.0)
    publish(telemetry, given)
    labels = {"namespace": "team", "job": "gpt", "figure": "step_seconds"}
    assert telemetry.registry.get_sample_value("catj_prediction_error_ratio", labels) == pytest.approx(0.2)
