"""No operator looks for minutes, and the run ends meanwhile: whoever comes back finds out all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from devtools.cluster import OPERATOR_NAMESPACE, Space, manifest
from tests.support.cluster.pod_lives import PodLives
from tests.support.cluster.truth import assert_books_close, assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture
def scaled(space: Space) -> Iterator[Callable[[int], None]]:
    """Sets how many operators there are; as many as before in the end."""
    (deployment,) = space.cluster.get("deployments", "-n", OPERATOR_NAMESPACE)["items"]

    def scale(replicas: int) -> None:
        name = deployment["metadata"]["name"]
        space.cluster.run("scale", "deployment", name, "-n", OPERATOR_NAMESPACE, f"--replicas={replicas}")
        space.cluster.wait_for_operator()

    yield scale
    scale(deployment["spec"]["replicas"])


def test_what_a_run_came_to_is_known_after_its_agents_have_gone_unheard(
    space: Space, scaled: Callable[[int], None]
) -> None:
    document = manifest(
        "alone-to-the-end", trainer={"config": {"steps": 2000}}, nodes={"instanceTypes": ["p3.2xlarge"]}
    )
    with PodLives(space, "alone-to-the-end") as lives:
        space.submit(document)
        space.wait_step("alone-to-the-end", 1)
        scaled(0)
        # agents of a complete run wait two minutes for the operator's leave
        until = time.monotonic() + 300
        while any(pod["status"]["phase"] != "Succeeded" for pod in space.pods("alone-to-the-end")):
            assert time.monotonic() < until, "the run did not complete by itself"
            time.sleep(1)
        assert "samplesChecksum" not in space.status("alone-to-the-end")["progress"], "the operator saw the end"
        scaled(1)
        status = space.wait_finished("alone-to-the-end", 120)
        time.sleep(1)
    assert status["state"] == "Succeeded", status
    assert_exactly_once(space, "alone-to-the-end", document["spec"], status)
    assert_books_close(status, lives)
