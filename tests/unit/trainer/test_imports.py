"""Agent and contract start in milliseconds and need neither PyTorch nor numpy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cost_aware_trainer

HEAVY = ("torch", "numpy", "prometheus_client")
PACKAGE = Path(cost_aware_trainer.__file__).parent
MODULES = sorted(
    ".".join(("cost_aware_trainer", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for room in ("agent", "contract")
    for path in (PACKAGE / room).glob("*.py")
    if path.name != "__main__.py"
)


def test_importing_agent_and_contract_loads_neither_torch_nor_numpy():
    program = f"import sys, {', '.join(MODULES)}; print(*(name for name in {HEAVY} if name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "cost_aware_trainer.agent.server" in MODULES
    assert ended.stdout.strip() == ""


@pytest.mark.parametrize("module", MODULES)
def test_no_function_of_agent_and_contract_imports_more_than_their_own_and_the_standard_library(module):
    parts = module.split(".")[1:]
    path = PACKAGE.joinpath(*parts)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    allowed = ("cost_aware_trainer.contract", "cost_aware_trainer.agent")
    foreign = {n for n in imported if n.split(".")[0] not in sys.stdlib_module_names and not n.startswith(allowed)}
    assert foreign == set()
