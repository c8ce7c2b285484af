"""A job's life: more ranks and the same losses, suspend and resume."""

from __future__ import annotations

import time
from typing import Any

import pytest
from devtools.cluster import Space, manifest
from tests.support.cluster.truth import assert_exactly_once

pytestmark = [pytest.mark.cluster]


DEGREES = {"data": (2, 1, 1), "tensor": (1, 2, 1), "pipeline": (1, 1, 2)}


def test_two_ranks_on_two_nodes_give_the_losses_of_one_rank_whatever_they_split(space: Space) -> None:
    two: dict[str, Any] = {"min": 2, "max": 2}
    for name, degrees in DEGREES.items():
        given = dict(zip(("data", "tensor", "pipeline"), degrees, strict=True))
        # a pipeline takes as many micro-batches as it has stages
        space.submit(manifest(name, nodes=two, parallelism=given, batch={"micro": 2}))
    space.submit(manifest("one"))
    ended = {name: space.wait_finished(name) for name in ("one", *DEGREES)}
    assert {name: s["state"] for name, s in ended.items()} == dict.fromkeys(ended, "Succeeded"), ended
    losses = {name: [e["loss"] for _, e in sorted(space.weights_made_by(name).items())] for name in ended}
    for name, (data, tensor, pipeline) in DEGREES.items():
        plan = ended[name]["plan"]
        assert (plan["data"], plan["tensor"], plan["pipeline"]) == (data, tensor, pipeline)
        assert len({p["spec"]["nodeName"] for p in space.pods(name)}) == 2
        assert len(losses[name]) == 30
        largest = max(abs(a - b) for a, b in zip(losses["one"], losses[name], strict=True))
        print(f"{name}: largest difference of a loss: {largest:.2e}")
        assert largest <= 1e-4
        assert ended[name]["progress"]["samplesChecksum"] == ended["one"]["progress"]["samplesChecksum"]


def test_suspending_checkpoints_and_resuming_goes_on_from_there(space: Space) -> None:
    spec = {"trainer": {"config": {"steps": 1200}}, "checkpoint": {"intervalSeconds": 3600}}
    document = manifest("pausing", **spec)
    space.submit(document)
    space.wait_step("pausing", 50)
    space.patch("pausing", {"suspend": True})
    space.wait("pausing", lambda s: s.get("state") == "Suspended" and not space.pods("pausing"), 90, "suspension")
    reached = max(space.weights_made_by("pausing"))
    assert reached >= 50
    spent = space.status("pausing")["cost"]["accruedUSD"]
    time.sleep(5)
    assert space.status("pausing")["cost"]["accruedUSD"] == spent, "a suspended job costs nothing"
    assert space.condition("pausing", "Suspended")["status"] == "True"
    # while suspended the nodes may be changed, and the run goes on under other degrees
    assert space.patch("pausing", {"nodes": {"min": 2, "max": 2}}).returncode == 0
    space.patch("pausing", {"suspend": False})
    status = space.wait_finished("pausing")
    assert status["state"] == "Succeeded", status
    assert status["plan"]["data"] == 2
    assert_exactly_once(space, "pausing", document["spec"], status)
    steps = [e["step"] for e in space.steps_log("pausing")]
    assert len(steps) == len(set(steps)) == 1200, "not one step was trained twice: the checkpoint was of the last one"
