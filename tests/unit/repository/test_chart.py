"""The chart as helm renders it: what it installs, what it allows, what it refuses."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import ROOT

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.app.settings import Settings
from cost_aware_operator.costs.tables.prices import shipped
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_operator.workload.defaults import DEFAULT_IMAGE, PodDefaults

CHART = ROOT / "charts/cost-aware-training-operator"
CRD = "costaware.dev_costawaretrainingjobs.yaml"


def find_helm() -> str | None:
    """Where helm lies: on PATH, or where the cluster's tools are built."""
    built = subprocess.run([ROOT / "cluster/cluster", "bin"], capture_output=True, text=True, check=True).stdout.strip()
    return shutil.which("helm", path=f"{os.environ['PATH']}:{built}")


HELM = find_helm()
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: run `make cluster-up`")


class HelmLoader(yaml.SafeLoader):
    """Helm, as the API server, reads 1e-06 as a number; YAML 1.1 does not, for want of a dot."""


EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")
HelmLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(*options: str) -> list[dict[str, Any]]:
    result = helm("template", "trial", str(CHART), "--namespace", "costs", *options)
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.load_all(result.stdout, HelmLoader) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (document,) = of_kind(documents, kind)
    return document


def rules(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [rule for kind in kinds for document in of_kind(documents, kind) for rule in document["rules"]]


def grants(rules: list[dict[str, Any]], group: str, resource: str) -> set[str]:
    """The verbs that some rule grants on every object of a resource."""
    return {
        verb
        for rule in rules
        if group in rule["apiGroups"] and resource in rule["resources"] and "resourceNames" not in rule
        for verb in rule["verbs"]
    }


NAMESPACED = ("--set", "watchNamespaces={team-a,team-b}")
VARIANTS = {
    "defaults": (),
    "two replicas": ("--set", "replicas=2"),
    "namespaced": NAMESPACED,
    "no crds": ("--set", "crds.enabled=false"),
    "no nodes": ("--set", "nodes.read=false"),
    "the cluster's values": ("--values", str(ROOT / "cluster/values.yaml")),
}


@needs_helm
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_lints_and_renders_without_wildcards(options: tuple[str, ...]) -> None:
    result = helm("lint", "--strict", str(CHART), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    documents = render(*options)
    for rule in rules(documents, "ClusterRole", "Role"):
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], rule
    keys = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(keys) == len(set(keys))


@needs_helm
def test_the_operator_satisfies_the_restricted_profile() -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    assert all(volume.keys() <= {"name", "configMap", "emptyDir"} for volume in pod["volumes"])
    assert not any("subPath" in mount for mount in container["volumeMounts"]), (
        "a subPath never sees a changed ConfigMap"
    )


@needs_helm
def test_the_operator_is_told_what_it_needs() -> None:
    documents = render(*NAMESPACED, "--set", "scrape.intervalSeconds=2")
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    plain = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert plain == {
        "CATJ_LEASE_NAME": "trial-cost-aware-training-operator",
        "CATJ_KEY_SECRET": "trial-cost-aware-training-operator-key",
        "CATJ_PRICES_FILE": "/etc/catj/prices/prices.json",
        "CATJ_POD_DEFAULTS_FILE": "/etc/catj/pod-defaults/defaults.yaml",
        "CATJ_WATCH_NAMESPACES": "team-a,team-b",
        "CATJ_SCRAPE_INTERVAL_SECONDS": "2",
        "CATJ_SCRAPE_CONCURRENCY": "64",
        "CATJ_LOG_LEVEL": "INFO",
        "CATJ_LOG_FORMAT": "text",
    }
    downward = {
        item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"] for item in container["env"] if "valueFrom" in item
    }
    assert downward == {"CATJ_OPERATOR_NAMESPACE": "metadata.namespace", "CATJ_POD_NAME": "metadata.name"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "probes"}
    assert container["ports"] == [{"name": "probes", "containerPort": 8080, "protocol": "TCP"}]


@needs_helm
def test_tokens_of_jobs_are_made_but_never_read_and_never_written_over() -> None:
    for options in ((), NAMESPACED):
        documents = render(*options)
        everywhere = rules(documents, "ClusterRole", "Role")
        assert grants(everywhere, "", "secrets") == {"create"}
        named = [rule for rule in everywhere if "resourceNames" in rule]
        assert named == [
            {
                "apiGroups": [""],
                "resources": ["secrets"],
                "resourceNames": ["trial-cost-aware-training-operator-key"],
                "verbs": ["get"],
            }
        ]


@needs_helm
def test_bills_are_kept_in_the_operator_s_namespace_alone() -> None:
    for options in ((), NAMESPACED):
        documents = render(*options)
        own = [
            d
            for d in documents
            if d["kind"] == "Role" and d["metadata"]["name"] == "trial-cost-aware-training-operator"
        ]
        assert grants(rules(own, "Role"), "", "configmaps") == {"get", "list", "create", "update", "delete"}
        others = [d for d in documents if d not in own]
        assert grants(rules(others, "ClusterRole", "Role"), "", "configmaps") == {"get", "create", "update"}


@needs_helm
def test_cluster_wide_roles() -> None:
    cluster = rules(render(), "ClusterRole")
    assert grants(cluster, "costaware.dev", "costawaretrainingjobs") == {"get", "list", "watch", "delete"}
    assert grants(cluster, "costaware.dev", "costawaretrainingjobs/status") == {"get", "patch", "update"}
    assert grants(cluster, "batch", "jobs") == {"get", "list", "watch", "create", "patch", "delete"}
    assert grants(cluster, "", "nodes") == {"get", "list"}
    assert grants(cluster, "coordination.k8s.io", "leases") == set()


@needs_helm
def test_namespaced_roles_reach_no_further() -> None:
    documents = render(*NAMESPACED)
    assert rules(documents, "ClusterRole") == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    roles = {role["metadata"]["namespace"] for role in of_kind(documents, "Role")}
    assert roles == {"team-a", "team-b", "costs"}
    for binding in of_kind(documents, "RoleBinding"):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "trial-cost-aware-training-operator", "namespace": "costs"}
        ]
    assert of_kind(render(*NAMESPACED, "--set", "nodes.read=false"), "ClusterRole") == []


