"""What a fresh clone stands on: the pins, the Makefile, the scripts, and a folder named like a standard module."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import ROOT

REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
SCRIPTS = ["cluster/cluster", ".ci/run", ".ci/stages", "requirements/uv"]


def run(*command: str | Path) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_requirements_are_pinned_hashed_and_carry_no_address(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert lines
    for line in lines:
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==", line), f"neither a pin nor a hash: {line}"
    assert text.count("--hash=sha256:") >= len(lines)


def test_the_operator_needs_no_torch() -> None:
    names = {
        line.split("==")[0] for line in (ROOT / "requirements/operator.txt").read_text().splitlines() if "==" in line
    }
    assert "kopf" in names
    assert names.isdisjoint({"torch", "scipy", "pandas"})


def test_the_folder_operator_does_not_shadow_the_standard_library() -> None:
    code = "import operator, collections; assert operator.add(1, 2) == 3; print(operator.__file__)"
    assert str(ROOT) not in run(sys.executable, "-c", code)
    run(sys.executable, "-m", "json.tool", "--help")
    assert not (ROOT / "operator/__init__.py").exists()
    assert not (ROOT / "operator/src/__init__.py").exists()


def test_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE))
    listed = {line.split()[0] for line in run("make", "--no-print-directory", "help").splitlines()}
    assert listed == phony
    commands = {"check", "test", "test-cluster", "test-all"}
    assert commands | {"venv", "lock", "lint", "typecheck", "imports", "crds", "demo", "clean"} <= listed


def test_make_kubeconfig_is_never_the_users_own() -> None:
    path = Path(run("make", "--no-print-directory", "kubeconfig").strip())
    assert path.name == "kubeconfig"
    assert path != Path.home() / ".kube/config"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    run("bash", "-n", script)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    run("shellcheck", "--external-sources", *SCRIPTS)


def test_stages_name_the_failed_one_and_stop(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("good:\n\t@true\nbad:\n\t@exit 3\nnever:\n\t@touch reached\n")
    command = [ROOT / ".ci/stages", "good", "bad", "never"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert re.search(r"^good +\d+", result.stdout, re.MULTILINE)
    assert re.search(r"^bad +\d+ failed$", result.stdout, re.MULTILINE)
    assert not (tmp_path / "reached").exists()


def test_importing_the_trainer_s_package_imports_no_torch() -> None:
    code = "import sys, cost_aware_trainer, cost_aware_trainer.agent; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(sys.executable, "-c", code) == "False False\n"
