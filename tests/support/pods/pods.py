"""A store with nodes, a claim, a token and pods, as the other controllers of this host would leave them for the kubelet."""

import asyncio
import base64
import hashlib
import itertools
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from cost_aware_operator.engines.local.kubelet import Kubelet, KubeletSettings
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.names import LABEL_UID
from cost_aware_trainer.contract import AGENT_PORT, ENV_ENDS_FOLDER, ENV_NODE, METRICS_PORT

FAKE = (sys.executable, str(Path(__file__).with_name("fake_agent.py")))
TOKEN = "/var/run/secrets/costaware.dev"


def pod_document(name, node="node-0", index=0, grace_seconds=5, gpus=0, **environment):
    own = {"VOLUME": "/checkpoints", ENV_ENDS_FOLDER: "/checkpoints/run/pods", **environment}
    env = [{"name": key, "value": str(value)} for key, value in own.items()]
    fields = {"MY_NAME": "metadata.name", ENV_NODE: "spec.nodeName", "MY_IP": "status.podIP", "MY_UID": "metadata.uid"}
    env += [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()]
    container = {
        "name": "trainer",
        "image": "trainer",
        "env": env,
        "ports": [{"containerPort": AGENT_PORT}, {"containerPort": METRICS_PORT}],
        "volumeMounts": [
            {"name": "token", "mountPath": TOKEN},
            {"name": "run", "mountPath": "/run/catj"},
            {"name": "checkpoints", "mountPath": "/checkpoints"},
        ],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    secret = {"sources": [{"secret": {"name": "token", "items": [{"key": "token", "path": "token"}]}}]}
    volumes = [
        {"name": "token", "projected": secret},
        {"name": "run", "emptyDir": {}},
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    metadata = {
        "name": name,
        "namespace": "team",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class PodWorld:
    """A store and the folder of its kubelet, in the hands of a test."""

    def __init__(self, state, seed=None, **settings):
        numbers, self.state = itertools.count(1), Path(state)
        # other uids for each world, as they choose addresses and ports, and the same ones for the next world of a folder
        seed = hashlib.sha256(str(seed or state).encode()).hexdigest()[:8]
        self.store = ObjectStore(lambda: datetime.now(UTC), lambda: f"{seed}-{next(numbers)}")
        self.settings = KubeletSettings(
            **{"state": self.state, "agent": FAKE, "poll_seconds": 0.02, "working_folder": self.state} | settings
        )
        self.kubelet = Kubelet(self.store, self.settings)
        for name in ("node-0", "node-1"):
            self.put({"kind": "Node", "metadata": {"name": name}})
        self.put({"kind": "PersistentVolumeClaim", "metadata": {"name": "runs", "namespace": "team"}})
        data = {"token": base64.b64encode(b"secret").decode()}
        self.put({"kind": "Secret", "metadata": {"name": "token", "namespace": "team"}, "data": data})

    def put(self, document):
        if document["kind"] == "Pod":
            document["metadata"]["labels"] = {LABEL_UID: f"job-of-{self.state}"}
        return self.store.create(document, "somebody")

    def pod(self, name):
        return self.store.get(ObjectKey("Pod", "team", name))

    def status(self, name):
        return self.pod(name).get("status") or {}

    def phase(self, name):
        return self.status(name).get("phase")

    def terminated(self, name):
        return self.status(name)["containerStatuses"][0]["state"]["terminated"]

    def conditions(self, name):
        return {one["type"]: one for one in self.status(name).get("conditions", [])}

    @property
    def volume(self):
        return self.state / "volumes" / "runs"

    def starts(self):
        file = self.volume / "starts"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    async def until(self, condition, patience_seconds=30):
        """Looks again and again, as the kubelet's loop does, until something holds."""
        deadline = time.monotonic() + patience_seconds
        while True:
            await self.kubelet.sync()
            if condition():
                return
            assert time.monotonic() < deadline, [
                self.pod(pod["metadata"]["name"]).get("status") for pod in self.store.list("Pod")
            ]
            await asyncio.sleep(0.02)
