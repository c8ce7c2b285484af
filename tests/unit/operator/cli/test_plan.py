"""`catj plan` and `catj explain`: the first question answered, runners-up explained, and any manifest met with words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.facts import BOOK, merged

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.cli.main import main
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.search.three_d import Ranking, ThreeDParallelCostAnalyzer
from cost_aware_operator.planning import report
from cost_aware_operator.planning.arithmetic import arithmetic
from cost_aware_operator.planning.space import PlanError, Space, space_of

SPEC: dict[str, Any] = {
    "trainer": {"config": {"steps": 10_000, "data": {"volume": "data"}}},
    "model": {"preset": "llama-8b"},
    "batch": {"global": 64},
    "nodes": {"min": 1, "max": 8, "instanceTypes": ["p5.48xlarge", "p4d.24xlarge"], "capacityType": "OnDemand"},
    "checkpoint": {"volume": "checkpoints"},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "job.yaml"
    document = {
        "apiVersion": "costaware.dev/v1alpha1",
        "kind": "CostAwareTrainingJob",
        "metadata": {"name": "j"},
        "spec": merged(SPEC, changes),
    }
    path.write_text(yaml.safe_dump(document))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def planned(capsys: pytest.CaptureFixture[str], folder: Path, **changes: Any) -> dict[str, Any]:
    code, out, err = run(capsys, "plan", write(folder, **changes), "-o", "json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_plans_are_ranked_by_dollars_and_every_runner_up_says_why_not(capsys: Any, tmp_path: Path) -> None:
    found = planned(capsys, tmp_path)
    usd = [p["usd"] for p in found["plans"]]
    assert usd == sorted(usd)
    assert len(usd) == 10
    best, *others = found["plans"]
    assert best["why_not"] == ""
    for other in others:
        assert re.match(r"\$[\d,.]+ more \(\+[\d.]+%\)|as good", other["why_not"])
        degrees = other["data"] * other["tensor"] * other["pipeline"]
        assert degrees == 8 * other["nodes"]
    for one in found["plans"]:
        assert sum(b["usd"] for b in one["cost"].values()) == pytest.approx(one["usd"], rel=1e-6)
        assert sum(b["share"] for b in one["cost"].values()) == pytest.approx(1, abs=1e-5)
        assert sum(one["breakdown"].values()) == pytest.approx(one["step_seconds"])
        assert 0 <= one["bubble"] < 1
        assert 0 <= one["communication"] < 1
        assert 0 < one["efficiency"] <= 1


def test_yaml_and_the_table_tell_the_same_plans(capsys: Any, tmp_path: Path) -> None:
    file = write(tmp_path)
    document = yaml.safe_load(run(capsys, "plan", file, "-o", "yaml", "--top", "3")[1])
    code, table, _ = run(capsys, "plan", file, "--top", "3")
    assert code == 0
    assert table.startswith("Do you need more than one node?")
    for one in document["plans"]:
        assert f"{one['data']}x{one['tensor']}x{one['pipeline']}" in table
        assert f"{one['usd']:,.2f}" in table


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"nodes": {"max": 1}}, r"^No\. One node of p5\.48xlarge takes [\d.]+ h for \$[\d,.]+; the best on more nodes, 2 of"),
        ({"nodes": {"min": 4, "max": 4}, "batch": {"global": 8}, "model": {"preset": "llama-1b"}},
         r"^No, but spec\.nodes\.min asks for 4"),
        ({"deadlineSeconds": 20_000}, r"^Yes\. One node cannot do it: .*miss the deadline of 5\.56 h: the nearest takes"),
        ({"objective": "Time"}, r"^Not to train it, but more do it sooner\."),
        (
            {"nodes": {"instanceTypes": ["p3.16xlarge"]}},
            r"^Yes\. One node cannot do it: .*need more memory than a rank has: the nearest [\d.]+ of 15\.0 GiB",
        ),
    ],
)  # fmt: skip
def test_the_first_question_is_answered(capsys: Any, tmp_path: Path, changes: dict[str, Any], answer: str) -> None:
    assert re.search(answer, planned(capsys, tmp_path, **changes)["answer"])


def test_the_objective_chooses_time_over_dollars(capsys: Any, tmp_path: Path) -> None:
    cheap = planned(capsys, tmp_path)["plans"][0]
    fast = planned(capsys, tmp_path, objective="Time")["plans"][0]
    assert fast["hours"] < cheap["hours"]
    assert fast["usd"] > cheap["usd"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"preset": None, "layers": 4, "hidden": 64, "heads": 5, "ffn": 64, "sequenceLength": 8, "vocabulary": 99}},
         "spec.model.heads: 5 does not divide spec.model.hidden (64): write 4"),
        ({"nodes": {"instanceTypes": []}}, "spec.nodes.instanceTypes: is empty: write one instance type or more"),
        ({"nodes": {"instanceTypes": ["p5.48xlrge"]}}, "'p5.48xlrge' is not in the price book; did you mean p5.48xlarge"),
        ({"nodes": {"instanceTypes": ["p5e.48xlarge"]}}, "p5e.48xlarge has no on-demand price"),
        ({"nodes": {"minn": 3}}, "spec.nodes.minn: unknown field; did you mean min?"),
        ({"batch": {"global": 0}}, "spec.batch.global: must be greater than or equal to 1, got 0"),
        ({"parallelism": {"pipeline": 33}}, "spec.parallelism: the degrees asked for do not fill"),
        ({"budget": {"totalUSD": 3}}, "spec.budget.totalUSD: no plan is within 3.00: write 10"),
        ({"budget": {"maxHourlyUSD": 3}}, "spec.budget.maxHourlyUSD: no plan is within 3.00: write 21.97 or more"),
        ({"deadlineSeconds": 60}, "spec.deadlineSeconds: no plan is within 60: write"),
        ({"model": None}, "spec.model: is missing"),
        ({"nodes": {"instanceTypes": ["g5.xlarge"], "max": 1}}, "spec.model: 8,030.3 M parameters need at least"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_names_the_field_and_what_to_write(
    capsys: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    code, out, err = run(capsys, "plan", write(tmp_path, **changes))
    assert (code, out) == (2, "")
    assert message in err


def test_what_a_refusal_says_to_write_is_enough(capsys: Any, tmp_path: Path) -> None:
    for section, name in (("budget", "totalUSD"), ("budget", "maxHourlyUSD"), ("", "deadlineSeconds")):
        changes: dict[str, Any] = {section: {name: 1}} if section else {name: 1}
        said = run(capsys, "plan", write(tmp_path, **changes))[2]
        value = float(re.findall(r"write ([\d.]+) or more", said)[0])
        value = int(value) if name == "deadlineSeconds" else value
        planned(capsys, tmp_path, **({section: {name: value}} if section else {name: value}))


def test_a_price_file_changes_what_is_cheapest(capsys: Any, tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps([{"instanceType": "p4d.24xlarge", "hourlyUSD": 1.5}]))
    code, out, _ = run(capsys, "plan", write(tmp_path), "-o", "json", "--prices", str(prices))
    assert code == 0
    assert json.loads(out)["plans"][0]["instance_type"] == "p4d.24xlarge"
    prices.write_text(json.dumps([{"instanceType": "p4d.24xlarge", "hourlyUSD": 0}]))
    code, _, err = run(capsys, "plan", write(tmp_path), "--prices", str(prices))
    assert code == 2
    assert "p4d.24xlarge" in err


def test_the_pareto_front_becomes_a_picture(capsys: Any, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert run(capsys, "plan", write(tmp_path), "--pareto", str(picture))[0] == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run(capsys, "plan", write(tmp_path), "--pareto", str(tmp_path / "no/where.png"))[0] == 2


@pytest.mark.parametrize("changes", [{}, {"parallelism": {"tensor": 4, "pipeline": 4}}])
def test_the_lines_of_an_explanation_add_up_to_the_plan(changes: dict[str, Any]) -> None:
    space = space_of(JobSpec.model_validate(merged(SPEC, changes)), BOOK)
    ranking = ThreeDParallelCostAnalyzer().search(space.work, space.offers, space.bounds)
    plan = report.ranked(ranking, 1)[0]
    sections = {s.title: {line.what: line.value for line in s.lines} for s in arithmetic(ranking, plan)}
    step = sections["One step"]
    parts = ("computing", "tensor-parallel communication", "pipeline bubble", "sends between stages",
             "gradients and weights", "optimizer", "stragglers and fixed cost")  # fmt: skip
    assert sum(seconds(step.get(name, "0 s")) for name in parts) == pytest.approx(seconds(step["step"]), rel=1e-3)
    assert seconds(step["step"]) == pytest.approx(plan.prediction.step_seconds, rel=1e-3)
    dollars = sections["The run in dollars"]
    blocks = sum(usd(dollars[name]) for name in ("compute", "communication", "storage", "management"))
    assert blocks == pytest.approx(usd(dollars["dollars"]), abs=0.001)
    assert usd(dollars["dollars"]) == pytest.approx(plan.usd, rel=1e-5)


def seconds(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def usd(text: str) -> float:
    return float(text.replace(",", "").removeprefix("$"))


def test_an_explanation_of_a_runner_up_says_why_it_is_one(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "explain", write(tmp_path), "--rank", "2")
    assert code == 0
    assert "Not the best: $" in out
    code, _, err = run(capsys, "explain", write(tmp_path, nodes={"max": 1}), "--rank", "9999")
    assert code == 2
    assert "--rank: there are" in err


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(), st.text(max_size=5), st.just([]), st.just({})
)


@settings(max_examples=40)
@given(
    path=st.sampled_from(
        [("model", "preset"), ("model", "heads"), ("batch", "global"), ("batch", "micro"), ("nodes", "min"), ("nodes", "max"),
         ("nodes", "instanceTypes"), ("nodes", "ranksPerNode"), ("parallelism", "tensor"), ("parallelism", "pipeline"),
         ("budget", "totalUSD"), ("deadlineSeconds", ""), ("objective", ""), ("template", "resources"), ("checkpoint", "keep")]
    ),
    value=JUNK,
    batch=st.integers(1, 300),
    nodes=st.tuples(st.integers(1, 5), st.integers(0, 5)),
)  # fmt: skip
def test_no_manifest_ends_in_a_traceback_or_in_impossible_dollars(
    path: tuple[str, str], value: Any, batch: int, nodes: tuple[int, int]
) -> None:
    spec = merged(SPEC, {"batch": {"global": batch}, "nodes": {"min": nodes[0], "max": sum(nodes)}})
    section, name = path
    spec = {**spec, section: {**spec.get(section, {}), name: value} if name else value}
    try:
        parsed = JobSpec.model_validate(spec)
    except ValueError:
        return
    try:
        space = space_of(parsed, BOOK)
        ranking = ThreeDParallelCostAnalyzer().search(space.work, space.offers, space.bounds, space.objective)
    except (PlanError, AnalysisError) as error:
        said = str(error)
    else:
        said = checked(space, ranking)
    assert not said or re.match(r"(spec\.)?[a-z]\w*.*write", said)


def checked(space: Space, ranking: Ranking) -> str:
    """Nothing impossible is in a ranking; what an empty one says."""
    if len(ranking.columns):
        assert ((ranking.columns.usd > 0) & (ranking.columns.usd < 1e15)).all()
        assert all(one.cost.total_usd > 0 for one in report.ranked(ranking, 2))
        assert report.needs_more_than_one_node(space, ranking)
        return ""
    return report.nothing_fits(ranking)[1] or report.no_memory(space, ranking)
