"""Names of a job's children and its folder, all derived from the job's own."""

from __future__ import annotations

from typing import Any

from cost_aware_operator.api import API_VERSION, KIND, LABEL_JOB
from cost_aware_operator.api.job import JobKey, TrainingJob

CHECKPOINT_MOUNT = "/checkpoints"


def checkpoint_folder(job: TrainingJob) -> str:
    """A folder of the job's own, unless the manifest names one: a new job of an old name never continues its run."""
    own = f"{job.key.namespace}-{job.key.name}-{job.uid[:8]}"
    return f"{CHECKPOINT_MOUNT}/{job.spec.checkpoint.folder or own}"


def record_name(job: str) -> str:
    """The ConfigMap that holds the run plan of the newest attempt and the ledger."""
    return f"{job}-run"


LABEL_UID = "costaware.dev/job-uid"
"""On every pod: the uid of the training job that pays for it."""


def labels(job: str) -> dict[str, str]:
    """On every child; the selectors of Service and watches."""
    return {
        LABEL_JOB: job,
        "app.kubernetes.io/name": "cost-aware-training",
        "app.kubernetes.io/managed-by": "cost-aware-operator",
    }


def owner_reference(job: TrainingJob) -> dict[str, object]:
    """Makes the garbage collector remove a child with its job."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.key.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def pod_host(key: JobKey, index: int) -> str:
    """The DNS name of a pod of an Indexed Job under the headless Service of the same name."""
    return f"{key.name}-{index}.{key.name}.{key.namespace}.svc"


def child_metadata(job: TrainingJob, name: str) -> dict[str, Any]:
    """Metadata of a child: its labels, and the owner with which it is removed."""
    return {
        "name": name,
        "namespace": job.key.namespace,
        "labels": labels(job.key.name),
        "ownerReferences": [owner_reference(job)],
    }
