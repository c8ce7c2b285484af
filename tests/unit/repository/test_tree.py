"""The tree stays one that a stranger can keep in mind: small files, functions and folders, tests that use what is public."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import ROOT

MOST_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_MODULES = 15
SOURCES = (ROOT / "operator/src", ROOT / "trainer_image/src")
TESTS = (ROOT / "tests", ROOT / "bench", ROOT / "devtools")
BAD_BEGINNINGS = ("Of ", "By ", "Where ", "The same ")
# names that begin with an underscore and are not this project's own
FOREIGN = {"_dynamo", "_C", "_cuda_getDeviceCount", "_cuda_init", "_lazy_init", "_exit", "_replace"}


def modules(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name_of(path))


def long_files() -> Iterator[str]:
    for path in modules(*SOURCES, *TESTS):
        if len(path.read_text().splitlines()) > MOST_LINES:
            yield name_of(path)


def long_functions() -> Iterator[str]:
    for path in modules(*SOURCES, *TESTS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if (node.end_lineno or first) - first + 1 > MOST_FUNCTION_LINES:
                    yield f"{name_of(path)}: {node.name}"


def full_folders() -> Iterator[str]:
    counts = Counter(path.parent for path in modules(*SOURCES, *TESTS) if path.name != "__init__.py")
    yield from (name_of(folder) for folder, count in counts.items() if count > MOST_MODULES)


def unplain_docstrings() -> Iterator[str]:
    """Docstrings of modules, classes, functions and fields that begin with a word that hides what the thing is."""
    for path in modules(*SOURCES):
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = node.value.value
                if text.startswith(BAD_BEGINNINGS):
                    # by its words and not its file, which may move
                    yield " ".join(text.split())[:60]


def classes_of_one_name() -> Iterator[str]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in modules(*SOURCES):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(name_of(path))
    yield from (name for name, paths in found.items() if len(paths) > 1)


def fields_without_a_line() -> Iterator[str]:
    """Public fields of dataclasses and models without a line of documentation below them."""
    for path in modules(*SOURCES):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(one) for one in node.decorator_list):
                for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                    if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                        continue
                    documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                    if not documented and not field.target.id.startswith("_"):
                        yield f"{node.name}.{field.target.id}"


def star_imports() -> Iterator[str]:
    for path in modules(*SOURCES, *TESTS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                yield f"{name_of(path)}: {node.module}"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in FOREIGN


def uses_of_private_names() -> Iterator[str]:
    """Private attributes that a test or a bench takes of anything but itself, and private names that it imports."""
    for path in modules(*TESTS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and private(node.attr):
                of = node.value
                if not (isinstance(of, ast.Name) and of.id in ("self", "cls")):
                    yield f"{name_of(path)}: {node.attr}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cost_aware_"):
                yield from (f"{name_of(path)}: {alias.name}" for alias in node.names if private(alias.name))


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def imports_among_tests() -> Iterator[str]:
    for path in modules(ROOT / "tests"):
        for name in imports_of(path):
            if name.startswith("tests.") and not name.startswith("tests.support"):
                yield f"{name_of(path)}: {name}"


def units_without_a_room() -> Iterator[str]:
    """Folders of unit tests of a package that are no folder of the package."""
    for package, source in (
        ("operator", SOURCES[0] / "cost_aware_operator"),
        ("trainer", SOURCES[1] / "cost_aware_trainer"),
    ):
        tests = ROOT / "tests/unit" / package
        folders = {path.parent.relative_to(tests) for path in modules(tests) if path.name.startswith("test_")}
        yield from (f"{package}/{folder}" for folder in folders if not (source / folder).is_dir())


RULES: dict[str, Callable[[], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        long_files, long_functions, full_folders, unplain_docstrings, classes_of_one_name, fields_without_a_line, star_imports,
        uses_of_private_names, imports_among_tests, units_without_a_room,
    )
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_nothing_breaks_a_rule(rule: str) -> None:
    assert sorted(RULES[rule]()) == []


def test_benches_and_what_they_share_with_tests_import_no_tests() -> None:
    found = [
        name_of(p)
        for p in modules(ROOT / "bench", ROOT / "devtools")
        for name in imports_of(p)
        if name.startswith("tests")
    ]
    assert found == []
