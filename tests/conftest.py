"""What all tests share: the fixtures of `tests/support`, and how examples of property tests are chosen."""

from __future__ import annotations

import os

import hypothesis

pytest_plugins = [
    "tests.support.rotation",
    "tests.support.cluster.fixtures",
    "tests.support.data_server",
    "tests.support.ranks.plans",
    "tests.support.ranks.runs",
    "tests.support.ranks.agents",
]

# Machines are busy at times, so no example has a deadline; in CI the same examples run each time, a failure there is a change's
hypothesis.settings.register_profile("tests", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("tests")
