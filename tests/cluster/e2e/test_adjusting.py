"""The ring on a real cluster: a plan that wastes dollars is changed, checked, and never at the cost of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from devtools.cluster import Space, script
from tests.support.cluster.adjusted import QUICK, closes, submitted
from tests.support.cluster.truth import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


@pytest.fixture
def slow_link() -> Iterator[None]:
    script("shape", "20mbit")
    yield
    script("shape", "off")


def test_too_many_nodes_on_a_slow_link_become_fewer(space: Space, slow_link: None) -> None:
    document = submitted(space, "wide", {"min": 1, "max": 2}, {"data": 2, "tensor": 1, "pipeline": 1})
    status = space.wait_finished("wide", seconds=420)
    assert status["state"] == "Succeeded", status
    first = status["adjustments"][0]
    assert (first["kind"], first["from"][:17], first["to"][:15]) == ("Resize", "2x1x1 on 2 nodes,", "1x1x1 on 1 node")
    assert first["outcome"] == "Kept"
    assert first["predictedSavingsUSD"] > 0
    assert first["realisedSavingsUSD"] > 0
    assert first["downtimeSeconds"] < 120
    assert status["plan"]["nodes"] == 1
    assert_exactly_once(space, "wide", document["spec"], status)
    closes(status)


def test_degrees_are_changed_under_living_pods(space: Space, slow_link: None) -> None:
    # summing all gradients over the slow link costs seconds a step, sending activations over it does not
    document = submitted(
        space,
        "wide-for-good",
        {"min": 2, "max": 2},
        {"data": 2, "tensor": 1, "pipeline": 1},
        trainer={"config": {"steps": 160}},
    )
    space.wait("wide-for-good", lambda s: s.get("state") == "Running", 120, "a running job")
    before = {pod["metadata"]["uid"] for pod in space.pods("wide-for-good")}
    status = space.wait_finished("wide-for-good", seconds=600)
    assert status["state"] == "Succeeded", status
    first = status["adjustments"][0]
    assert (first["kind"], first["from"][:17], first["to"][:17]) == (
        "Rebalance",
        "2x1x1 on 2 nodes,",
        "1x1x2 on 2 nodes,",
    )
    assert first["outcome"] == "Kept"
    assert first["realisedSavingsUSD"] > 0
    assert {pod["metadata"]["uid"] for pod in space.pods("wide-for-good")} == before, "the pods stay"
    assert status["plan"]["degrees"] == status["adjustments"][-1]["to"].split()[0]
    assert_exactly_once(space, "wide-for-good", document["spec"], status)
    closes(status)


def test_recommend_says_what_it_would_do_and_does_nothing(space: Space, slow_link: None) -> None:
    steps = {"config": {"steps": 100_000}}
    policy = {**QUICK, "policy": "Recommend"}
    degrees = {"data": 2, "tensor": 1, "pipeline": 1}
    submitted(space, "advised", {"min": 1, "max": 2}, degrees, trainer=steps, efficiency=policy)

    def recommended(status: dict[str, Any]) -> bool:
        found = [c for c in status.get("conditions", []) if c["type"] == "Adjusting"]
        return bool(found) and found[0]["reason"] == "Recommended"

    status = space.wait("advised", recommended, 180, "a recommendation")
    assert "1x1x1 on 1 node" in space.condition("advised", "Adjusting")["message"]
    assert status["plan"]["nodes"] == 2
    assert status["attempt"] == 1
    assert status.get("adjustments", []) == []
    # it would train on, beside whatever is tested next
    space.cluster.run("delete", "catj", "advised", "-n", space.name)
