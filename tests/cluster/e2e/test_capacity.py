"""A node is taken away on a real cluster and no other comes: the run goes on with fewer, and back when there is one again."""

from __future__ import annotations

import pytest
from devtools.cluster import LAST_WORKER, Space
from tests.support.cluster.adjusted import QUICK, closes, submitted
from tests.support.cluster.truth import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.exhaustive, pytest.mark.timeout(900)]
TAINT = "cloud.google.com/impending-node-termination"


def test_a_run_goes_on_with_the_nodes_that_are_left_and_takes_the_other_back(space: Space) -> None:
    # nothing else is a reason to change: nearly all time may be lost
    document = submitted(
        space,
        "ebb",
        {"min": 1, "max": 2},
        {"data": 2, "tensor": 1, "pipeline": 1},
        trainer={"config": {"steps": 1600}},
        batch={"global": 16},
        objective="Time",
        efficiency={**QUICK, "threshold": 0.05},
    )
    space.wait_step("ebb", 100, 240)
    space.cluster.run("taint", "node", LAST_WORKER, f"{TAINT}=soon:NoSchedule")
    try:
        waiting = space.wait(
            "ebb",
            lambda s: any(c["reason"] == "WaitingForNodes" for c in s.get("conditions", [])),
            120,
            "a reason to wait",
        )
        assert waiting.get("adjustments", []) == []
        small = space.wait(
            "ebb", lambda s: s["plan"]["nodes"] == 1 and s.get("state") == "Running", 240, "one node at work"
        )
        first = small["adjustments"][0]
        assert first["kind"] == "Shrink", first
        assert first["outcome"] in ("Checking", "Kept"), first
        assert "found no node for" in first["reason"]
        assert first["downtimeSeconds"] < 60
        (pod,) = space.pods("ebb")
        assert pod["spec"]["nodeName"] != LAST_WORKER
    finally:
        space.cluster.run("taint", "node", LAST_WORKER, f"{TAINT}-", check=False)
    grown = space.wait("ebb", lambda s: len(s.get("adjustments", [])) > 1, 180, "the other node taken back")
    assert grown["adjustments"][1]["kind"] == "Resize"
    assert "there are nodes for 2x1x1 on 2 nodes" in grown["adjustments"][1]["reason"]
    status = space.wait_finished("ebb", seconds=560)
    assert status["state"] == "Succeeded", status
    kept, taken_back = [c["outcome"] for c in status["adjustments"]][:2]
    assert kept == "Kept"
    # whether two pods stay faster than one on as many cores, others decide who use the machine
    assert taken_back in ("Kept", "RolledBack")
    assert status["adjustments"][1]["downtimeSeconds"] < 120
    assert_exactly_once(space, "ebb", document["spec"], status)
    closes(status)
