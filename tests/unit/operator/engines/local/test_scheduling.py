"""The scheduler: all pods of a job or none, on nodes that they may have, in the order in which jobs came."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

from cost_aware_operator.engines.local.scheduling import schedule, sync_scheduling
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.views import pod_view

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Document = dict[str, Any]


def node(name: str, gpus: int = 1, **labels: str) -> Document:
    allocatable = {"cpu": "8", "memory": "16Gi", "pods": "110"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    metadata = {"name": name, "labels": {"node.kubernetes.io/instance-type": name.split("-")[0], **labels}}
    return {"kind": "Node", "metadata": metadata, "spec": {}, "status": {"allocatable": allocatable}}


def pod(job: str, index: int, at: int = 0, on: str = "", term: Document | None = None, **requests: str) -> Document:
    labels = {"costaware.dev/job": job}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    affinity: Document = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    if term:
        required = {"nodeSelectorTerms": [term]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    amounts = {name.replace("gpu", "nvidia.com/gpu"): amount for name, amount in requests.items()}
    spec: Document = {"affinity": affinity, "containers": [{"name": "c", "resources": {"requests": amounts}}]}
    metadata = {
        "name": f"{job}-{index}",
        "namespace": "team",
        "uid": f"{job}-{index}",
        "labels": labels,
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "creationTimestamp": f"2026-01-01T00:00:{at:02}Z",
        "ownerReferences": [{"uid": job, "kind": "Job", "name": job, "controller": True}],
    }
    return {"kind": "Pod", "metadata": metadata, "spec": spec | ({"nodeName": on} if on else {})}


def given(
    *documents: Document, nodes: int = 2, jobs: tuple[Document, ...] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    found = schedule(documents, [node(f"big-{n}") for n in range(nodes)], jobs)
    named = [{key.name: text for key, text in one.items()} for one in (found.nodes, found.waiting)]
    return named[0], named[1]


def test_each_pod_of_a_job_gets_a_node_of_its_own() -> None:
    nodes, waiting = given(pod("a", 0, cpu="1"), pod("a", 1, cpu="1"), nodes=11)
    assert (nodes, waiting) == ({"a-0": "big-0", "a-1": "big-1"}, {})


def test_a_job_starts_with_all_its_pods_or_waits() -> None:
    nodes, waiting = given(*(pod("a", i, gpu="1") for i in range(3)))
    assert nodes == {}
    assert waiting["a-2"] == "needs 3 nodes; 2 of 2 nodes are of its kind and large enough"


def test_who_waits_is_told_what_is_taken_by_whom() -> None:
    nodes, waiting = given(pod("a", 0, on="big-0", gpu="1"), pod("b", 0, 1, gpu="1"), pod("b", 1, 1, gpu="1"))
    assert nodes == {}
    assert waiting["b-0"] == "needs 2 nodes, 1 free; big-0: nvidia.com/gpu: 1 of 1 taken by team/a, 1 needed"


def test_first_come_first_served_and_a_node_is_kept_for_who_waits() -> None:
    nodes, waiting = given(
        pod("z", 0, 0, on="big-0", gpu="1"),
        pod("y", 0, 1, gpu="1"),
        pod("y", 1, 1, gpu="1"),
        pod("a", 0, 2, gpu="1"),
    )
    assert nodes == {}
    assert "kept for team/y, which came first" in waiting["a-0"]


def test_a_job_that_can_never_start_keeps_no_nodes() -> None:
    nodes, _ = given(*(pod("z", i, 0, gpu="1") for i in range(3)), pod("a", 0, 2, gpu="1"))
    assert nodes == {"a-0": "big-0"}


def test_two_jobs_share_a_node_that_has_room_for_both() -> None:
    nodes, _ = given(pod("a", 0, cpu="4"), pod("b", 0, 1, cpu="4"), pod("c", 0, 2, cpu="1"), nodes=1)
    assert nodes == {"a-0": "big-0", "b-0": "big-0"}


def test_a_device_that_no_node_has_is_never_found() -> None:
    found = schedule([pod("a", 0, gpu="1")], [node("big-0", gpus=0)])
    assert list(found.waiting.values()) == ["needs 1 node; 0 of 1 nodes are of its kind and large enough"]


def test_pods_go_where_their_affinity_lets_them() -> None:
    nodes = [node("small-0"), node("big-0"), node("big-1", **{"karpenter.sh/capacity-type": "spot"}), node("big-2")]
    term = {
        "matchExpressions": [
            {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["big"]},
            {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]},
        ],
        "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["big-0"]}],
    }
    assert list(schedule([pod("a", 0, term=term)], nodes).nodes.values()) == ["big-2"]


def test_a_cordoned_or_tainted_node_takes_no_pod_that_does_not_tolerate_it() -> None:
    cordoned, tainted = node("a-0"), node("b-0")
    cordoned["spec"] = {"unschedulable": True}
    tainted["spec"] = {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}
    tolerant = pod("a", 0)
    assert schedule([tolerant], [cordoned, tainted]).nodes == {}
    tolerant["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    assert list(schedule([tolerant], [cordoned, tainted]).nodes.values()) == ["b-0"]


def test_a_job_of_which_pods_are_still_missing_waits_for_them() -> None:
    job = {"kind": "Job", "metadata": {"uid": "a"}, "spec": {"completions": 2, "parallelism": 2}}
    nodes, waiting = given(pod("a", 0), jobs=(job,))
    assert (nodes, waiting) == ({}, {"a-0": "1 of 2 pods of the job are made"})


def test_what_was_decided_is_written_once_and_read_by_the_operator() -> None:
    uids = count(1)
    store = ObjectStore(lambda: NOW, lambda: f"uid-{next(uids)}")
    store.create(node("big-0"), "one")
    store.patch(ObjectKey("Node", "", "big-0"), {"status": node("big-0")["status"]}, "one", only_status=True)
    for name in ("a", "b"):
        store.create(pod(name, 0, gpu="1"), "one")
    for _ in range(2):
        assert sync_scheduling(store, NOW) == ()
        version = store.version
    assert sync_scheduling(store, NOW.replace(year=2027)) == ()
    assert store.version == version
    first, second = map(pod_view, store.list("Pod"))
    assert first is not None
    assert second is not None
    assert (first.node, first.scheduled_at) == ("big-0", NOW)
    assert second.problem.startswith(
        "Unschedulable: needs 1 node, 0 free; big-0: nvidia.com/gpu: 1 of 1 taken by team/a"
    )