@needs_helm
def test_a_budget_protects_replicas_only_when_there_are_several() -> None:
    assert of_kind(render(), "PodDisruptionBudget") == []
    documents = render("--set", "replicas=2")
    assert one(documents, "PodDisruptionBudget")["spec"]["minAvailable"] == 1
    assert one(documents, "Deployment")["spec"]["replicas"] == 2


@needs_helm
def test_prices_and_pod_defaults_arrive_as_files(tmp_path: Path) -> None:
    row = {"instanceType": "p3.2xlarge", "zone": "us-east-1a", "hourlyUSD": 2.5, "asOf": "2026-01-31", "source": "ours"}
    defaults = {
        "image": "mine:1",
        "imagePullPolicy": "Never",
        "env": [{"name": "A", "value": "b"}],
        "volumes": [{"name": "torch", "persistentVolumeClaim": {"claimName": "torch"}}],
        "volumeMounts": [{"name": "torch", "mountPath": "/opt/torch"}],
        "resources": {"limits": {"memory": "2Gi"}},
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"prices": [row], "trainer": {"podDefaults": defaults}}))
    maps = {item["metadata"]["name"]: item["data"] for item in of_kind(render("--values", str(values)), "ConfigMap")}
    assert json.loads(maps["trial-cost-aware-training-operator-prices"]["prices.json"]) == [row]
    assert yaml.safe_load(maps["trial-cost-aware-training-operator-pod-defaults"]["defaults.yaml"]) == defaults


@needs_helm
def test_the_operator_reads_the_prices_and_pod_defaults_that_the_chart_writes(tmp_path: Path) -> None:
    rows = [
        {
            "instanceType": "p3.2xlarge",
            "capacityType": capacity,
            "hourlyUSD": dollars,
            "asOf": "2026-01-31",
            "source": "a",
        }
        for capacity, dollars in (("OnDemand", 2.5), ("Spot", 0.5))
    ]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"prices": rows, "trainer": {"podDefaults": {"resources": {"limits": {}}}}}))
    prices, defaults = written("--values", str(values))
    book = shipped().overridden(prices)
    found = [book.price("p3.2xlarge", spot=spot) for spot in (False, True)]
    assert [price.hourly_usd for price in found if price is not None] == [2.5, 0.5]
    assert defaults.resources == {"limits": {}}


@needs_helm
def test_without_values_the_operator_s_own_defaults_hold() -> None:
    prices, defaults = written()
    assert shipped().overridden(prices) == shipped()
    assert defaults.image == DEFAULT_IMAGE
    assert not defaults.resources


