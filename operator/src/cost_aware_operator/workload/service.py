"""The headless Service of a training job. Pure."""

from __future__ import annotations

from typing import Any

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.workload.names import LABEL_UID, child_metadata, labels
from cost_aware_trainer.contract import AGENT_PORT, METRICS_PORT


def service(job: TrainingJob) -> dict[str, Any]:
    """The headless Service that gives pods their names; it publishes them before they are ready, for rendezvous."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(job, job.key.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            # pods of a deleted job of this name may still end, under the same host names
            "selector": {**labels(job.key.name), LABEL_UID: job.uid},
            "ports": [
                {"name": "agent", "port": AGENT_PORT, "protocol": "TCP"},
                {"name": "metrics", "port": METRICS_PORT, "protocol": "TCP"},
            ],
        },
    }
