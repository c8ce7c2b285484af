"""Pytest's option `--twentieth COMMIT`: runs one twentieth of the selected tests, another one for another commit.

Each test belongs to one of twenty parts by the hash of its id, and each commit chooses a part by its own hash. The same commit
therefore always runs the same tests, and twenty parts together are all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--twentieth", metavar="COMMIT", help="run one twentieth of the selected tests, chosen by the hash of a commit"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what does not belong to the commit's part; runs after `-m` and `-k` have chosen."""
    commit = config.getoption("--twentieth")
    if commit is None:
        return
    try:
        chosen = set(rotated([item.nodeid for item in items], commit))
    except ValueError as error:
        raise pytest.UsageError(
            f"--twentieth: '{commit}' is no hash of a commit; write `git rev-parse HEAD`"
        ) from error
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A part without a test is no failure: few tests make for empty parts."""
    if session.config.getoption("--twentieth") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
