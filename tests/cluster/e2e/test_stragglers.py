"""A slow node on a real cluster: named, left, and never at the cost of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from devtools.cluster import LAST_WORKER, Space, script
from tests.support.cluster.adjusted import QUICK, closes, submitted
from tests.support.cluster.truth import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


@pytest.fixture
def slow_worker() -> Iterator[str]:
    script("slow", LAST_WORKER, "0.2")
    yield LAST_WORKER
    script("slow", LAST_WORKER, "off")


def test_a_slow_node_is_named_and_left_where_no_other_is_free_for_fewer(space: Space, slow_worker: str) -> None:
    document = submitted(
        space, "lame", {"min": 1, "max": 2}, {"data": 2, "tensor": 1, "pipeline": 1}, trainer={"config": {"steps": 600}}
    )
    named = space.wait("lame", lambda s: bool(s.get("stragglers")), 240, "a straggler")["stragglers"][0]
    assert named["node"] == slow_worker
    assert named["slowdown"] > 1.3
    status = space.wait_finished("lame", seconds=600)
    assert status["state"] == "Succeeded", status
    first = status["adjustments"][0]
    assert (first["kind"], first["outcome"]) == ("Move", "Kept"), first
    assert first["realisedSavingsUSD"] > 0
    assert first["downtimeSeconds"] < 120
    assert [c["kind"] for c in status["adjustments"]].count("Move") == 1
    assert all(pod["spec"]["nodeName"] != slow_worker for pod in space.pods("lame"))
    assert any("Straggling=True" in event and "Move" in event for event in space.events("lame"))
    assert_exactly_once(space, "lame", document["spec"], status)
    closes(status)


def test_a_slow_stage_of_a_pipeline_without_a_node_to_go_to_is_named_and_nothing_is_done(
    space: Space, slow_worker: str
) -> None:
    # no other degrees either, and nothing but the slow node is a reason to change: what is left is to say so
    only_slow = {**QUICK, "threshold": 0.01}
    allowed = {"allowed": {"data": [1], "tensor": [1], "pipeline": [2]}}
    degrees, steps = {"data": 1, "tensor": 1, "pipeline": 2} | allowed, {"config": {"steps": 100_000}}
    submitted(space, "stuck", {"min": 2, "max": 2}, degrees, trainer=steps, efficiency=only_slow)
    try:
        said = space.wait(
            "stuck", lambda s: bool(s.get("stragglers")) and reason(s, "Straggling") != "SlowNode", 240, "a straggler"
        )
        assert [s["node"] for s in said["stragglers"]] == [slow_worker]
        assert reason(said, "Straggling") == "NoSpareNode", said
        assert said.get("adjustments", []) == []
    finally:
        # it would train on, beside whatever is tested next
        space.cluster.run("delete", "catj", "stuck", "-n", space.name)


def reason(status: dict[str, Any], condition: str) -> str:
    return next((str(c["reason"]) for c in status.get("conditions", []) if c["type"] == condition), "")
