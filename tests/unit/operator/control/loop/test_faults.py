"""What nobody foresaw ends in a condition, with the books kept, and not in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.reconciling import KEY, World, read, steps_of

from cost_aware_operator.control.loop import reconcile as module
from cost_aware_operator.engines.local.store import ObjectKey

GOLDEN = Path(__file__).parent / "golden"
JOB = ObjectKey("CostAwareTrainingJob", KEY.namespace, KEY.name)
CHILD = ObjectKey("Job", KEY.namespace, KEY.name)


async def world() -> World:
    """A job that trains."""
    made = World(read(GOLDEN / "bases.yaml"))
    for step, _ in steps_of(GOLDEN / "training"):
        await made.step(step)
    return made


def planned(made: World) -> dict[str, Any]:
    document = made.store.get(JOB)
    assert document is not None
    return next(c for c in document["status"]["conditions"] if c["type"] == "Planned")


def spent(made: World) -> float:
    (document,) = made.store.list("ConfigMap", "operators")
    bill = json.loads(document["data"]["bill.json"])
    return sum(bill["ledger"]["usd"].values())


async def test_an_error_of_the_operator_s_own_is_told_and_the_books_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await world()
    before = spent(made)

    def breaks(_: object) -> None:
        raise KeyError("DB_PASSWORD=hunter2")

    with monkeypatch.context() as patched:
        patched.setattr(module, "decide", breaks)
        for _ in range(2):
            with pytest.raises(KeyError):
                await made.step({"advance": 10})
    assert (planned(made)["reason"], planned(made)["status"]) == ("OperatorFault", "False")
    assert "hunter2" not in planned(made)["message"]
    assert "KeyError" in planned(made)["message"]
    assert spent(made) > before
    await made.step({"advance": 10})
    assert planned(made)["status"] == "True"


async def test_a_job_that_cannot_be_read_is_ended_when_its_budget_is_spent() -> None:
    made = await world()
    made.store.patch(JOB, {"spec": {"budget": {"totalUSD": 0.10}}}, "somebody")
    await made.step({"advance": 5})
    made.store.patch(JOB, {"spec": {"nodes": {"ofTomorrow": 1}}}, "somebody")
    await made.step({"advance": 5})
    child = made.store.get(CHILD)
    assert child is not None
    assert not child["spec"]["suspend"]
    await made.step({"advance": 60})
    child = made.store.get(CHILD)
    assert child is not None
    assert child["spec"]["suspend"]
    assert planned(made)["reason"] == "ManifestUnreadable"


async def test_a_pod_s_index_that_is_no_number_is_no_pod_of_the_job() -> None:
    made = await world()
    key = ObjectKey("Pod", KEY.namespace, "gpt-0-a")
    made.store.patch(key, {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "x"}}}, "somebody")
    done = await made.step({"advance": 5})
    assert done["again_seconds"] is not None
