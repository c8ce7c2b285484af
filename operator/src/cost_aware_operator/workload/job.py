"""The Indexed Job of a training job: one pod a node. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.api.spec import CapacityType
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.names import (
    CHECKPOINT_MOUNT,
    LABEL_UID,
    checkpoint_folder,
    child_metadata,
    labels,
)
from cost_aware_operator.workload.node_labels import INSTANCE_TYPE_LABELS, SPOT_LABELS
from cost_aware_operator.workload.secret import TokenSecret
from cost_aware_trainer.contract import (
    AGENT_PORT,
    ENV_ENDS_FOLDER,
    ENV_JOB,
    ENV_NAMESPACE,
    ENV_NODE,
    ENV_POD_UID,
    ENV_PRELOAD,
    METRICS_PORT,
    RUN_FOLDER,
    TOKEN_FILE,
)

GRACE_SECONDS = 60
"""From SIGTERM to SIGKILL: enough for the ranks to end their step and write a checkpoint."""
DATA_MOUNT = "/data"
ENDS_FOLDER = "pods"
"""In a run's own folder: when its pods ended, for whoever did not see it."""
ANNOTATION_TEMPLATE = "costaware.dev/template-hash"
ANNOTATION_SECRET = "costaware.dev/token-secret"  # noqa: S105  a name, not a secret
"""On the Job: the Secret that its pods mount."""
ANNOTATION_KEY = "costaware.dev/token-key"
"""On the Job: version of the operator's key that the token in it is derived from."""
ANNOTATION_ASKED = "costaware.dev/asked-to-suspend"
"""On the Job: whether the operator has asked for its suspension. A Job that is suspended without that was suspended by others."""
NEVER_GIVE_UP = 1_000_000
"""The Job's own backoff limit. Whether a run is given up is the operator's decision, which knows whether it progressed."""


def template_hash(job: TrainingJob, plan: Plan) -> str:
    """Hash that changes when the pods must be made again. An upgrade of the operator alone does not change it, nor does their number.

    Of `checkpoint`, volume and folder cannot change, and the rest comes with the next order. Fields at their defaults do not
    count: a later version's new field must not make every running job's pods anew.
    """
    parts = job.spec.model_dump(mode="json", include={"template", "nodes", "trainer"}, exclude_defaults=True)
    made = [parts, plan.ranks_per_node, plan.instance_types, *([plan.excluded_nodes] if plan.excluded_nodes else [])]
    text = json.dumps(made, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def indexed_job(
    job: TrainingJob, plan: Plan, defaults: PodDefaults, token: TokenSecret, *, suspend: bool
) -> dict[str, Any]:
    """One pod a node, kept at that number by the Job controller, which never runs two pods of one index."""
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": plan.nodes,
        "parallelism": plan.nodes,
        "backoffLimit": NEVER_GIVE_UP,
        "podReplacementPolicy": "Failed",
        "suspend": suspend,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": _pod_template(job, plan, defaults, token.name),
    }
    if job.spec.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = job.spec.active_deadline_seconds
    metadata = child_metadata(job, job.key.name)
    metadata["labels"] = {**job.spec.template.labels, **metadata["labels"]}
    metadata["annotations"] = {
        ANNOTATION_TEMPLATE: template_hash(job, plan),
        ANNOTATION_SECRET: token.name,
        ANNOTATION_KEY: str(token.key_version),
        ANNOTATION_ASKED: asked_to_suspend(suspend),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def asked_to_suspend(suspend: bool) -> str:
    """The annotation's text."""
    return "true" if suspend else "false"


def _pod_template(job: TrainingJob, plan: Plan, defaults: PodDefaults, secret: str) -> dict[str, Any]:
    template = job.spec.template
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": job.key.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": _affinity(job, plan),
        "containers": [_container(job, plan, defaults)],
        "volumes": _by_name(defaults.volumes, template.volumes, _own_volumes(job, secret)),
    }
    if template.tolerations:
        spec["tolerations"] = list(template.tolerations)
    if template.node_selector:
        spec["nodeSelector"] = dict(template.node_selector)
    if template.priority_class_name:
        spec["priorityClassName"] = template.priority_class_name
    if template.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in template.image_pull_secrets]
    return {
        "metadata": {
            "labels": {**template.labels, **labels(job.key.name), LABEL_UID: job.uid},
            "annotations": dict(template.annotations),
        },
        "spec": spec,
    }


