"""A node announces its end on a real cluster: the run saves and goes on elsewhere, before anything is killed."""

from __future__ import annotations

import pytest
from devtools.cluster import Space, manifest
from tests.support.cluster.truth import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
TAINT = "aws-node-termination-handler/spot-itn"


def test_a_spot_notice_moves_the_pod_once_and_no_step_is_lost(space: Space) -> None:
    # saved only because of the notice: the next checkpoint would be long after the end
    document = manifest("spot", trainer={"config": {"steps": 20_000}}, checkpoint={"intervalSeconds": 3600})
    space.submit(document)
    space.wait_step("spot", 20)
    (pod,) = space.pods("spot")
    node = pod["spec"]["nodeName"]
    space.cluster.run("taint", "node", node, f"{TAINT}=soon:NoSchedule")
    try:
        space.wait("spot", lambda s: s.get("attempt", 0) >= 2, 180, "a second attempt")
        status = space.wait("spot", lambda s: s.get("state") == "Running", 120, "training")
        moved = [
            p
            for p in space.pods("spot")
            if not p["metadata"].get("deletionTimestamp") and p["status"]["phase"] == "Running"
        ]
        assert [p["spec"]["nodeName"] for p in moved] != [node]
        assert any("NodeEnding" in event and node in event for event in space.events("spot"))
        assert status["cost"]["byCause"]["lostWork"] == 0, "the ranks saved before their pod ended"
        done = space.wait_finished("spot", 560)
    finally:
        space.cluster.run("taint", "node", node, f"{TAINT}-", check=False)
    assert done["state"] == "Succeeded", done
    assert done["attempt"] == 2
    assert_exactly_once(space, "spot", document["spec"], done)
