"""What every engine's Cluster must do, as cases that each run against the real API server and against the store in memory."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest
from devtools.cluster import manifest

from cost_aware_operator.api.job import JobKey, JobReference
from cost_aware_operator.engines.cluster import ApiError, Cluster, ConflictError

Document = dict[str, Any]
KIND = "CostAwareTrainingJob"
NOBODY = "00000000-0000-0000-0000-000000000000"


class World(Protocol):
    """A namespace in the hands of somebody else than the operator."""

    namespace: str

    def put(self, document: Document) -> None:
        """Makes an object."""

    def read(self, kind: str, name: str) -> Document | None:
        """An object as it is."""

    def patch(self, kind: str, name: str, patch: Document) -> None:
        """A merge patch."""

    def remove(self, kind: str, name: str) -> None:
        """Deletes an object and waits until it is gone."""


Case = Callable[[Cluster, World], Awaitable[None]]


def config_map(world: World, name: str, text: str) -> Document:
    metadata = {"name": name, "namespace": world.namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"record.json": text}}


def training_job(world: World, name: str, **spec: Any) -> Document:
    document = manifest(name, managedBy="example.com/other", **spec)
    return {**document, "metadata": {"name": name, "namespace": world.namespace}}


def child_job(world: World, name: str, command: str = "true", **spec: Any) -> Document:
    narrow = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    safe = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {"name": "c", "image": "none:none", "command": [command], "securityContext": narrow}
    pods = {"spec": {"restartPolicy": "Never", "securityContext": safe, "containers": [container]}}
    fixed = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "suspend": True, "template": pods}
    metadata = {"name": name, "namespace": world.namespace, "labels": {"mine": "yes"}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**fixed, **spec}}


def found(world: World, kind: str, name: str) -> Document:
    document = world.read(kind, name)
    assert document is not None, f"{kind} {name} is gone"
    return document


async def reference(cluster: Cluster, world: World, name: str) -> JobReference:
    document = await cluster.training_job(JobKey(world.namespace, name))
    assert document is not None
    return JobReference.to(document)


async def gone(world: World, kind: str, name: str) -> None:
    until = time.monotonic() + 60
    while world.read(kind, name) is not None:
        assert time.monotonic() < until, f"{kind} {name} is still there"
        await asyncio.sleep(0.2)


async def a_config_map_is_saved_only_over_the_version_that_was_read(cluster: Cluster, world: World) -> None:
    version = await cluster.save_config_map(config_map(world, "fenced", "first"), None)
    with pytest.raises(ConflictError):
        await cluster.save_config_map(config_map(world, "fenced", "other"), None)
    newer = await cluster.save_config_map(config_map(world, "fenced", "second"), version)
    with pytest.raises(ConflictError):
        await cluster.save_config_map(config_map(world, "fenced", "stale"), version)
    stored = await cluster.config_map(world.namespace, "fenced")
    assert stored is not None
    assert (stored.data["record.json"], stored.resource_version) == ("second", newer)
    world.remove("ConfigMap", "fenced")
    with pytest.raises(ApiError):
        await cluster.save_config_map(config_map(world, "fenced", "reborn"), newer)


async def a_write_that_changes_nothing_makes_no_version(cluster: Cluster, world: World) -> None:
    version = await cluster.save_config_map(config_map(world, "same", "text"), None)
    assert await cluster.save_config_map(config_map(world, "same", "text"), version) == version
    first, again = await cluster.apply(child_job(world, "same")), await cluster.apply(child_job(world, "same"))
    assert first["metadata"]["generation"] == again["metadata"]["generation"] == 1
    # a Job's controller may write its status in between; nobody writes a Secret
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "same-token", "namespace": world.namespace},
        "stringData": {"token": "text"},
    }
    first, again = await cluster.apply(secret), await cluster.apply(secret)
    assert first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]


async def a_status_lands_on_the_version_that_was_read_and_on_no_other(cluster: Cluster, world: World) -> None:
    world.put(training_job(world, "reborn"))
    old = await reference(cluster, world, "reborn")
    world.patch(KIND, "reborn", {"spec": {"suspend": True}})
    with pytest.raises(ConflictError):
        await cluster.write_status(old, {"state": "Failed"})
    world.remove(KIND, "reborn")
    with pytest.raises(ApiError):
        await cluster.write_status(old, {"state": "Failed"})
    world.put(training_job(world, "reborn"))
    with pytest.raises(ConflictError):
        await cluster.write_status(old, {"state": "Failed"})
    assert "state" not in found(world, KIND, "reborn").get("status", {})


async def a_status_that_leaves_a_field_out_removes_it(cluster: Cluster, world: World) -> None:
    world.put(training_job(world, "shrinking"))
    written = {"state": "Running", "startTime": "2026-01-01T00:00:00Z", "goodput": {"idle": 1.0, "restart": 0.5}}
    await cluster.write_status(await reference(cluster, world, "shrinking"), written)
    assert found(world, KIND, "shrinking")["status"]["startTime"] == "2026-01-01T00:00:00Z"
    await cluster.write_status(await reference(cluster, world, "shrinking"), {"state": "Running"})
    left = found(world, KIND, "shrinking")["status"]
    assert left["state"] == "Running"
    assert left.keys().isdisjoint({"startTime", "goodput"})


async def a_generation_counts_changes_of_the_spec_and_not_of_the_status(cluster: Cluster, world: World) -> None:
    world.put(training_job(world, "counted"))
    before = await reference(cluster, world, "counted")
    await cluster.write_status(before, {"state": "Running"})
    after = await reference(cluster, world, "counted")
    assert found(world, KIND, "counted")["metadata"]["generation"] == 1
    assert after.resource_version != before.resource_version
    await cluster.write_status(after, {"state": "Running"})
    assert await reference(cluster, world, "counted") == after
    world.patch(KIND, "counted", {"spec": {"suspend": True}})
    assert found(world, KIND, "counted")["metadata"]["generation"] == 2
    assert found(world, KIND, "counted")["status"]["state"] == "Running"


async def an_apply_removes_what_it_wrote_before_and_keeps_what_others_wrote(cluster: Cluster, world: World) -> None:
    first = child_job(world, "shared", activeDeadlineSeconds=600)
    first["metadata"]["annotations"] = {"ours": "1", "ours-too": "2"}
    made = await cluster.apply(first)
    world.patch("Job", "shared", {"metadata": {"annotations": {"theirs": "3"}}})
    second = child_job(world, "shared")
    second["metadata"]["annotations"] = {"ours": "4"}
    after = await cluster.apply(second)
    annotations = {n: v for n, v in after["metadata"]["annotations"].items() if "our" in n or "their" in n}
    assert annotations == {"ours": "4", "theirs": "3"}
    assert "activeDeadlineSeconds" not in after["spec"]
    assert after["metadata"]["uid"] == made["metadata"]["uid"]


async def a_job_is_suspended_and_grows_but_keeps_its_pods_template(cluster: Cluster, world: World) -> None:
    key = JobKey(world.namespace, "grown")
    await cluster.apply(child_job(world, "grown"))
    await cluster.set_job(key, suspend=True, active_deadline_seconds=900, completions=3)
    document = found(world, "Job", "grown")
    spec = document["spec"]
    assert document["metadata"]["annotations"]["costaware.dev/asked-to-suspend"] == "true"
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (3, 3, 900)
    await cluster.set_job(key, suspend=True, active_deadline_seconds=None, completions=None)
    spec = found(world, "Job", "grown")["spec"]
    assert spec["completions"] == 3
    assert "activeDeadlineSeconds" not in spec
    with pytest.raises(ApiError) as raised:
        await cluster.apply(child_job(world, "grown", "false"))
    assert raised.value.status == 422
    nobody_s = JobKey(world.namespace, "no-such-job")
    with pytest.raises(ApiError) as raised:
        await cluster.set_job(nobody_s, suspend=True, active_deadline_seconds=None, completions=None)
    assert raised.value.status == 404


async def a_secret_s_text_is_stored_as_data(cluster: Cluster, world: World) -> None:
    metadata = {"name": "told", "namespace": world.namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
    assert await cluster.create_secret({**secret, "immutable": True, "stringData": {"token": "first"}})
    document = found(world, "Secret", "told")
    assert base64.b64decode(document["data"]["token"]) == b"first"
    assert "stringData" not in document


async def a_secret_of_a_taken_name_is_left_alone(cluster: Cluster, world: World) -> None:
    metadata = {"name": "github-token", "namespace": world.namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
    world.put({**secret, "stringData": {"token": "theirs"}})
    before = found(world, "Secret", "github-token")
    assert not await cluster.create_secret({**secret, "stringData": {"token": "ours"}})
    assert found(world, "Secret", "github-token") == before


async def what_is_owned_goes_with_its_owner_and_only_the_one_that_is_meant_is_deleted(
    cluster: Cluster, world: World
) -> None:
    world.put(training_job(world, "owner"))
    key, owner = JobKey(world.namespace, "owner"), await reference(cluster, world, "owner")
    owned = {"apiVersion": "costaware.dev/v1alpha1", "kind": KIND, "name": "owner", "uid": owner.uid}
    child = child_job(world, "owner")
    child["metadata"]["ownerReferences"] = [owned]
    job = await cluster.apply(child)
    record = config_map(world, "owned", "text")
    reference_to_job = {"apiVersion": "batch/v1", "kind": "Job", "name": "owner", "uid": job["metadata"]["uid"]}
    record["metadata"]["ownerReferences"] = [reference_to_job]
    await cluster.save_config_map(record, None)
    await cluster.save_config_map(config_map(world, "not-owned", "text"), None)
    stored = await cluster.config_map(world.namespace, "owned")
    assert stored is not None
    assert stored.owner_uids == {job["metadata"]["uid"]}
    await cluster.delete(KIND, key, NOBODY)
    assert await reference(cluster, world, "owner") == owner
    await cluster.delete(KIND, key, owner.uid)
    await gone(world, KIND, "owner")
    await gone(world, "Job", "owner")
    await gone(world, "ConfigMap", "owned")
    assert await cluster.config_map(world.namespace, "not-owned") is not None
    await cluster.delete(KIND, key, owner.uid)


async def what_is_not_there_is_none(cluster: Cluster, world: World) -> None:
    key = JobKey(world.namespace, "nothing")
    assert await cluster.training_job(key) is None
    assert await cluster.child_job(key) is None
    assert await cluster.config_map(key.namespace, key.name) is None
    assert await cluster.service_owners(key) is None
    assert await cluster.node("no-such-node") is None
    assert await cluster.pods_on("no-such-node") == []
    assert await cluster.pods(key.namespace, {"of": "nobody"}) == []
    assert not await cluster.claim_exists(key.namespace, key.name)
    assert key.name not in {d["metadata"]["name"] for d in await cluster.training_jobs([key.namespace])}
    await cluster.delete("Job", key, NOBODY)


async def a_job_is_listed_in_its_namespace_and_in_all(cluster: Cluster, world: World) -> None:
    world.put(training_job(world, "listed"))
    for namespaces in ([world.namespace], []):
        names = [(d["metadata"]["namespace"], d["metadata"]["name"]) for d in await cluster.training_jobs(namespaces)]
        assert names.count((world.namespace, "listed")) == 1


async def config_maps_are_found_by_labels(cluster: Cluster, world: World) -> None:
    for name, state in (("bill-1", "open"), ("bill-2", "closed")):
        document = config_map(world, name, "text")
        document["metadata"]["labels"] = {"costaware.dev/bill": state, "costaware.dev/job": "gpt"}
        await cluster.save_config_map(document, None)
    found = await cluster.config_maps(world.namespace, {"costaware.dev/bill": "open", "costaware.dev/job": "gpt"})
    assert [one["metadata"]["name"] for one in found] == ["bill-1"]
    assert found[0]["data"] == {"record.json": "text"}
    await cluster.delete("ConfigMap", JobKey(world.namespace, "bill-1"), found[0]["metadata"]["uid"])
    assert await cluster.config_maps(world.namespace, {"costaware.dev/bill": "open"}) == []


async def a_service_tells_its_owners(cluster: Cluster, world: World) -> None:
    metadata = {"name": "taken", "namespace": world.namespace}
    ports = [{"port": 80, "protocol": "TCP"}]
    world.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}})
    assert await cluster.service_owners(JobKey(world.namespace, "taken")) == frozenset()


async def an_event_posted_twice_is_there_once(cluster: Cluster, world: World) -> None:
    world.put(training_job(world, "told"))
    job = await reference(cluster, world, "told")
    for message in ("first", "second"):
        await cluster.post_event(job, "Tested", message, warning=False, at="2026-01-01T00:00:00Z", name="told.1")
    event = found(world, "Event", "told.1")
    assert (event["message"], event["involvedObject"]["uid"], event["count"]) == ("first", job.uid, 1)


async def pods_are_found_by_labels_and_only_the_one_that_is_meant_is_evicted(cluster: Cluster, world: World) -> None:
    spec = child_job(world, "any")["spec"]["template"]["spec"]
    metadata = {"name": "lonely", "namespace": world.namespace, "labels": {"of": "lonely", "more": "yes"}}
    world.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, "schedulerName": "nobody"}})
    (pod,) = await cluster.pods(world.namespace, {"of": "lonely"})
    assert await cluster.pods(world.namespace, {"of": "lonely", "more": "no"}) == []
    await cluster.evict(world.namespace, "lonely", NOBODY)
    assert world.read("Pod", "lonely") is not None
    await cluster.evict(world.namespace, "lonely", pod["metadata"]["uid"])
    await gone(world, "Pod", "lonely")
    await cluster.evict(world.namespace, "lonely", pod["metadata"]["uid"])


async def a_secret_value_is_made_once(cluster: Cluster, world: World) -> None:
    first = base64.b64encode(b"first").decode()
    other = base64.b64encode(b"other").decode()
    assert await cluster.own_secret(world.namespace, "key", {"key": first}) == {"key": first}
    assert await cluster.own_secret(world.namespace, "key", {"key": other}) == {"key": first}


async def a_lease_is_given_up_by_its_holder_only(cluster: Cluster, world: World) -> None:
    metadata = {"name": "lead", "namespace": world.namespace}
    spec = {"holderIdentity": "me", "leaseTransitions": 3, "leaseDurationSeconds": 15}
    world.put({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec})
    await cluster.release_lease(world.namespace, "lead", "other")
    assert found(world, "Lease", "lead")["spec"]["holderIdentity"] == "me"
    await cluster.release_lease(world.namespace, "lead", "me")
    assert found(world, "Lease", "lead")["spec"] == {"leaseTransitions": 3}


CASES: list[Case] = [
    a_config_map_is_saved_only_over_the_version_that_was_read,
    a_write_that_changes_nothing_makes_no_version,
    a_status_lands_on_the_version_that_was_read_and_on_no_other,
    a_status_that_leaves_a_field_out_removes_it,
    a_generation_counts_changes_of_the_spec_and_not_of_the_status,
    an_apply_removes_what_it_wrote_before_and_keeps_what_others_wrote,
    a_job_is_suspended_and_grows_but_keeps_its_pods_template,
    a_secret_s_text_is_stored_as_data,
    a_secret_of_a_taken_name_is_left_alone,
    what_is_owned_goes_with_its_owner_and_only_the_one_that_is_meant_is_deleted,
    what_is_not_there_is_none,
    a_job_is_listed_in_its_namespace_and_in_all,
    config_maps_are_found_by_labels,
    a_service_tells_its_owners,
    an_event_posted_twice_is_there_once,
    pods_are_found_by_labels_and_only_the_one_that_is_meant_is_evicted,
    a_secret_value_is_made_once,
    a_lease_is_given_up_by_its_holder_only,
]
