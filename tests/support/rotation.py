"""Pytest's options `--twentieth COMMIT` and `--one-of COMMIT`: they run a part of the selected tests, another one for another commit.

Each test belongs to one of twenty parts by the hash of its id, and each commit chooses a part by its own hash. The same commit
therefore always runs the same tests, and twenty parts together are all of them. `--one-of` runs a single test: for a few that take
minutes each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest

PARTS = 20


def part_of_test(test_id: str) -> int:
    """Number of the part that a test belongs to."""
    return int.from_bytes(hashlib.sha256(test_id.encode()).digest()[:8], "big") % PARTS


def part_of_commit(commit: str) -> int:
    """Number of the part that a commit runs.

    Raises:
        ValueError: the text is no hexadecimal hash of a commit.
    """
    return int(hashlib.sha256(f"{int(commit, 16):x}".encode()).hexdigest(), 16) % PARTS


def rotated(test_ids: Sequence[str], commit: str) -> list[str]:
    """Ids of the tests that a commit runs, in their order."""
    part = part_of_commit(commit)
    return [test_id for test_id in test_ids if part_of_test(test_id) == part]


def one_of(test_ids: Sequence[str], commit: str) -> list[str]:
    """The one test that a commit runs; none of none."""
    ordered = sorted(test_ids)
    chosen = int(hashlib.sha256(f"{int(commit, 16):x}".encode()).hexdigest(), 16)
    return [ordered[chosen % len(ordered)]] if ordered else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of", metavar="COMMIT", help="run one of the selected tests, chosen by the hash of a commit")
    parser.addoption(
        "--twentieth", metavar="COMMIT", help="run one twentieth of the selected tests, chosen by the hash of a commit"
    )


_OPTIONS = {"--twentieth": rotated, "--one-of": one_of}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what does not belong to the commit's part; runs after `-m` and `-k` have chosen."""
    for option, choose in _OPTIONS.items():
        commit = config.getoption(option)
        if commit is not None:
            _keep(config, items, option, choose, commit)


def _keep(
    config: pytest.Config,
    items: list[pytest.Item],
    option: str,
    choose: Callable[[Sequence[str], str], list[str]],
    commit: str,
) -> None:
    try:
        chosen = set(choose([item.nodeid for item in items], commit))
    except ValueError as error:
        raise pytest.UsageError(f"{option}: '{commit}' is no hash of a commit; write `git rev-parse HEAD`") from error
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A part without a test is no failure: few tests make for empty parts."""
    if session.config.getoption("--twentieth") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
