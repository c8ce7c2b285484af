"""The store in memory under the cases that hold for the real API server too, and what only it has: rules and a journal."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest
from tests.support.engine_cases import CASES, Case, config_map

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.engines.cluster import ApiError, ConflictError
from cost_aware_operator.engines.local.admission import Rules
from cost_aware_operator.engines.local.cluster import LocalCluster
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore


class StoreWorld:
    """A namespace of a store, in the hands of somebody else."""

    namespace = "team"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, document: dict[str, Any]) -> None:
        self._store.create(document, "somebody")

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        return self._store.get(ObjectKey(kind, self.namespace, name))

    def patch(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        self._store.patch(ObjectKey(kind, self.namespace, name), patch, "somebody")

    def remove(self, kind: str, name: str) -> None:
        self._store.delete(ObjectKey(kind, self.namespace, name))


@pytest.fixture
def store() -> ObjectStore:
    numbers = count(1)
    return ObjectStore(lambda: datetime(2026, 1, 1, tzinfo=UTC), lambda: f"uid-{next(numbers)}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_store_in_memory(case: Case, store: ObjectStore) -> None:
    await case(LocalCluster(store), StoreWorld(store))


def pod(node: str) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "team"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": node}}


KEY = ObjectKey("Pod", "team", "p")


def test_a_pod_on_a_node_gets_time_to_end_and_then_goes(store: ObjectStore) -> None:
    store.create(pod("node-0"), "somebody")
    store.delete(KEY)
    marked = store.get(KEY)
    assert marked is not None
    assert marked["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:30Z"
    store.delete(KEY)
    assert store.get(KEY) == marked
    store.delete(KEY, grace_seconds=0)
    assert store.get(KEY) is None


def test_a_pod_that_has_ended_goes_at_once(store: ObjectStore) -> None:
    store.create(pod("node-0"), "somebody")
    store.patch(KEY, {"status": {"phase": "Failed"}}, "kubelet", only_status=True)
    store.delete(KEY)
    assert store.get(KEY) is None


def test_a_status_is_written_by_its_own_call_only(store: ObjectStore) -> None:
    made = store.create({**pod("node-0"), "status": {"phase": "Failed"}}, "somebody")
    assert "status" not in made
    store.patch(KEY, {"status": {"phase": "Running"}, "spec": {"nodeName": "other"}}, "kubelet", only_status=True)
    store.patch(KEY, {"status": {"phase": "Failed"}, "metadata": {"labels": {"a": "b"}}}, "somebody")
    found = store.get(KEY)
    assert found is not None
    assert (found["status"], found["spec"], found["metadata"]["labels"]) == (
        {"phase": "Running"},
        {"nodeName": "node-0"},
        {"a": "b"},
    )


async def test_nodes_are_found_by_type_and_pods_on_them_while_they_take_something(store: ObjectStore) -> None:
    for name, kind in (("a", "small"), ("b", "large")):
        labels = {"node.kubernetes.io/instance-type": kind}
        store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}, "somebody")
    cluster = LocalCluster(store)
    assert [n["metadata"]["name"] for n in await cluster.nodes([]) or []] == ["a", "b"]
    assert [n["metadata"]["name"] for n in await cluster.nodes(["large"]) or []] == ["b"]
    store.create(pod("b"), "somebody")
    assert [p["metadata"]["name"] for p in await cluster.pods_on("b") or []] == ["p"]
    store.patch(KEY, {"status": {"phase": "Succeeded"}}, "kubelet", only_status=True)
    assert await cluster.pods_on("b") == []


@pytest.mark.parametrize("status", [403, 500])
async def test_what_may_not_be_read_of_nodes_is_unknown_and_other_refusals_are_errors(
    store: ObjectStore, status: int
) -> None:
    rules = Rules()
    store.admission.append(rules)
    for verb, kind in (("get", "Node"), ("list", "Node"), ("list", "Pod")):
        rules.refuse(verb, kind, ApiError(status, "no"))
    cluster = LocalCluster(store)
    for asked in (lambda: cluster.node("a"), lambda: cluster.nodes([]), lambda: cluster.pods_on("a")):
        if status == 403:
            assert await asked() is None
        else:
            with pytest.raises(ApiError):
                await asked()


async def test_a_refusal_holds_for_so_many_calls_and_is_in_the_journal(store: ObjectStore) -> None:
    rules = Rules()
    store.admission.append(rules)
    rules.refuse("create", "ConfigMap", ConflictError(409, "no"), times=1)
    cluster, world = LocalCluster(store), StoreWorld(store)
    with pytest.raises(ConflictError):
        await cluster.save_config_map(config_map(world, "a", "1"), None)
    await cluster.save_config_map(config_map(world, "a", "1"), None)
    assert [(w.request.verb, str(w.request.key), w.refused) for w in store.journal] == [
        ("create", "ConfigMap team/a", 409),
        ("create", "ConfigMap team/a", 0),
    ]
    assert [w.before for w in store.journal] == [None, None]
    assert store.journal[1].after is not None


async def test_what_somebody_else_writes_in_between_is_seen_by_the_write_that_it_came_before(
    store: ObjectStore,
) -> None:
    rules = Rules()
    store.admission.append(rules)
    cluster, world = LocalCluster(store), StoreWorld(store)
    version = await cluster.save_config_map(config_map(world, "a", "1"), None)
    rules.before("replace", "ConfigMap", lambda _: world.patch("ConfigMap", "a", {"data": {"record.json": "theirs"}}))
    with pytest.raises(ConflictError):
        await cluster.save_config_map(config_map(world, "a", "2"), version)
    stored = await cluster.config_map("team", "a")
    assert stored is not None
    assert stored.data["record.json"] == "theirs"


async def test_watchers_hear_of_every_write_in_order(store: ObjectStore) -> None:
    heard: list[str] = []
    store.watchers.append(lambda write: heard.append(write.request.verb))
    cluster, world = LocalCluster(store), StoreWorld(store)
    await cluster.save_config_map(config_map(world, "a", "1"), None)
    await cluster.delete("ConfigMap", JobKey("team", "a"), "uid-1")
    assert heard == ["create", "delete"]


def applied_by(store: ObjectStore, writer: str, **data: str) -> dict[str, Any]:
    metadata = {"name": "shared", "namespace": "team"}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return dict(store.apply(document, writer)["data"])


def test_a_field_that_two_apply_goes_when_both_have_left_it_out(store: ObjectStore) -> None:
    applied_by(store, "one", both="1", own="1")
    assert applied_by(store, "two", both="1") == {"both": "1", "own": "1"}
    assert applied_by(store, "one", own="1") == {"both": "1", "own": "1"}
    assert applied_by(store, "two", other="2") == {"own": "1", "other": "2"}


def test_a_field_belongs_to_whoever_gave_it_another_value_last(store: ObjectStore) -> None:
    applied_by(store, "one", a="1", b="1")
    assert applied_by(store, "two", a="2") == {"a": "2", "b": "1"}
    assert applied_by(store, "one", b="1") == {"a": "2", "b": "1"}
    store.patch(ObjectKey("ConfigMap", "team", "shared"), {"data": {"b": "3"}}, "one")
    assert applied_by(store, "one", c="1") == {"a": "2", "b": "3", "c": "1"}, "what one updated, its apply has not"
