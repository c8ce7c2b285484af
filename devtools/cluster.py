"""The development cluster as tests and benches see it: kubectl, namespaces with volumes, and jobs that are waited for."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

from devtools.steps_log import steps_of

ROOT = Path(__file__).resolve().parents[1]
OPERATOR_NAMESPACE = "cost-aware-training"
LAST_WORKER = f"{os.environ.get('CLUSTER_NAME', 'catj')}-worker2"
POLL_SECONDS = 0.25
PRICE_USD_PER_HOUR = 3.06
"""Of the instance type that the workers are labelled with."""


def script(*arguments: str) -> str:
    done = subprocess.run([str(ROOT / "cluster/cluster"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"cluster {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        deeper = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if deeper else value
    return {k: v for k, v in result.items() if v is not None}


TINY: dict[str, Any] = {
    "trainer": {
        "config": {
            "steps": 30,
            "learningRate": 0.01,
            "warmupSteps": 5,
            "evaluateEverySteps": 1000,
            "evaluationSamples": 8,
            "data": {"volume": "data", "folder": "python-stdlib"},
        }
    },
    "model": {
        "layers": 2, "hidden": 32, "heads": 4, "kvHeads": 2, "ffn": 64, "sequenceLength": 32, "vocabulary": 256,
    },
    "batch": {"global": 8},
    "nodes": {"min": 1, "max": 1},
    # a test that is about something else must not see its degrees change
    "efficiency": {"policy": "Off"},
    "checkpoint": {"volume": "checkpoints", "intervalSeconds": 5},
    "template": {"resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}},
}  # fmt: skip


def manifest(name: str, base: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "costaware.dev/v1alpha1",
        "kind": "CostAwareTrainingJob",
        "metadata": {"name": name},
        "spec": merged(TINY if base is None else base, spec),
    }


def example() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/byte-gpt.yaml").read_text())
    return document


@dataclass
class Cluster:
    """kubectl on the development cluster."""

    kubeconfig: str
    path: str

    @cached_property
    def _client(self) -> client.ApiClient:
        return config.new_client_from_config(self.kubeconfig)

    def read(self, path: str, **query: str) -> dict[str, Any]:
        """A document of the API server, over a connection that stays open: asked often, kubectl would take a core for itself."""
        url = f"{self._client.configuration.host}{path}?{urllib.parse.urlencode(query)}"
        try:
            answer = self._client.call_api("GET", url, {"Accept": "application/json"}, _request_timeout=30)
            body = answer.read()
        except urllib3.exceptions.HTTPError as error:
            raise AssertionError(f"GET {url}: {error}") from error
        assert answer.status == 200, f"GET {url}: {answer.status} {body.decode(errors='replace')}"
        document: dict[str, Any] = json.loads(body)
        return document

    @classmethod
    def connect(cls) -> Cluster:
        return cls(script("kubeconfig"), f"{script('bin')}:{os.environ['PATH']}")

    def run(self, *arguments: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KUBECONFIG": self.kubeconfig, "PATH": self.path}
        done = subprocess.run(
            ["kubectl", *arguments],
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """kubectl, left running; its output is to be read."""
        environment = {**os.environ, "KUBECONFIG": self.kubeconfig, "PATH": self.path}
        return subprocess.Popen(
            ["kubectl", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def get(self, *arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.run("get", *arguments, "-o", "json").stdout)
        return document

    def raw(self, path: str) -> str:
        return self.run("get", "--raw", path).stdout

    def _pods_of_operator(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.read(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods")["items"]
        return items

    def operator_pods(self) -> list[str]:
        items = self._pods_of_operator()
        return [i["metadata"]["name"] for i in items if not i["metadata"].get("deletionTimestamp")]

    def leader(self) -> str:
        """The operator's pod that holds the Lease and has listed everything; empty while there is none."""
        leases = self.read(f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases")["items"]
        ready = {
            pod["metadata"]["name"]
            for pod in self._pods_of_operator()
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        }
        return next((h for lease in leases if (h := lease["spec"].get("holderIdentity", "")) in ready), "")

    def kill_operator(self) -> None:
        """Kills the operator, without a chance to end well, and waits for the next one.

        The next one may be ready long before it leads: what was killed has not given its Lease back.
        """
        dead = set(self.operator_pods())
        for pod in dead:
            self.run("delete", "pod", pod, "-n", OPERATOR_NAMESPACE, "--grace-period=0", "--force", "--wait=false")
        until = time.monotonic() + 90
        while self.leader() in dead | {""}:
            assert time.monotonic() < until, "no other operator leads"
            time.sleep(POLL_SECONDS)

    def wait_for_operator(self) -> None:
        """Waits until what the Deployment was last changed to is ready."""
        self.run("rollout", "status", "deployment", "-n", OPERATOR_NAMESPACE, "--timeout=90s")


@dataclass
class Space:
    """A namespace with its volumes."""

    cluster: Cluster
    name: str

    def apply(self, document: dict[str, Any], *, dry_run: bool = False) -> subprocess.CompletedProcess[str]:
        extra = ["--dry-run=server"] if dry_run else []
        return self.cluster.run("apply", "-n", self.name, *extra, "-f", "-", stdin=json.dumps(document), check=False)

    def submit(self, document: dict[str, Any]) -> None:
        done = self.apply(document)
        assert done.returncode == 0, done.stderr

    def patch(self, job: str, spec: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        body = json.dumps({"spec": spec})
        return self.cluster.run("patch", "catj", job, "-n", self.name, "--type=merge", "-p", body, check=False)

    def status(self, job: str) -> dict[str, Any]:
        path = f"/apis/costaware.dev/v1alpha1/namespaces/{self.name}/costawaretrainingjobs/{job}"
        status: dict[str, Any] = self.cluster.read(path).get("status", {})
        return status

    def condition(self, job: str, kind: str) -> dict[str, str]:
        return next((c for c in self.status(job).get("conditions", []) if c["type"] == kind), {})

    def wait(
        self,
        job: str,
        what: Callable[[dict[str, Any]], object],
        seconds: float = 120.0,
        said: str = "what was waited for",
    ) -> dict[str, Any]:
        """The first status that fulfils `what`."""
        until = time.monotonic() + seconds
        status: dict[str, Any] = {}
        while time.monotonic() < until:
            status = self.status(job)
            if what(status):
                return status
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"{job}: no {said} within {seconds:.0f} s; its status is {json.dumps(status, indent=1)}")

    def wait_until(self, what: Callable[[], object], seconds: float, said: str) -> None:
        """Waits for anything else of this namespace."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, f"no {said} within {seconds:.0f} s"
            time.sleep(POLL_SECONDS)

    def exists(self, job: str) -> bool:
        """Whether there is such a job."""
        return self.cluster.run("get", "catj", job, "-n", self.name, check=False).returncode == 0

    def wait_finished(self, job: str, seconds: float = 300.0) -> dict[str, Any]:
        ended = {"Succeeded", "Failed"}
        return self.wait(job, lambda s: s.get("state") in ended, seconds, "end")

    def wait_step(self, job: str, step: int, seconds: float = 180.0) -> dict[str, Any]:
        return self.wait(job, lambda s: s.get("progress", {}).get("step", 0) >= step, seconds, f"step {step}")

    def pods(self, job: str) -> list[dict[str, Any]]:
        found = self.cluster.read(f"/api/v1/namespaces/{self.name}/pods", labelSelector=f"costaware.dev/job={job}")
        items: list[dict[str, Any]] = found["items"]
        return items

    def watch_pods(self, job: str) -> subprocess.Popen[str]:
        """kubectl, telling of every change of a job's pods as JSON documents one after the other, until it loses the API server."""
        return self.cluster.start(
            "get", "pods", "-n", self.name, "-l", f"costaware.dev/job={job}", "-o", "json", "--watch"
        )

    def children(self, job: str) -> list[str]:
        """Kinds of what exists of a job's children."""
        document = self.cluster.get(
            "jobs,services,configmaps,secrets,pods", "-n", self.name, "-l", f"costaware.dev/job={job}"
        )
        return sorted({i["kind"] for i in document["items"]})

    def events(self, job: str) -> list[str]:
        selector = f"involvedObject.name={job},involvedObject.kind=CostAwareTrainingJob"
        items = self.cluster.get("events", "-n", self.name, "--field-selector", selector)["items"]
        return [f"{i['type']} {i['reason']}: {i['message']}" for i in items]

    def steps_log(self, job: str) -> list[dict[str, Any]]:
        """The trainer's own log of its steps, from the folder of this machine that the pods' volume is."""
        folder = Path(script("folder", "checkpoints")) / self.name
        found = [p for p in folder.glob("*/steps.jsonl") if p.parent.name.startswith(f"{self.name}-{job}-")]
        assert len(found) == 1, f"{job}: {found} in {folder}"
        return steps_of(found[0])

    def weights_made_by(self, job: str) -> dict[int, dict[str, Any]]:
        """The log's newest entry of each step: what was trained again after a restart counts once, as in the weights."""
        return {entry["step"]: entry for entry in self.steps_log(job)}
