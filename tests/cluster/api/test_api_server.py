"""What only a real API server has: a schema with defaults, pods of others on its nodes, and a network that fails.

What it shares with the store in memory is in `test_engines.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from devtools.cluster import LAST_WORKER, Space, manifest

from cost_aware_operator.api.job import JobKey, JobReference, TrainingJob
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.kubernetes.client import KubernetesCluster, connect
from cost_aware_operator.workload.usage import pod_use

pytestmark = pytest.mark.cluster


@pytest_asyncio.fixture
async def api(space: Space) -> AsyncIterator[KubernetesCluster]:
    client = await connect(space.cluster.kubeconfig)
    yield KubernetesCluster(client)
    await client.close()


async def read(api: KubernetesCluster, space: Space, name: str) -> JobReference:
    document = await api.training_job(JobKey(space.name, name))
    assert document is not None
    return TrainingJob.parse(document).reference


async def test_a_status_that_leaves_a_field_out_removes_it(api: KubernetesCluster, space: Space) -> None:
    space.submit(manifest("shrinking", managedBy="example.com/other"))
    await api.write_status(await read(api, space, "shrinking"), {"state": "Running", "attempt": 3})
    await api.write_status(await read(api, space, "shrinking"), {"state": "Running"})
    assert space.status("shrinking")["attempt"] == 0, "the schema's default"


async def test_a_server_that_cannot_be_reached_is_an_api_error_without_a_code(space: Space) -> None:
    client = await connect(space.cluster.kubeconfig)
    client.configuration.host = "https://127.0.0.1:1"
    with pytest.raises(ApiError) as raised:
        await KubernetesCluster(client).training_job(JobKey(space.name, "any"))
    await client.close()
    assert raised.value.status == 0


async def test_pods_of_all_namespaces_on_a_node_are_those_that_still_take_something_of_it(
    api: KubernetesCluster, space: Space
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
