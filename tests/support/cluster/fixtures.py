"""Fixtures of the tests that need the cluster: the operator of this checkout on it, and namespaces of their own."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator

import pytest
from devtools.cluster import Cluster, Space, script


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Cluster:
    """The cluster, with the operator of this checkout on it; of workers beside each other the first installs it."""
    # the folder that pytest gives to all workers of a run
    lock = tmp_path_factory.getbasetemp().parent / f"installed-{testrun_uid}"
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) == 0:
            script("install")
            file.write("yes")
    return Cluster.connect()


@pytest.fixture(scope="session")
def make_space(cluster: Cluster) -> Iterator[Callable[[str], Space]]:
    """Makes namespaces with volumes, and removes them in the end."""
    made: list[str] = []

    def make(prefix: str) -> Space:
        name = f"catj-{prefix}-{uuid.uuid4().hex[:6]}"
        made.append(name)
        script("volumes", name)
        return Space(cluster, name)

    yield make
    for name in made:
        script("forget", name)


@pytest.fixture(scope="module")
def space(request: pytest.FixtureRequest, make_space: Callable[[str], Space]) -> Iterator[Space]:
    """A namespace for the tests of one file, whose jobs end with it: one that a failed test left would train beside the next."""
    made = make_space(request.module.__name__.rsplit("test_", 1)[-1].replace("_", "-")[:20])
    yield made
    made.cluster.run("delete", "catj", "--all", "-n", made.name, "--wait=false")
