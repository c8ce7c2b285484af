"""The chart on a real cluster: installed, upgraded, rolled back and uninstalled in a namespace of its own.

The cluster's CustomResourceDefinition belongs to every test, so the operator is installed without it, watching its own
namespace alone. What becomes of a definition is tried on a copy of the chart with a definition of another group.
"""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import ROOT

pytestmark = [pytest.mark.cluster]

CHART = ROOT / "charts/cost-aware-training-operator"
CRD = ROOT / "crds/costaware.dev_costawaretrainingjobs.yaml"
CRD_NAME = "costawaretrainingjobs.costaware.dev"
OPERATOR_TAG = os.environ.get("CATJ_OPERATOR_TAG", "dev")
RELEASE = "lifecycle"
NAME = "lifecycle-cost-aware-training-operator"


def script(command: str) -> str:
    return subprocess.run(
        [ROOT / "cluster/cluster", command], capture_output=True, text=True, check=True
    ).stdout.strip()


def environment() -> dict[str, str]:
    return {**os.environ, "KUBECONFIG": script("kubeconfig"), "PATH": f"{script('bin')}:{os.environ['PATH']}"}


def run(*command: str, check: bool = True, stdin: str | None = None) -> str:
    result = subprocess.run(
        command, input=stdin, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    if check:
        assert result.returncode == 0, f"{' '.join(command)}: {result.stdout}{result.stderr}"
    return result.stdout


def get(*arguments: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(run("kubectl", "get", *arguments, "--output=json"))["items"]
    return items


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"catj-chart-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    run("kubectl", "apply", "--filename=-", stdin=json.dumps(manifest))
    yield name
    # shown by pytest if the test failed
    selector = ("--namespace", name, f"--selector=app.kubernetes.io/instance={RELEASE}")
    print(run("kubectl", "get", "pods,events", "--namespace", name, check=False))
    for which in ("--previous", "--previous=false"):
        print(run("kubectl", "logs", *selector, "--tail=30", "--prefix", which, check=False))
    run("helm", "uninstall", RELEASE, "--namespace", name, "--ignore-not-found", check=False)
    run("kubectl", "delete", "namespace", name, "--timeout=120s")


def installed(namespace: str) -> list[str]:
    """Everything of the release, in its namespace and outside of it."""
    selector = f"--selector=app.kubernetes.io/instance={RELEASE},helm.sh/chart"
    inside = "deployments,pods,services,configmaps,serviceaccounts,roles,rolebindings,poddisruptionbudgets"
    outside = get("clusterroles,clusterrolebindings", selector)
    objects = get(inside, "--namespace", namespace, selector)
    objects += [item for item in outside if item["metadata"]["name"].startswith(f"{namespace}:")]
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in objects)


def operator_pods(namespace: str) -> list[dict[str, Any]]:
    pods = get("pods", "--namespace", namespace, f"--selector=app.kubernetes.io/instance={RELEASE}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def test_install_upgrade_rollback_uninstall(namespace: str) -> None:
    if run("kubectl", "get", "crd", CRD_NAME, "--ignore-not-found") == "":
        run("kubectl", "apply", "--server-side", f"--filename={CRD}")
    options = [
        *("--namespace", namespace, "--values", str(ROOT / "cluster/values.yaml")),
        *("--set", "crds.enabled=false", "--set", f"watchNamespaces={{{namespace}}}"),
        *("--set-string", f"image.tag={OPERATOR_TAG}", "--wait", "--timeout", "3m"),
    ]

    run("helm", "install", RELEASE, str(CHART), *options)
    (pod,) = operator_pods(namespace)
    assert pod["status"]["containerStatuses"][0]["ready"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert f"Deployment/{NAME}" in installed(namespace)

    price = {"instanceType": "p3.2xlarge", "hourlyUSD": 2.5, "asOf": "2026-01-31", "source": "test"}
    run(
        "helm",
        "upgrade",
        RELEASE,
        str(CHART),
        *options,
        "--set",
        "replicas=2",
        "--set-json",
        f"prices=[{json.dumps(price)}]",
    )
    assert [pod["status"]["containerStatuses"][0]["ready"] for pod in operator_pods(namespace)] == [True, True]
    assert f"PodDisruptionBudget/{NAME}" in installed(namespace)
    prices = json.loads(run("kubectl", "get", "configmap", f"{NAME}-prices", "--namespace", namespace, "--output=json"))
    assert json.loads(prices["data"]["prices.json"]) == [price]

    run("helm", "rollback", RELEASE, "1", "--namespace", namespace, "--wait", "--timeout", "3m")
    assert len(operator_pods(namespace)) == 1
    assert f"PodDisruptionBudget/{NAME}" not in installed(namespace)

    run("helm", "uninstall", RELEASE, "--namespace", namespace, "--wait", "--timeout", "2m")
    run("kubectl", "wait", "--for=delete", "pods", "--all", "--namespace", namespace, "--timeout=60s")
    assert installed(namespace) == []
    assert run("kubectl", "get", "crd", CRD_NAME, "--output=name").strip().endswith(CRD_NAME)


def test_the_service_account_may_do_its_work_and_no_more(namespace: str) -> None:
    options = ["--namespace", namespace, "--set", "crds.enabled=false", "--set", f"watchNamespaces={{{namespace}}}"]
    run("helm", "install", RELEASE, str(CHART), *options, "--set", "image.pullPolicy=Never")

    def may(verb: str, resource: str, where: str = namespace) -> bool:
        account = f"--as=system:serviceaccount:{namespace}:{NAME}"
        resource, _, part = resource.partition(":")
        question = ["can-i", verb, resource, f"--subresource={part}", "--namespace", where, account]
        answer = run("kubectl", "auth", *question, check=False)
        return answer.strip() == "yes"

    allowed = [
        *(("create", "jobs.batch"), ("patch", "jobs.batch"), ("delete", "jobs.batch"), ("list", "pods")),
        *(("patch", "costawaretrainingjobs.costaware.dev:status"), ("update", "configmaps"), ("create", "secrets")),
        *(("get", f"secrets/{NAME}-key"), ("update", "leases.coordination.k8s.io")),
        *(("list", "nodes"), ("create", "events")),
    ]
    refused = [
        *(("patch", "secrets"), ("update", "secrets"), ("update", f"secrets/{NAME}-key"), ("patch", "configmaps")),
        *(("get", "secrets"), ("list", "secrets"), ("delete", "secrets"), ("create", "pods"), ("delete", "pods")),
        *(("create", "pods:exec"), ("patch", "nodes"), ("create", "costawaretrainingjobs.costaware.dev")),
        *(("list", "namespaces"), ("create", "roles.rbac.authorization.k8s.io"), ("patch", "deployments.apps")),
    ]
    assert [question for question in allowed if not may(*question)] == []
    assert [question for question in refused if may(*question)] == []
    assert not may("list", "pods", "kube-system")


def test_the_definition_outlives_the_release_unless_told_otherwise(namespace: str, tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    definition = yaml.safe_load(CRD.read_text())
    group = f"{namespace}.example.com"
    name = f"costawaretrainingjobs.{group}"
    definition["metadata"]["name"] = name
    definition["spec"]["group"] = group
    for shared in ("shortNames", "categories"):
        definition["spec"]["names"].pop(shared, None)
    (chart / "files/crds" / CRD.name).write_text(yaml.safe_dump(definition))

    def exists() -> bool:
        return run("kubectl", "get", "crd", name, "--ignore-not-found", "--output=name") != ""

    options = ["--namespace", namespace, "--set", "image.pullPolicy=Never", "--set", f"watchNamespaces={{{namespace}}}"]
    try:
        run("helm", "install", RELEASE, str(chart), *options)
        assert exists()
        run("helm", "uninstall", RELEASE, "--namespace", namespace, "--wait")
        assert exists(), "crds.keep is the default"

        run("helm", "install", RELEASE, str(chart), *options, "--set", "crds.keep=false")
        run("helm", "uninstall", RELEASE, "--namespace", namespace, "--wait")
        run("kubectl", "wait", "--for=delete", f"crd/{name}", "--timeout=30s")
        assert not exists()
    finally:
        run("kubectl", "delete", "crd", name, "--ignore-not-found")
