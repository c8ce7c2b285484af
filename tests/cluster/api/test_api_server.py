"""The operator's writes against a real API server: fenced where two leaders could clash, harmless when repeated."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from devtools.cluster import LAST_WORKER, Space, manifest

from cost_aware_operator.adapters.kubernetes import ApiError, Cluster, ConflictError, connect
from cost_aware_operator.api.job import JobKey, TrainingJob
from cost_aware_operator.workload.usage import pod_use

pytestmark = [pytest.mark.cluster]


@pytest_asyncio.fixture
async def api(space: Space) -> AsyncIterator[Cluster]:
    client = await connect(space.cluster.kubeconfig)
    yield Cluster(client)
    await client.close()


def record(space: Space, name: str, text: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": space.name}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"record.json": text}}


async def test_a_second_leader_cannot_overwrite_what_it_has_not_read(api: Cluster, space: Space) -> None:
    version = await api.save_config_map(record(space, "fenced", "first"), None)
    with pytest.raises(ConflictError):
        await api.save_config_map(record(space, "fenced", "other"), None)
    newer = await api.save_config_map(record(space, "fenced", "second"), version)
    with pytest.raises(ConflictError):
        await api.save_config_map(record(space, "fenced", "stale"), version)
    stored = await api.config_map(space.name, "fenced")
    assert stored is not None
    assert (stored.data["record.json"], stored.resource_version) == ("second", newer)


async def read(api: Cluster, space: Space, name: str) -> TrainingJob:
    document = await api.training_job(JobKey(space.name, name))
    assert document is not None
    return TrainingJob.parse(document)


async def test_a_status_never_lands_on_a_changed_job_or_on_a_new_one_of_an_old_name(api: Cluster, space: Space) -> None:
    space.submit(manifest("reborn", managedBy="example.com/other"))
    old = await read(api, space, "reborn")
    space.patch("reborn", {"suspend": True})
    with pytest.raises(ConflictError):
        await api.write_status(old, {"state": "Failed"})
    space.cluster.run("delete", "catj", "reborn", "-n", space.name)
    with pytest.raises(ApiError):
        await api.write_status(old, {"state": "Failed"})
    space.submit(manifest("reborn", managedBy="example.com/other"))
    with pytest.raises(ConflictError):
        await api.write_status(old, {"state": "Failed"})
    assert "state" not in space.status("reborn")


async def test_a_status_that_leaves_a_field_out_removes_it(api: Cluster, space: Space) -> None:
    space.submit(manifest("shrinking", managedBy="example.com/other"))
    await api.write_status(await read(api, space, "shrinking"), {"state": "Running", "attempt": 3})
    await api.write_status(await read(api, space, "shrinking"), {"state": "Running"})
    assert space.status("shrinking")["attempt"] == 0, "the schema's default"


async def test_what_is_not_there_is_none_and_deleting_it_is_no_error(api: Cluster, space: Space) -> None:
    key = JobKey(space.name, "nothing")
    assert await api.training_job(key) is None
    assert await api.child_job(key) is None
    assert not await api.claim_exists(space.name, "nothing")
    await api.delete("Job", key, "00000000-0000-0000-0000-000000000000")


async def test_an_event_posted_twice_is_there_once(api: Cluster, space: Space) -> None:
    space.submit(manifest("told", managedBy="example.com/other"))
    job = await read(api, space, "told")
    for _ in range(2):
        await api.post_event(job, "Tested", "once", warning=False, at="2026-01-01T00:00:00Z", name="told.1")
    assert space.events("told") == ["Normal Tested: once"]


async def test_a_server_that_cannot_be_reached_is_an_api_error_without_a_code(space: Space) -> None:
    client = await connect(space.cluster.kubeconfig)
    client.configuration.host = "https://127.0.0.1:1"
    with pytest.raises(ApiError) as raised:
        await Cluster(client).training_job(JobKey(space.name, "any"))
    await client.close()
    assert raised.value.status == 0


async def test_pods_of_all_namespaces_on_a_node_are_those_that_still_take_something_of_it(
    api: Cluster, space: Space
) -> None:
    asked = {"requests": {"cpu": "30m", "memory": "16Mi"}}
    narrow = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    safe = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    image = {
        "securityContext": narrow,
        "image": "registry.k8s.io/pause:none",
        "imagePullPolicy": "Never",
        "resources": asked,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "neighbour"},
        "spec": {"nodeName": LAST_WORKER, "securityContext": safe, "containers": [{"name": "pause", **image}]},
    }
    space.cluster.run("apply", "-n", space.name, "-f", "-", stdin=json.dumps(pod))
    found = await api.pods_on(LAST_WORKER)
    assert found is not None
    assert {item["spec"]["nodeName"] for item in found} == {LAST_WORKER}
    (mine,) = (item for item in found if item["metadata"]["namespace"] == space.name)
    assert pod_use(mine).amounts == {"cpu": 0.03, "memory": 16 * 2**20, "pods": 1.0}
    assert any(item["metadata"]["namespace"] == "kube-system" for item in found)
    assert await api.pods_on("no-such-node") == []
