"""Bad manifests, refused by a real API server before anything runs, with the field and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from devtools.cluster import Space, manifest

pytestmark = [pytest.mark.cluster]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a batch that the degrees and the micro-batch do not divide",
     {"batch": {"global": 10, "micro": 3}, "parallelism": {"data": 2}, "nodes": {"min": 2, "max": 2}},
     "batch.global must be divisible by parallelism.data x batch.micro"),
    ("degrees that are not nodes x ranksPerNode",
     {"parallelism": {"data": 4, "tensor": 1, "pipeline": 1}, "nodes": {"min": 2, "max": 2, "ranksPerNode": 1}},
     "the product of the degrees must be nodes x nodes.ranksPerNode"),
    ("a negative budget", {"budget": {"totalUSD": -5}}, "spec.budget.totalUSD"),
    ("a budget of nothing", {"budget": {"totalUSD": 0}}, "spec.budget.totalUSD"),
    ("copies on other nodes where there is one", {"nodes": {"min": 1, "max": 1}, "checkpoint": {"redundancy": "Replica"}},
     "checkpoint.redundancy keeps copies on other nodes"),
    ("fewer nodes at most than at least", {"nodes": {"min": 3, "max": 2}}, "nodes.min must not be greater than nodes.max"),
    ("hidden that heads do not divide", {"model": {"hidden": 33}}, "model.hidden must be divisible by model.heads"),
    ("heads that kvHeads do not divide", {"model": {"kvHeads": 3}}, "model.heads must be divisible by model.kvHeads"),
    ("a preset beside a shape", {"model": {"preset": "byte-gpt"}}, "write either preset, or the whole shape"),
    ("half a shape", {"model": {"layers": None}}, "layers, hidden, heads, ffn, sequenceLength and vocabulary are all needed"),
    ("no model for the bundled trainer", {"model": None}, "spec.model is needed by the bundled trainer"),
    ("two things to run", {"trainer": {"module": "mine"}}, "write exactly one of config"),
    ("nothing to run", {"trainer": {"config": None}}, "write exactly one of config"),
    ("a preset with a part of a shape", {"model": {"preset": "byte-gpt", "tiedEmbeddings": True}}, "write either preset"),
    ("an empty budget", {"budget": {"totalUSD": None}}, "write totalUSD, maxHourlyUSD or both"),
    ("an efficiency over one", {"efficiency": {"threshold": 1.5}}, "spec.efficiency.threshold"),
    ("degrees that are more than the ranks of the one node by default",
     {"nodes": {"min": 1, "max": 1, "ranksPerNode": 1}, "parallelism": {"data": 1, "tensor": 2, "pipeline": 1}},
     "the product of the degrees must be nodes x nodes.ranksPerNode"),
    ("a pull policy that does not exist", {"template": {"imagePullPolicy": "Sometimes"}}, "imagePullPolicy"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "said"), [r[1:] for r in REFUSED], ids=[r[0].replace(" ", "-") for r in REFUSED])
def test_refused_with_the_field_and_what_to_write(space: Space, spec: dict[str, Any], said: str) -> None:
    done = space.apply(manifest("bad", **spec), dry_run=True)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_good_manifest_is_accepted_so_that_the_refusals_mean_something(space: Space) -> None:
    done = space.apply(manifest("good"), dry_run=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "accepted"), [("a" * 52, True), ("a" * 53, False), ("1st", False)])
def test_names_that_pod_names_cannot_be_made_from_are_refused(space: Space, name: str, accepted: bool) -> None:
    done = space.apply(manifest(name), dry_run=True)
    assert (done.returncode == 0) == accepted, done.stderr
    assert accepted or "metadata.name must" in done.stderr


def test_an_unknown_field_is_refused_by_name(space: Space) -> None:
    done = space.apply(manifest("bad", gpus=8), dry_run=True)
    assert done.returncode != 0
    assert 'unknown field "spec.gpus"' in done.stderr


# managed by another: the operator leaves it alone, so that the rules of the schema are all that answers
FROZEN: list[tuple[dict[str, Any], str]] = [
    ({"model": {"layers": 3}}, "spec.model cannot change"),
    ({"trainer": {"config": {"steps": 31}}}, "spec.trainer cannot change"),
    ({"checkpoint": {"volume": "other"}}, "spec.checkpoint.volume and folder cannot change"),
    ({"batch": {"global": 16}}, "spec.batch.global cannot change"),
    ({"nodes": {"max": 2}}, "spec.nodes cannot change while the job runs: set spec.suspend to true first"),
    ({"template": {"image": "other"}}, "spec.template cannot change while the job runs"),
    ({"parallelism": {"data": 1}}, "spec.parallelism cannot change while the job runs"),
]


@pytest.fixture(scope="module")
def elsewhere(space: Space) -> Space:
    space.submit(manifest("elsewhere", managedBy="example.com/other"))
    return space


@pytest.mark.parametrize(("change", "said"), FROZEN, ids=[next(iter(c)) for c, _ in FROZEN])
def test_what_must_not_change_while_running_is_refused(elsewhere: Space, change: dict[str, Any], said: str) -> None:
    done = elsewhere.patch("elsewhere", change)
    assert done.returncode != 0
    assert said in done.stderr


def test_what_may_change_while_running_is_accepted(elsewhere: Space) -> None:
    for change in (
        {"budget": {"totalUSD": 9}},
        {"efficiency": {"threshold": 0.7}},
        {"ttlSecondsAfterFinished": 60},
        {"checkpoint": {"keep": 5}},
    ):
        done = elsewhere.patch("elsewhere", change)
        assert done.returncode == 0, done.stderr


def test_nodes_may_change_while_suspended(elsewhere: Space) -> None:
    assert elsewhere.patch("elsewhere", {"suspend": True}).returncode == 0
    done = elsewhere.patch("elsewhere", {"nodes": {"max": 2}})
    assert done.returncode == 0, done.stderr


def test_a_job_that_another_manages_is_left_alone(elsewhere: Space) -> None:
    assert elsewhere.status("elsewhere") == {}
    assert elsewhere.children("elsewhere") == []
