"""The command line imports what the chosen command needs and nothing else, and says what to install where that is missing."""

import subprocess
import sys

import pytest

from cost_aware_operator.cli.commands import COMMANDS
from cost_aware_operator.cli.main import main

HEAVY = ("aiohttp", "kopf", "kubernetes", "matplotlib", "numpy", "pydantic", "rich", "torch", "yaml")


def test_the_help_lists_every_command_and_imports_no_package() -> None:
    code = (
        "import sys; from cost_aware_operator.cli.main import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print([name for name in {HEAVY} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines()[-1] == "[]"
    for name in COMMANDS:
        assert f"\n    {name} " in said, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: catj {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("watch", "aiohttp", "operator"), ("costs", "kubernetes", "operator")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for loaded in [module for module in sys.modules if module.startswith("cost_aware_operator")]:
        monkeypatch.delitem(sys.modules, loaded)
    for loaded in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        main([name, "x"] if name == "watch" else [name])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == (
        f"catj: {name} needs the package {package}, which is not installed: "
        f"pip install 'cost-aware-training[{extra}]'\n"
    )


def test_the_version_tells_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("cost-aware-training ")
    assert "\n  kubernetes 3" in said
