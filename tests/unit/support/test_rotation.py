"""CI runs another twentieth of the exhaustive tests at each commit, and the same one when a commit is run again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import ROOT
from tests.support.rotation import PARTS, one_of, part_of_commit, part_of_test, rotated

TESTS = [f"tests/layouts/test_equivalence.py::test_layout[{number}]" for number in range(1000)]
COMMITS = [hashlib.sha1(str(number).encode(), usedforsecurity=False).hexdigest() for number in range(400)]


def test_every_test_belongs_to_one_part_and_the_parts_are_alike_in_size() -> None:
    sizes = [sum(part_of_test(test) == part for test in TESTS) for part in range(PARTS)]
    assert sum(sizes) == len(TESTS)
    assert min(sizes) > 25
    assert max(sizes) < 80


def test_commits_choose_every_part_about_as_often_as_any_other() -> None:
    chosen = [part_of_commit(commit) for commit in COMMITS]
    assert set(chosen) == set(range(PARTS))
    assert max(chosen.count(part) for part in range(PARTS)) < 3 * len(COMMITS) / PARTS


def test_a_commit_runs_the_same_tests_in_their_order_every_time_and_all_commits_run_all() -> None:
    assert (
        rotated(TESTS, COMMITS[0]) == rotated(TESTS, COMMITS[0]) == sorted(rotated(TESTS, COMMITS[0]), key=TESTS.index)
    )
    assert {test for commit in COMMITS for test in rotated(TESTS, commit)} == set(TESTS)


def test_one_of_a_few_is_chosen_each_by_about_as_many_commits() -> None:
    few = TESTS[:4]
    chosen = [test for commit in COMMITS for test in one_of(few, commit)]
    assert len(chosen) == len(COMMITS)
    assert one_of(reversed(few), COMMITS[0]) == one_of(few, COMMITS[0])
    assert min(chosen.count(test) for test in few) > len(COMMITS) / 8
    assert one_of([], COMMITS[0]) == []


def test_a_short_hash_in_capitals_is_a_hash_and_a_branch_s_name_is_not() -> None:
    assert part_of_commit("ABC12") == part_of_commit("abc12")
    with pytest.raises(ValueError, match="main"):
        part_of_commit("main")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A suite of two hundred tests under this plugin."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.rotation"]\n')
    (tmp_path / "test_many.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(200))\ndef test_one(n):\n    pass\n"
    )
    return tmp_path


def collected(folder: Path, *options: str) -> tuple[int, list[str]]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-q",
        f"--rootdir={folder}",
        *options,
    ]
    done = subprocess.run(
        [*command, "-c", "/dev/null", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if "::" in line or "--" in line]


def test_pytest_collects_a_commit_s_tests_and_no_others(many: Path) -> None:
    code, everything = collected(many)
    assert (code, len(everything)) == (0, 200)
    for commit in COMMITS[:2]:
        code, lines = collected(many, f"--twentieth={commit}")
        assert code == 0
        assert lines == rotated(everything, commit)
        assert 0 < len(lines) < 40


def test_a_part_without_a_test_is_no_failure(many: Path) -> None:
    (many / "test_many.py").write_text("def test_only():\n    pass\n")
    found = [collected(many, f"--twentieth={commit}") for commit in COMMITS[:3]]
    assert {code for code, _ in found} == {0}
    assert [] in [lines for _, lines in found]


def test_what_is_no_commit_is_refused_with_what_to_write(many: Path) -> None:
    code, lines = collected(many, "--twentieth=main")
    assert code != 0
    assert any("'main' is no hash of a commit; write `git rev-parse HEAD`" in line for line in lines)
