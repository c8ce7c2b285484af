"""Trainer pods and the operator are killed at random moments of the demo's training; steps, samples and dollars stay right."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from devtools.cluster import OPERATOR_NAMESPACE, Space, example, merged
from tests.support.cluster.pod_lives import PodLives
from tests.support.cluster.truth import assert_books_close, assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
SEED = int(os.environ.get("CATJ_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
STEPS = 90


def delete_a_pod(space: Space, job: str, chance: random.Random) -> None:
    pod = chance.choice(space.pods(job))["metadata"]["name"]
    print(f"deleting {pod}")
    space.cluster.run("delete", "pod", pod, "-n", space.name, "--wait=false")


def kill_a_pod(space: Space, job: str, chance: random.Random) -> None:
    pod = chance.choice(space.pods(job))["metadata"]["name"]
    print(f"killing {pod}")
    space.cluster.run("delete", "pod", pod, "-n", space.name, "--grace-period=0", "--force", "--wait=false")


def kill_the_operator(space: Space, job: str, chance: random.Random) -> None:
    for pod in space.cluster.operator_pods():
        print(f"killing {pod}")
        space.cluster.run("delete", "pod", pod, "-n", OPERATOR_NAMESPACE, "--grace-period=0", "--force", "--wait=false")


Kill = Callable[[Space, str, random.Random], None]


# the operator is everybody's, and the pods are the job's own
@pytest.mark.parametrize("kill", [delete_a_pod, kill_a_pod, pytest.param(kill_the_operator, marks=pytest.mark.alone)])
def test_a_kill_at_a_random_moment_changes_neither_steps_nor_samples_nor_the_books(space: Space, kill: Kill) -> None:
    chance = random.Random(f"{SEED}-{kill.__name__}")
    job = kill.__name__.replace("_", "-")
    document = example()
    spec: dict[str, Any] = merged(
        document["spec"], {"trainer": {"config": {"steps": STEPS}}, "checkpoint": {"intervalSeconds": 8}}
    )
    document["metadata"]["name"], document["spec"] = job, spec
    with PodLives(space, job) as lives:
        space.submit(document)
        space.wait(job, lambda s: s.get("attempt") == 1, 90, "first attempt")
        pause = chance.uniform(0, 45)
        print(f"seed {SEED}: after {pause:.1f} s")
        time.sleep(pause)
        kill(space, job, chance)
        status = space.wait_finished(job, 700)
        time.sleep(1)
    assert status["state"] == "Succeeded", status
    assert_exactly_once(space, job, spec, status)
    assert_books_close(status, lives)
    if kill is kill_the_operator:
        assert status["attempt"] == 1, "training goes on without its operator"
