"""What a person does with `catj` on a real cluster: a job is made, looked at, changed and deleted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from devtools.cluster import Space, manifest

pytestmark = pytest.mark.cluster
NAME = "by-command"


def catj(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "cost_aware_operator.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_job_is_submitted_listed_suspended_resumed_and_deleted(space: Space, tmp_path: Path) -> None:
    file, here = tmp_path / "job.yaml", ("-n", space.name)
    file.write_text(yaml.safe_dump(manifest(NAME, trainer={"config": {"steps": 100_000}})))
    assert f"{space.name}/{NAME}: is submitted" in catj("submit", str(file), *here)
    assert "there is a job of this name" in catj("submit", str(file), *here, code=2)
    space.wait_step(NAME, 1)
    (listed,) = json.loads(catj("list", *here, "-o", "json"))["items"]
    assert listed["metadata"]["name"] == NAME
    assert f"{space.name}/{NAME}" in catj("list", *here)
    assert "Running" in catj("status", NAME, *here)
    assert "Planned" in catj("events", NAME, *here)
    assert "is being suspended" in catj("suspend", NAME, *here)
    space.wait(NAME, lambda s: s.get("state") == "Suspended", 120, "suspension")
    assert "goes on from its newest checkpoint" in catj("resume", NAME, *here)
    space.wait(NAME, lambda s: s.get("state") != "Suspended", 60, "resumption")
    assert "is deleted" in catj("delete", NAME, *here)
    space.wait_until(lambda: not space.exists(NAME), 60, "deletion")
    for verb in ("status", "events", "suspend", "resume", "delete"):
        assert "there is no such job" in catj(verb, NAME, *here, code=3)