def written(*options: str) -> tuple[str, PodDefaults]:
    """What the operator finds in its files."""
    data = {key: text for item in of_kind(render(*options), "ConfigMap") for key, text in item["data"].items()}
    return data["prices.json"], PodDefaults.model_validate(yaml.safe_load(data["defaults.yaml"]))


@needs_helm
def test_a_prometheus_server_is_told_only_where_one_is_named() -> None:
    def told(*options: str) -> tuple[Settings, dict[str, Any]]:
        pod = one(render(*options), "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        environment = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        return Settings.from_environment(environment), pod

    settings, _ = told()
    assert (settings.prometheus_url, settings.prometheus_token_file) == (None, None)
    secret = ["--set", "metricsSource.tokenSecret.name=prometheus,metricsSource.tokenSecret.key=bearer"]
    settings, pod = told("--set", "metricsSource.prometheusUrl=http://prometheus:9090", *secret)
    assert settings.prometheus_url == "http://prometheus:9090"
    (volume,) = [v for v in pod["volumes"] if v["name"] == "prometheus-token"]
    assert volume["secret"] == {"secretName": "prometheus", "items": [{"key": "bearer", "path": "token"}]}
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "prometheus-token"]
    assert settings.prometheus_token_file == Path(mount["mountPath"]) / "token"


@needs_helm
@pytest.mark.parametrize("seconds", ["0.5", "2.5", "3600"])
def test_every_scrape_interval_that_the_schema_allows_is_one_that_the_operator_takes(seconds: str) -> None:
    deployment = one(render("--set-json", f"scrape.intervalSeconds={seconds}"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert Settings.from_environment(environment).scrape_interval_seconds == float(seconds)


@needs_helm
def test_an_unquoted_date_is_still_a_date(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("prices: [{instanceType: a, hourlyUSD: 1, asOf: 2026-01-31, source: b}]")
    maps = of_kind(render("--values", str(values)), "ConfigMap")
    (text,) = [item["data"]["prices.json"] for item in maps if "prices.json" in item["data"]]
    assert json.loads(text)[0]["asOf"] == "2026-01-31"


@needs_helm
def test_the_definition_is_rendered_unchanged_and_kept() -> None:
    source = yaml.safe_load((CHART / "files/crds" / CRD).read_text())
    rendered = one(render(), "CustomResourceDefinition")
    assert rendered["spec"] == source["spec"]
    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    released = one(render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in released["metadata"].get("annotations", {})
    assert of_kind(render("--set", "crds.enabled=false"), "CustomResourceDefinition") == []


@needs_helm
@pytest.mark.parametrize(
    "setting",
    [
        "replica=2",
        "image.tga=1",
        "trainer.podDefaults.imagePolicy=Never",
        "replicas=0",
        "logLevel=LOUD",
        "watchNamespaces={Team_A}",
        "prices[0].instanceType=a",
        "metricsSource.prometheusUrl=prometheus:9090",
        "scrape.intervalSeconds=0.4",
        "scrape.intervalSeconds=3601",
        "trainer.podDefaults.resources.limit=a",
    ],
)
def test_the_schema_refuses(setting: str) -> None:
    # `--set` makes a text of a fraction, and would have it refused for that
    option = "--set-json" if setting.startswith("scrape.") else "--set"
    result = helm("template", "trial", str(CHART), option, setting)
    assert result.returncode != 0
    assert "want number" not in result.stderr
    assert "don't meet the specifications of the schema" in result.stderr


def test_the_charts_definition_is_the_generated_one() -> None:
    assert (CHART / "files/crds" / CRD).read_text() == (ROOT / "crds" / CRD).read_text(), "run `make chart-crds`"


def test_the_catalogue_s_examples_can_be_applied_and_planned() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    examples = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    (crd,) = yaml.safe_load(annotations["artifacthub.io/crds"])
    assert examples
    for example in examples:
        assert (example["kind"], example["apiVersion"].rpartition("/")[2]) == (crd["kind"], crd["version"])
        spec = JobSpec.model_validate(example["spec"])
        assert isinstance(make_plan(PlanInput(spec, shipped())), Plan)
        # what a rule asks for and a model cannot: the bundled trainer needs a shape
        assert spec.trainer.config is None or spec.model is not None


def test_every_value_is_described_by_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def undescribed(values: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
        found = []
        for key, value in values.items():
            known = schema.get("properties", {}).get(key)
            if known is None:
                found.append(f"{path}{key}")
            elif isinstance(value, dict) and "properties" in known:
                found += undescribed(value, known, f"{path}{key}.")
        return found

    assert undescribed(values, schema, "") == []
