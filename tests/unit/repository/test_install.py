"""What a user installs: a wheel in an empty environment, without this repository and without any extra."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support import ROOT

EXAMPLE = ROOT / "examples/byte-gpt.yaml"
UV = ROOT / "requirements/uv"


def run(*command: str | Path, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def catj(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("install")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    run(UV, "venv", "--quiet", folder / "venv")
    python = folder / "venv/bin/python"
    # the versions that are pinned here: they are in the cache
    run(UV, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "requirements/dev.txt", wheel)
    return folder / "venv/bin/catj"


def test_the_planner_works_with_the_base_package_alone(catj: Path) -> None:
    document = json.loads(run(catj, "plan", EXAMPLE, "-o", "json"))
    assert document["plans"]
    assert "Plan 1:" in run(catj, "explain", EXAMPLE)
    assert run(catj, "simulate", EXAMPLE)


def test_what_needs_an_extra_says_how_to_install_it(catj: Path) -> None:
    said = run(catj, "watch", "job", code=2)
    assert said == (
        "catj: watch needs the package aiohttp, which is not installed: pip install 'cost-aware-training[operator]'\n"
    )
    said = run(catj, "plan", EXAMPLE, "--pareto", "/nowhere.png", code=2)
    assert said.endswith(
        "--pareto needs the package matplotlib, which is not installed: pip install 'cost-aware-training[plot]'\n"
    )
    assert "torch is not installed: pip install 'cost-aware-training[trainer]'" in run(catj, "version")
