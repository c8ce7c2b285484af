"""The pods: restricted, one a node, on the nodes that the manifest allows, told everything they need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.factories.facts import BOOK, START, job

from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.job import indexed_job, template_hash
from cost_aware_operator.workload.order import carries_out, run_order
from cost_aware_operator.workload.secret import TokenSecret, secret
from cost_aware_operator.workload.service import service
from cost_aware_operator.workload.views import pod_view
from cost_aware_trainer.contract import ENV_ENDS_FOLDER, ENV_POD_UID, ENV_PRELOAD, MEMORY_FOLDER, RunOrder

TOKEN = TokenSecret("catj-uid-suffix", 1)


def plan_of(given) -> Plan:
    plan = make_plan(PlanInput(given.spec, BOOK))
    assert isinstance(plan, Plan)
    return plan


def built(**spec: Any) -> dict[str, Any]:
    given = job(**spec)
    return indexed_job(given, plan_of(given), PodDefaults(), TOKEN, suspend=False)


def test_pods_meet_the_restricted_pod_security_standard() -> None:
    pod = built()["spec"]["template"]["spec"]
    context, container = pod["securityContext"], pod["containers"][0]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])


def test_a_pod_knows_its_uid_and_where_to_leave_word_of_its_end() -> None:
    pod = built()["spec"]["template"]["spec"]
    env = {e["name"]: e for e in pod["containers"][0]["env"]}
    assert env[ENV_POD_UID]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid"
    order = run_order(job(), plan_of(job()), 1)
    assert order.plan is not None
    assert env[ENV_ENDS_FOLDER]["value"] == f"{order.plan.checkpoint.folder}/pods"


def test_a_pod_imports_pytorch_early_only_where_it_is_going_to_run_the_bundled_trainer() -> None:
    def told(**spec: Any) -> bool:
        pod = built(**spec)["spec"]["template"]["spec"]
        return ENV_PRELOAD in {e["name"] for e in pod["containers"][0]["env"]}

    assert told()
    assert not told(trainer={"config": None, "module": "my.trainer"})


def test_two_pods_of_an_index_never_run_at_once_and_disruptions_are_not_failures() -> None:
    spec = built()["spec"]
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"


def test_one_pod_a_node_on_the_instance_types_of_the_manifest() -> None:
    affinity = built(nodes={"instanceTypes": ["p3.2xlarge"]})["spec"]["template"]["spec"]["affinity"]
    anti = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert anti["topologyKey"] == "kubernetes.io/hostname"
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"] == ["p3.2xlarge"]


def test_spot_capacity_is_asked_for_in_every_cloud_s_words_and_on_demand_refuses_all_of_them() -> None:
    def terms(capacity: str) -> list[Any]:
        affinity = built(nodes={"capacityType": capacity})["spec"]["template"]["spec"]["affinity"]
        return affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    assert len(terms("Spot")) == 4
    assert all(t["matchExpressions"][0]["operator"] == "In" for t in terms("Spot"))
    assert len(terms("OnDemand")) == 1
    assert {e["operator"] for e in terms("OnDemand")[0]["matchExpressions"]} == {"NotIn"}
    assert "nodeAffinity" not in built()["spec"]["template"]["spec"]["affinity"]


def test_the_job_s_own_template_wins_over_the_installation_s_defaults() -> None:
    defaults = PodDefaults(image="default", env=({"name": "A", "value": "1"}, {"name": "B", "value": "2"}))
    given = job(
        template={"image": "mine", "env": [{"name": "A", "value": "9"}], "labels": {"kueue.x-k8s.io/queue-name": "q"}}
    )
    document = indexed_job(given, plan_of(given), defaults, TOKEN, suspend=False)
    container = document["spec"]["template"]["spec"]["containers"][0]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    assert container["image"] == "mine"
    assert (environment["A"], environment["B"]) == ("9", "2")
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"


def test_children_go_with_their_job() -> None:
    given = job()
    for document in (
        indexed_job(given, plan_of(given), PodDefaults(), TOKEN, suspend=False),
        service(given),
        secret(given, TOKEN.name, "t"),
    ):
        assert document["metadata"]["ownerReferences"][0]["uid"] == given.uid


def test_an_operator_upgrade_does_not_change_the_template_hash_and_a_new_image_does() -> None:
    given, other = job(), job(template={"image": "new"})
    assert template_hash(given, plan_of(given)) == template_hash(job(suspend=True), plan_of(given))
    assert template_hash(given, plan_of(given)) != template_hash(other, plan_of(other))


def test_an_order_carries_the_whole_plan_and_can_be_read_back() -> None:
    given = job()
    order = run_order(given, plan_of(given), 3)
    assert RunOrder.from_json(order.to_json()) == order
    assert order.rendezvous_host == "gpt-0.gpt.team.svc"
    assert order.plan is not None
    assert order.plan.degrees.data == 2
    assert order.plan.checkpoint.folder.startswith("/checkpoints/team-gpt-")


def test_copies_in_memory_are_asked_for_and_lie_where_a_pod_has_memory_of_its_own() -> None:
    given = job(checkpoint={"volume": "v", "redundancy": "Parity"})
    order = run_order(given, plan_of(given), 3)
    assert order.plan is not None
    assert order.plan.checkpoint.redundancy == "parity"
    spec = indexed_job(given, plan_of(given), PodDefaults(), TOKEN, suspend=False)["spec"]["template"]["spec"]
    (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if MEMORY_FOLDER.startswith(m["mountPath"]))
    (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
    assert volume["emptyDir"] == {"medium": "Memory"}


def test_planned_buckets_go_into_the_order_and_other_ones_change_no_running_job() -> None:
    given = job()
    plan = replace(plan_of(given), bucket_mib=16.0)
    order = run_order(given, plan, 3)
    assert order.plan is not None
    assert order.plan.strategy.bucket_mib == 16.0
    assert carries_out(given, order, replace(plan, bucket_mib=32.0))
    assert not carries_out(given, order, replace(plan, recompute="full"))
    compressed = run_order(job(communication={"compression": "Int8"}), plan, 3)
    assert compressed.plan is not None
    assert compressed.plan.strategy.bucket_mib is None


def test_a_user_s_own_program_is_started_as_it_is_written() -> None:
    spec: dict[str, Any] = {"trainer": {"config": None, "module": "my.trainer", "args": ["--fast"]}}
    given = job(**spec)
    order = run_order(given, plan_of(given), 1)
    assert (order.entry, order.plan) == (("-m", "my.trainer", "--fast"), None)


def test_a_pod_lost_with_its_node_still_has_an_end() -> None:
    document = {
        "metadata": {
            "name": "p", "uid": "u", "creationTimestamp": START.isoformat(),
            "annotations": {"batch.kubernetes.io/job-completion-index": "1"},
            "deletionTimestamp": "2026-01-01T12:05:00Z",
        },
        "status": {"phase": "Failed", "startTime": "2026-01-01T12:00:00Z"},
    }  # fmt: skip
    view = pod_view(document)
    assert view is not None
    assert view.ended_at is not None
    assert (view.ended_at - START).total_seconds() == 300


def test_what_an_agent_left_for_the_kubelet_is_read() -> None:
    ended = {"exitCode": 0, "reason": "Completed", "message": "{}", "finishedAt": "2026-01-01T12:05:00Z"}
    document = {
        "metadata": {
            "name": "p", "uid": "u", "creationTimestamp": START.isoformat(),
            "annotations": {"batch.kubernetes.io/job-completion-index": "1"},
        },
        "status": {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]},
    }  # fmt: skip
    view = pod_view(document)
    assert view is not None
    assert (view.succeeded, view.last_message, view.problem) == (True, "{}", "")


def test_a_job_made_again_under_a_name_does_not_meet_the_pods_of_the_one_before() -> None:
    given = job()
    again = replace(given, uid="another")
    pods = [
        indexed_job(one, plan_of(one), PodDefaults(), TOKEN, suspend=False)["spec"]["template"]["metadata"]["labels"]
        for one in (given, again)
    ]
    chosen = [service(one)["spec"]["selector"] for one in (given, again)]
    assert [[wants.items() <= has.items() for has in pods] for wants in chosen] == [[True, False], [False, True]]
