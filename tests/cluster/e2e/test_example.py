"""The demo's job, whole: trained on real text, scraped, priced, and told to someone who has read nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from devtools.cluster import OPERATOR_NAMESPACE, Space, example
from prometheus_client.parser import text_string_to_metric_families
from tests.support.cluster.pod_lives import PodLives
from tests.support.cluster.truth import assert_books_close, assert_exactly_once

from cost_aware_trainer.contract import METRIC_LABELS, METRICS_PORT, Metric, Phase

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
JOB = "byte-gpt"


@dataclass
class Run:
    space: Space
    spec: dict[str, Any]
    status: dict[str, Any]
    lives: PodLives
    rank_metrics: list[str]
    operator_metrics: str
    during: dict[str, Any]
    columns: str
    seconds: float


@pytest.fixture(scope="module")
def run(space: Space) -> Run:
    document = example()
    with PodLives(space, JOB) as lives:
        began = time.monotonic()
        space.submit(document)
        during = space.wait(JOB, lambda s: s.get("efficiency") and s["progress"]["step"] >= 60, 240, "efficiency")
        columns = space.cluster.run("get", "catj", JOB, "-n", space.name).stdout
        rank_metrics = [
            space.cluster.raw(
                f"/api/v1/namespaces/{space.name}/pods/{p['metadata']['name']}:{METRICS_PORT}/proxy/metrics"
            )
            for p in space.pods(JOB)
        ]
        operator = space.cluster.operator_pods()[0]
        operator_metrics = space.cluster.raw(
            f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{operator}:8080/proxy/metrics"
        )
        status = space.wait_finished(JOB, 800)
        seconds = time.monotonic() - began
        time.sleep(1)
    return Run(space, document["spec"], status, lives, rank_metrics, operator_metrics, during, columns, seconds)


def test_it_succeeds_and_the_heldout_loss_falls_under_its_bound(run: Run) -> None:
    assert run.status["state"] == "Succeeded", run.status
    first = run.space.steps_log(JOB)[0]["loss"]
    print(
        f"held-out loss {first:.2f} at first, {run.status['progress']['heldoutLoss']} at the end, {run.seconds:.0f} s"
    )
    assert 5.0 < first < 6.2, "an untrained model knows nothing of 256 bytes: ln 256 = 5.55"
    assert run.status["progress"]["heldoutLoss"] < 2.3


def test_the_samples_are_exactly_those_of_the_plan(run: Run) -> None:
    assert_exactly_once(run.space, JOB, run.spec, run.status)
    assert run.status["attempt"] == 1


def test_dollars_are_pod_seconds_times_price(run: Run) -> None:
    assert_books_close(run.status, run.lives)
    assert run.status["cost"]["priceAsOf"] == "2026-07-20"
    assert run.status["cost"]["byCause"]["productive"] > 0.5 * run.status["cost"]["accruedUSD"]
    assert run.status["cost"]["transferUSD"] > 0, "the two workers stand in two zones"


def test_the_phases_of_the_steps_add_up_to_their_wall_time(run: Run) -> None:
    entries = run.space.steps_log(JOB)
    wall = sum(e["step_seconds"] for e in entries)
    assert abs(sum(sum(e["seconds"].values()) for e in entries) - wall) <= 0.02 * wall


def test_every_rank_serves_every_metric_with_job_attempt_and_rank(run: Run) -> None:
    assert len(run.rank_metrics) == 2
    ranks = set()
    for text in run.rank_metrics:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        by_name = {s.name: s.labels for s in samples}
        assert set(Metric) <= set(by_name), set(Metric) - set(by_name)
        for name in Metric:
            assert set(METRIC_LABELS) <= set(by_name[name])
            assert (by_name[name]["job"], by_name[name]["attempt"]) == (JOB, "1")
        assert {s.labels["phase"] for s in samples if s.name == Metric.PHASE_SECONDS} == set(Phase)
        ranks.add(by_name[Metric.STEP]["rank"])
    assert ranks == {"0", "1"}


def test_the_operator_scrapes_the_ranks_and_tells_throughput_and_efficiency(run: Run) -> None:
    efficiency = run.during["efficiency"]
    rates = {"current", "rankTokensPerSecond", "referenceTokensPerSecond", "mfu"}
    shares = [share for name, share in efficiency.items() if name not in rates]
    assert sum(shares) == pytest.approx(1.0, abs=0.01)
    assert efficiency["current"] == pytest.approx(efficiency["compute"] + efficiency["optimizer"], abs=0.001)
    ratio = efficiency["rankTokensPerSecond"] / efficiency["referenceTokensPerSecond"]
    assert efficiency["current"] == pytest.approx(ratio, abs=0.001), "throughput per rank over the reference"
    assert run.during["progress"]["tokensPerSecond"] > 500
    labels = f'job="{JOB}",namespace="{run.space.name}"'
    for name in ("catj_step", "catj_efficiency_ratio", "catj_tokens_per_second", "catj_hourly_usd"):
        assert f"{name}{{{labels}}}" in run.operator_metrics


def test_kubectl_get_tells_the_story_in_a_line(run: Run) -> None:
    header, line = run.columns.strip().splitlines()
    assert header.split()[:8] == ["NAME", "STATE", "STEP", "OF", "LOSS", "EFFICIENCY", "SPENT", "AGE"]
    assert "Running" in line
    assert "$" in line
    assert "attempt 1 trains" in line


def test_kubectl_describe_tells_the_story_to_someone_who_has_read_nothing(run: Run) -> None:
    text = run.space.cluster.run("describe", "catj", JOB, "-n", run.space.name).stdout
    for said in (
        "least predicted dollars of those from 2 to 2 nodes that divide the batch and fit memory",
        "$3.06 a node-hour (aws list price, us-east-1, as of 2026-07-20)",
        "all 280 steps are done",
        "of the ranks' time moves the weights",
        "Samples Checksum",
    ):
        assert said in text, text
    assert all(reason in text for reason in ("Feasible", "PriceFound", "Training", "Completed")), "events"


def test_nothing_of_a_finished_job_still_costs(run: Run) -> None:
    before = run.space.status(JOB)["cost"]["accruedUSD"]
    time.sleep(6)
    assert run.space.status(JOB)["cost"]["accruedUSD"] == before
