"""The operator is killed while it changes a run; the run ends under one plan, with every sample trained once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.cluster import OPERATOR_NAMESPACE, PodLives, Space, manifest, script
from tests.support.truth import assert_books_close, assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

SPEC: dict[str, Any] = {
    "trainer": {"config": {"steps": 400}},
    "model": {"layers": 4, "hidden": 128, "heads": 4, "kvHeads": 2, "ffn": 344, "sequenceLength": 128, "vocabulary": 256},
    "batch": {"global": 8},
    "nodes": {"min": 1, "max": 2, "instanceTypes": ["p3.2xlarge"]},
    "parallelism": {"data": 2, "tensor": 1, "pipeline": 1},
    "efficiency": {"policy": "Act", "threshold": 0.9, "windowSeconds": 10, "cooldownSeconds": 20},
}  # fmt: skip


@pytest.fixture
def slow_link() -> Iterator[None]:
    script("shape", "20mbit")
    yield
    script("shape", "off")


@pytest.mark.parametrize("seconds", [0.0, 4.0], ids=["as-it-is-ordered", "while-ranks-save-and-start"])
def test_an_operator_that_dies_during_a_change_leaves_one_plan(space: Space, slow_link: None, seconds: float) -> None:
    job = f"changed-{seconds:.0f}"
    with PodLives(space, job) as lives:
        space.submit(manifest(job, **SPEC))
        space.wait(job, lambda s: bool(s.get("adjustments")), 240, "a change")
        time.sleep(seconds)
        for pod in space.cluster.operator_pods():
            space.cluster.run(
                "delete", "pod", pod, "-n", OPERATOR_NAMESPACE, "--grace-period=0", "--force", "--wait=false"
            )
        status = space.wait_finished(job, 420)
        time.sleep(1)
    assert status["state"] == "Succeeded", status
    changes = status["adjustments"]
    assert all(change["outcome"] != "InProgress" for change in changes[:-1])
    assert status["plan"]["degrees"] == changes[-1]["to"].split()[0], "the plan is that of the last change"
    assert len(space.pods(job)) == status["plan"]["nodes"]
    assert_exactly_once(space, job, manifest(job, **SPEC)["spec"], status)
    assert_books_close(status, lives)
