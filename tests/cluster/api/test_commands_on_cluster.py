"""What a person does with `catj` on a real cluster: a job is made, looked at, changed and deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from devtools.cluster import Space, manifest

pytestmark = pytest.mark.cluster
NAME = "by-command"


def catj_of(space: Space) -> Callable[..., str]:
    """`catj` with the cluster's kubeconfig in the test's namespace: what it prints, if it ends as expected."""

    def catj(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "cost_aware_operator.cli.main", *arguments, "-n", space.name]
        environment = os.environ | {"KUBECONFIG": space.cluster.kubeconfig}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return catj


def test_a_job_is_submitted_listed_suspended_resumed_and_deleted(space: Space, tmp_path: Path) -> None:
    file, catj = tmp_path / "job.yaml", catj_of(space)
    file.write_text(yaml.safe_dump(manifest(NAME, trainer={"config": {"steps": 100_000}})))
    assert f"{space.name}/{NAME}: is submitted" in catj("submit", str(file))
    assert "there is a job of this name" in catj("submit", str(file), code=2)
    space.wait_step(NAME, 1)
    (listed,) = json.loads(catj("list", "-o", "json"))["items"]
    assert listed["metadata"]["name"] == NAME
    assert f"{space.name}/{NAME}" in catj("list")
    assert "Running" in catj("status", NAME)
    assert "Planned" in catj("events", NAME)
    assert "is being suspended" in catj("suspend", NAME)
    space.wait(NAME, lambda s: s.get("state") == "Suspended", 120, "suspension")
    assert "goes on from its newest checkpoint" in catj("resume", NAME)
    space.wait(NAME, lambda s: s.get("state") != "Suspended", 60, "resumption")
    assert "is deleted" in catj("delete", NAME)
    space.wait_until(lambda: not space.exists(NAME), 60, "deletion")
    assert "Planned" in catj("events", NAME), "what happened to it stays for an hour"
    for verb in ("status", "suspend", "resume", "delete"):
        assert "there is no such job" in catj(verb, NAME, code=3)
