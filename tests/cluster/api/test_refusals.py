"""What only the operator can know: each ends in a condition that says what to write instead, and none starts a pod."""

from __future__ import annotations

from typing import Any

import pytest
from devtools.cluster import Space, manifest

pytestmark = pytest.mark.cluster


def refused(space: Space, name: str, reason: str, *, without_pods: bool = False, **spec: Any) -> str:
    space.submit(manifest(name, **spec))
    status = space.wait(name, lambda s: s.get("state") == "Rejected", 30, "rejection")
    planned = next(c for c in status["conditions"] if c["type"] == "Planned")
    assert (planned["status"], planned["reason"]) == ("False", reason)
    allowed = {"ConfigMap", "Secret", "Service"} if without_pods else {"ConfigMap"}
    assert set(space.children(name)) <= allowed, "no Job, no pod"
    # events follow the status, and only when that was written
    space.wait_until(
        lambda: any(e.startswith(f"Warning {reason}") for e in space.events(name)), 30, "event that says so too"
    )
    assert status["message"] == planned["message"][:1024]
    return str(planned["message"])


def test_an_unknown_instance_type(space: Space) -> None:
    message = refused(space, "unknown-type", "UnknownInstanceType", nodes={"instanceTypes": ["p3.2xlrge"]})
    assert "spec.nodes.instanceTypes[0]" in message
    assert "did you mean p3.2xlarge" in message
    assert space.condition("unknown-type", "PriceKnown")["status"] == "False"


def test_a_model_that_cannot_fit(space: Space) -> None:
    message = refused(space, "too-large", "MemoryExceeded", model={"hidden": 8192, "layers": 48, "ffn": 28672})
    assert "spec.model" in message
    assert "spec.template.resources.limits.memory" in message
    assert "raise the limit to" in message


def test_a_batch_that_no_node_count_divides(space: Space) -> None:
    degrees = {"tensor": 1, "pipeline": 1}
    nodes = {"min": 2, "max": 2}
    message = refused(space, "indivisible", "BatchNotDivisible", batch={"global": 7}, nodes=nodes, parallelism=degrees)
    assert "spec.batch.global" in message
    assert "write 8" in message


def test_a_checkpoint_volume_that_is_missing_and_then_appears(space: Space) -> None:
    message = refused(space, "no-volume", "VolumeMissing", checkpoint={"volume": "nowhere"})
    assert "spec.checkpoint.volume" in message
    assert "create it" in message
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "nowhere"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    space.submit(claim)
    space.wait("no-volume", lambda s: s.get("state") == "Starting", 40, "start after the volume appeared")
    space.cluster.run("delete", "catj", "no-volume", "-n", space.name)


def test_a_data_volume_that_is_missing(space: Space) -> None:
    data = {"config": {"data": {"volume": "nodata"}}}
    assert "spec.trainer.config.data.volume" in refused(space, "no-data", "VolumeMissing", trainer=data)


def test_an_image_that_does_not_exist_waits_and_fails_after_the_stated_time(space: Space) -> None:
    template = {"image": "cost-aware-trainer:no-such-tag", "imagePullPolicy": "Never"}
    space.submit(manifest("no-image", template=template, startupDeadlineSeconds=12))
    waiting = space.wait("no-image", lambda s: "ErrImageNeverPull" in s.get("message", ""), 30, "waiting for the image")
    assert waiting["state"] == "Starting"
    assert "the job fails if this lasts until" in waiting["message"]
    assert space.condition("no-image", "Running")["reason"] == "ImagePullFailing"
    status = space.wait_finished("no-image", 60)
    failed = space.condition("no-image", "Failed")
    assert status["state"] == "Failed"
    assert failed["reason"] == "StartupDeadlineExceeded"
    assert "spec.template.image" in failed["message"]
    space.wait("no-image", lambda _: not space.pods("no-image"), 90, "removal of the pods")


def test_pods_that_the_api_server_refuses(space: Space) -> None:
    template = {"volumes": [{"name": "x", "configMap": {"nmae": "typo"}}]}
    message = refused(space, "bad-volume", "PodsRefused", template=template, without_pods=True)
    assert "spec.template" in message
    assert "nmae" in message


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "Job"])
def test_what_belongs_to_somebody_else_is_left_as_it_is(space: Space, kind: str) -> None:
    name = f"taken-{kind.lower()}"
    container = {"name": "c", "image": "cost-aware-trainer:dev", "command": ["true"]}
    pods = {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}, "suspend": True}
    foreign: dict[str, Any] = {
        "Service": {"apiVersion": "v1", "spec": {"ports": [{"port": 80}], "selector": {"app": "web"}}},
        "ConfigMap": {"apiVersion": "v1", "data": {"mine": "yes"}},
        "Job": {"apiVersion": "batch/v1", "spec": pods},
    }[kind]
    named = f"{name}-run" if kind == "ConfigMap" else name
    space.submit({"kind": kind, "metadata": {"name": named}} | foreign)
    before = space.cluster.get(kind, named, "-n", space.name)
    message = refused(space, name, "NameTaken", without_pods=True)
    assert f"a {kind} '{named}'" in message
    after = space.cluster.get(kind, named, "-n", space.name)
    assert (after.get("spec"), after.get("data")) == (before.get("spec"), before.get("data"))
    assert "ownerReferences" not in after["metadata"]
    space.cluster.run("delete", kind, named, "-n", space.name)
    space.wait(
        name, lambda s: s.get("state") in ("Starting", "Running", "Restarting"), 90, "start once the name is free"
    )
    space.cluster.run("delete", "catj", name, "-n", space.name)


def test_a_job_named_github_leaves_github_token_alone(space: Space) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "github-token"},
        "stringData": {"token": "theirs"},
    }
    space.submit(secret)
    before = space.cluster.get("Secret", "github-token", "-n", space.name)
    space.submit(manifest("github"))
    space.wait("github", lambda s: s.get("state") in ("Starting", "Running", "Restarting"), 60, "start")
    space.wait_until(lambda: space.pods("github"), 60, "pod")
    assert space.cluster.get("Secret", "github-token", "-n", space.name) == before
    uid = space.cluster.get("catj", "github", "-n", space.name)["metadata"]["uid"]
    job = space.cluster.get("Job", "github", "-n", space.name)
    assert job["metadata"]["annotations"]["costaware.dev/token-secret"].startswith(f"catj-{uid}-")
    space.cluster.run("delete", "catj", "github", "-n", space.name)
    space.wait_until(lambda: space.children("github") == [], 90, "end of the children of github")
    assert space.cluster.get("Secret", "github-token", "-n", space.name)["data"] == before["data"]
