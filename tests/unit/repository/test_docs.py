"""The documentation says what the code does: the example, links, generated pages, names of metrics, reasons and fields."""

import dataclasses
import importlib.util
import json
import re
import types
import typing
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from prometheus_client.metrics_core import Metric as Family
from tests.support import ROOT

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.api.status import ConditionType
from cost_aware_operator.app.telemetry import Telemetry
from cost_aware_operator.control.status.outcome import Outcome
from cost_aware_trainer.contract import AgentPhase, CheckpointPlan, Metric, RunPlan
from cost_aware_trainer.state.validation import check_plan

SOURCES = ROOT / "operator/src/cost_aware_operator"
DOCS = ROOT / "docs"
TOP = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
PAGES = [*(ROOT / name for name in TOP), *sorted(DOCS.rglob("*.md"))]
COMMANDS = [*PAGES, *sorted((ROOT / ".github").rglob("*.*")), ROOT / ".ci/run"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def load_generator() -> types.ModuleType:
    specification = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


GENERATOR = load_generator()


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """A page's headings as GitHub turns them into anchors."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in HEADING.findall(page.read_text())}


def test_the_readme_s_manifest_is_the_example() -> None:
    (shown,) = fenced(ROOT / "README.md", "yaml")
    example = (ROOT / "examples/byte-gpt.yaml").read_text()
    assert yaml.safe_load(shown) == yaml.safe_load(example)
    assert shown == example


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    JobSpec.model_validate(yaml.safe_load(path.read_text())["spec"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    prose = re.sub(r"`[^`\n]*`", "", page.read_text())
    for target in LINK.findall(prose):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        where = page.parent / path if path else page
        if not where.exists() or (fragment and fragment not in anchors(where)):
            broken.append(target)
    assert broken == []


def test_the_reference_is_the_generated_one() -> None:
    assert GENERATOR.PAGE.read_text() == GENERATOR.page(), "run `python docs/generate.py`"


def test_conditions_and_their_reasons_are_those_of_the_code() -> None:
    documented = {reason for _, _, reason, _ in GENERATOR.CONDITIONS}
    kinds = {kind for kind, *_ in GENERATOR.CONDITIONS}
    assert {kind.value for kind in ConditionType} <= kinds
    code = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))
    given = set(re.findall(r'\b(?:Refusal|GiveUp|Wait)\(\s*"(\w+)"', code))
    given |= set(re.findall(r'ConditionStatus\.\w+,\s*"(\w+)"', code))
    given |= set(re.findall(r'\bhold\(\s*"(\w+)"', code))
    # a pod's wait comes with a reason of its own, and so never with the outcome's
    given |= {outcome.value for outcome in Outcome} - {"Restarting"}
    assert given <= documented
    assert [reason for reason in documented if f'"{reason}"' not in code] == []


def test_metrics_are_those_of_the_code() -> None:
    def exposed(family: Family) -> str:
        return f"{family.name}_total" if family.type == "counter" else family.name

    registry = Telemetry(lambda: 0.0, lambda: 0.0).registry
    code = {exposed(family) for family in registry.collect()} | {metric.value for metric in Metric}
    rows = re.findall(r"^\| `(catj_\w+)` \|", (DOCS / "operations.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == code
    mentioned = {name for page in PAGES for name in re.findall(r"\bcatj_\w*[a-z]\b", page.read_text())}
    assert mentioned <= code


def fields_of(message: type, prefix: str = "") -> set[str]:
    kinds = typing.get_type_hints(message)
    found: set[str] = set()
    for field in dataclasses.fields(message):
        kind, name = kinds[field.name], f"{prefix}{field.name}"
        found |= fields_of(kind, f"{name}.") if dataclasses.is_dataclass(kind) else {name}
    return found


def test_every_field_of_the_run_plan_is_described() -> None:
    text = (DOCS / "trainer.md").read_text().partition("## The run plan")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)) == fields_of(RunPlan)


def test_every_phase_of_the_agent_is_described() -> None:
    text = (DOCS / "trainer.md").read_text().partition("| Phase |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {phase.value for phase in AgentPhase}


def test_the_example_plan_is_valid() -> None:
    (shown,) = fenced(DOCS / "trainer.md", "json")
    plan = RunPlan.from_document(json.loads(shown))
    check_plan(plan, plan.degrees.ranks)
    assert plan.checkpoint.keep == CheckpointPlan(folder="").keep


def test_the_picture_has_words() -> None:
    picture = ElementTree.parse(DOCS / "ring.svg").getroot()  # noqa: S314  our own file
    names = {child.tag.rpartition("}")[2] for child in picture}
    assert {"title", "desc"} <= names
    assert picture.get("role") == "img"
    assert "prefers-color-scheme: dark" in (DOCS / "ring.svg").read_text()


def test_design_notes_are_dated_and_say_why() -> None:
    notes = sorted((DOCS / "design").glob("*.md"))
    assert notes
    for note in notes:
        text = note.read_text()
        assert re.match(r"\d{8}-[a-z0-9-]+\.md$", note.name), note.name
        assert all(part in text for part in ("**Decision.**", "**Why.**", "**Also considered.**")), note.name


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # in prose a command stands in backticks or on a line of its own; "make sure" does not
    command = re.compile(r"(?:`|^ *|^ *- run: )make ((?:[a-z][a-z0-9-]* *)+)", re.MULTILINE)
    named = {page: {word for found in command.findall(page.read_text()) for word in found.split()} for page in COMMANDS}
    missing = {str(page.relative_to(ROOT)): words - targets for page, words in named.items() if words - targets}
    assert missing == {}
    assert {"check", "test", "test-cluster", "test-all"} <= named[ROOT / "CONTRIBUTING.md"]
    assert {"venv", "check", "test"} <= named[ROOT / ".github/workflows/ci.yaml"]


def test_paths_that_a_contributor_is_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:tests|bench|docs|cluster|crds|devtools|charts)/[\w./-]*)`", text))
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    # a path within a package is one of the operator's, or, in the lower half of the map, of the trainer's
    packages = (SOURCES, ROOT / "trainer_image/src/cost_aware_trainer")
    inside = set(
        re.findall(
            r"`(?:…/)?((?:api|costs|planning|observing|ledger|adjusting|workload|control|engines)/[\w./-]*)`", text
        )
    )
    inside |= set(re.findall(r"`…/(\w+/)`", text))
    assert len(inside) > 15
    assert sorted(name for name in inside if not any((package / name).exists() for package in packages)) == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.y*ml")), ids=lambda path: path.name)
def test_forms_and_workflows_parse_and_say_what_they_are_for(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert document["name"]
        assert document["description"]
        assert all(part["attributes"]["label"] for part in document["body"])


def test_hooks_before_a_commit_run_what_the_environment_has() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in local["hooks"])


def test_files_that_the_architecture_names_are_there() -> None:
    """Paths are below one of the two packages; `room/file.py`, or a folder."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|csv))`", text))
    assert len(named) > 25
    packages = (ROOT / "operator/src/cost_aware_operator", ROOT / "trainer_image/src/cost_aware_trainer")
    assert {name for name in named if not any((package / name).is_file() for package in packages)} == set()
    rooms = set(re.findall(r"^\| ((?:`[a-z/_]+`(?:, )?)+) \|", text, re.M))
    folders = {name for room in rooms for name in re.findall(r"`([a-z/_]+)`", room)}
    assert {name for name in folders if not any((package / name).is_dir() for package in packages)} == set()
    tops = {path.name for package in packages for path in package.iterdir() if (path / "__init__.py").is_file()}
    assert tops - {name.split("/")[0] for name in folders} == set(), "is a room that the architecture does not name"


def test_each_word_of_the_glossary_is_one_sentence_and_found_by_its_letter() -> None:
    for table in (ROOT / "docs/glossary.md").read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M)[1:]
        words = [word for word, _ in rows if word != "---"]
        assert len(words) > 8
        for word, meaning in rows:
            if word != "---":
                assert re.fullmatch(r"[A-Z`].*[.]", meaning.strip()), word
                assert ". " not in meaning.strip(), f"{word}: more than one sentence"
