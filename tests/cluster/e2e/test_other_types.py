"""The price of another type of nodes falls while a run is under way: it goes on there, and what it pays is what its nodes cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest
from devtools.cluster import LAST_WORKER, OPERATOR_NAMESPACE, PRICE_USD_PER_HOUR, Space
from tests.support.cluster.adjusted import QUICK, closes, submitted
from tests.support.cluster.pod_lives import PodLives
from tests.support.cluster.truth import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.exhaustive]
OTHER = "g4dn.xlarge"
DEAR_USD, CHEAP_USD = 9.0, 0.5
TYPE_LABEL = "node.kubernetes.io/instance-type"


@pytest.fixture
def priced(space: Space) -> Iterator[Callable[[float], None]]:
    """The last worker is of another type, at a price that can be set; both are as before in the end."""
    run = space.cluster.run
    (book,) = (
        item
        for item in space.cluster.get("configmaps", "-n", OPERATOR_NAMESPACE)["items"]
        if item["metadata"]["name"].endswith("-prices")
    )
    name, before = book["metadata"]["name"], book["data"]["prices.json"]
    before_type = space.cluster.get("node", LAST_WORKER)["metadata"]["labels"][TYPE_LABEL]

    def write(text: str) -> None:
        body = json.dumps({"data": {"prices.json": text}})
        run("patch", "configmap", name, "-n", OPERATOR_NAMESPACE, "--type=merge", "-p", body)
        space.cluster.wait_for_operator()
        (pod,) = space.cluster.operator_pods()
        # a pod that changes has its files brought up to date at once, not within a minute
        run("annotate", "pod", pod, "-n", OPERATOR_NAMESPACE, f"test/prices={time.time_ns()}", "--overwrite")
        until = time.monotonic() + 120
        while run("exec", pod, "-n", OPERATOR_NAMESPACE, "--", "cat", "/etc/catj/prices/prices.json").stdout != text:
            assert time.monotonic() < until, "the operator's prices are not what was written"
            time.sleep(1)

    def price(hourly_usd: float) -> None:
        row = {"instanceType": OTHER, "hourlyUSD": hourly_usd, "asOf": "2026-11-22", "source": "a test"}
        write(json.dumps([row]))

    run("label", "node", LAST_WORKER, f"{TYPE_LABEL}={OTHER}", "--overwrite")
    try:
        yield price
    finally:
        run("label", "node", LAST_WORKER, f"{TYPE_LABEL}={before_type}", "--overwrite")
        write(before)


def test_a_run_moves_to_another_type_of_nodes_when_that_becomes_cheaper_and_pays_its_price(
    space: Space, priced: Callable[[float], None]
) -> None:
    priced(DEAR_USD)
    with PodLives(space, "mover") as lives:
        document = submitted(
            space,
            "mover",
            {"min": 1, "max": 1, "instanceTypes": ["p3.2xlarge", OTHER]},
            {"data": 1, "tensor": 1, "pipeline": 1},
            # a change of pods is reckoned with a minute: what is left after it must be worth several, however fast the machine
            trainer={"config": {"steps": 2000}},
            # one rank loses next to nothing, and is looked at all the same
            efficiency={**QUICK, "threshold": 1.0},
        )
        before = space.wait_step("mover", 50, 240)
        assert before["plan"]["instanceTypes"] == ["p3.2xlarge"]
        assert before.get("adjustments", []) == []
        priced(CHEAP_USD)
        status = space.wait_finished("mover", 600)
        time.sleep(1)
    assert status["state"] == "Succeeded", status
    first = status["adjustments"][0]
    assert first["kind"] == "Move", first
    assert OTHER in first["to"]
    assert first["outcome"] == "Kept", first
    assert first["realisedSavingsUSD"] > 0
    assert len(status["adjustments"]) == 1
    assert status["plan"]["instanceTypes"] == [OTHER]
    assert_exactly_once(space, "mover", document["spec"], status)
    closes(status)
    hourly_usd = {LAST_WORKER: CHEAP_USD}
    seconds = lives.seconds_by_node()
    usd = sum(s * hourly_usd.get(n, PRICE_USD_PER_HOUR) / 3600 for n, s in seconds.items())
    said = f"{status['cost']['podSeconds']} pod-seconds, {seconds} were watched: {lives.lives}"
    assert status["cost"]["accruedUSD"] == pytest.approx(usd, rel=0.01), said