def _container(job: TrainingJob, plan: Plan, defaults: PodDefaults) -> dict[str, Any]:
    template = job.spec.template
    own_environment: tuple[dict[str, Any], ...] = (
        {"name": ENV_JOB, "value": job.key.name},
        {"name": ENV_NAMESPACE, "value": job.key.namespace},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": ENV_POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": ENV_ENDS_FOLDER, "value": f"{checkpoint_folder(job)}/{ENDS_FOLDER}"},
        {"name": ENV_NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    )
    if job.spec.trainer.config is not None:
        own_environment += ({"name": ENV_PRELOAD, "value": "1"},)
    container: dict[str, Any] = {
        "name": "trainer",
        "image": template.image or defaults.image,
        "command": ["python3", "-m", "cost_aware_trainer.agent"],
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}]
        + [{"name": f"metrics-{r}", "containerPort": METRICS_PORT + r} for r in range(plan.ranks_per_node)],
        "env": _by_name(defaults.env, template.env, own_environment),
        "volumeMounts": _by_name(defaults.volume_mounts, template.volume_mounts, _own_mounts(job), key="mountPath"),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pull_policy = template.image_pull_policy or (None if template.image else defaults.image_pull_policy)
    if pull_policy is not None:
        container["imagePullPolicy"] = pull_policy
    resources = template.resources or defaults.resources
    if resources:
        container["resources"] = resources
    return container


def _own_volumes(job: TrainingJob, secret: str) -> tuple[dict[str, Any], ...]:
    volumes: list[dict[str, Any]] = [
        {
            "name": "catj-token",
            "projected": {"sources": [{"secret": {"name": secret, "items": [{"key": "token", "path": "token"}]}}]},
        },
        {"name": "catj-run", "emptyDir": {}},
        {"name": "catj-tmp", "emptyDir": {}},
        {"name": "catj-shm", "emptyDir": {"medium": "Memory"}},
        {"name": "catj-checkpoints", "persistentVolumeClaim": {"claimName": job.spec.checkpoint.volume}},
    ]
    if job.spec.trainer.config is not None:
        claim = {"claimName": job.spec.trainer.config.data.volume, "readOnly": True}
        volumes.append({"name": "catj-data", "persistentVolumeClaim": claim})
    return tuple(volumes)


def _own_mounts(job: TrainingJob) -> tuple[dict[str, Any], ...]:
    mounts: list[dict[str, Any]] = [
        {"name": "catj-token", "mountPath": TOKEN_FILE.rsplit("/", 1)[0], "readOnly": True},
        {"name": "catj-run", "mountPath": RUN_FOLDER},
        {"name": "catj-tmp", "mountPath": "/tmp"},  # noqa: S108  the pod's own, an emptyDir
        # NCCL and torch's data loaders want more shared memory than a container's default 64 MiB
        {"name": "catj-shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "catj-checkpoints", "mountPath": CHECKPOINT_MOUNT},
    ]
    if job.spec.trainer.config is not None:
        mounts.append({"name": "catj-data", "mountPath": DATA_MOUNT, "readOnly": True})
    return tuple(mounts)


def _affinity(job: TrainingJob, plan: Plan) -> dict[str, Any]:
    """One pod a node, on the instance types that were planned and the capacity that the manifest allows, on no node that was left."""
    expressions: list[dict[str, Any]] = []
    nodes = job.spec.nodes
    if plan.instance_types:
        expressions.append({"key": INSTANCE_TYPE_LABELS[0], "operator": "In", "values": list(plan.instance_types)})
    terms = [expressions]
    if nodes.capacity_type is CapacityType.SPOT:
        terms = [[*expressions, {"key": k, "operator": "In", "values": [v]}] for k, v in SPOT_LABELS.items()]
    elif nodes.capacity_type is CapacityType.ON_DEMAND:
        terms = [expressions + [{"key": k, "operator": "NotIn", "values": [v]} for k, v in SPOT_LABELS.items()]]
    affinity: dict[str, Any] = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels(job.key.name)}}
            ]
        }
    }
    # a requirement on a node's name takes one value; all of a term must hold
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in plan.excluded_nodes]
    if any(terms) or fields:
        found = [
            ({"matchExpressions": term} if term else {}) | ({"matchFields": fields} if fields else {}) for term in terms
        ]
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": found}}
    return affinity


def _by_name(*layers: tuple[dict[str, Any], ...], key: str = "name") -> list[dict[str, Any]]:
    """Entries of all layers; a later layer's entry replaces an earlier one of the same name."""
    merged: dict[Any, dict[str, Any]] = {}
    for layer in layers:
        for entry in layer:
            merged[entry.get(key)] = entry
    return list(merged.values())
