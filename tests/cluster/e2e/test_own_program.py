"""The example of a program of one's own, on the cluster: trained, suspended, and resumed on another number of nodes."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from devtools.cluster import Space, script
from tests.support import ROOT

pytestmark = [pytest.mark.cluster]

STEPS = 2000


@pytest.fixture
def program(space: Space) -> Iterator[str]:
    """The script's folder in the claim `data`, with scikit-learn beside it, as an image of one's own would have it."""
    folder = Path(script("folder", "data")) / space.name
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "examples/digits/train.py", folder)
    for name in ("sklearn", "scipy", "joblib", "cloudpickle", "threadpoolctl", "narwhals"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        source = Path(found.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, folder / name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
            libraries = source.parent.with_name(f"{name if name != 'sklearn' else 'scikit_learn'}.libs")
            if libraries.exists():
                shutil.copytree(libraries, folder / libraries.name)
        else:
            shutil.copy(source, folder)
    yield space.name
    shutil.rmtree(folder)


def test_a_program_of_one_s_own_is_suspended_and_goes_on_under_more_nodes(space: Space, program: str) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    spec = document["spec"]
    spec["trainer"]["command"] = ["/opt/digits/train.py", "--folder", "/checkpoints/digits", "--steps", str(STEPS)]
    spec["nodes"] |= {"min": 1, "max": 1}
    del spec["template"]["image"]
    spec["template"] |= {
        "volumes": [{"name": "digits", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}}],
        "volumeMounts": [{"name": "digits", "mountPath": "/opt/digits", "subPath": program, "readOnly": True}],
    }
    space.submit(document)
    space.wait_step("digits", 100)
    space.patch("digits", {"suspend": True})
    space.wait("digits", lambda s: s.get("state") == "Suspended" and not space.pods("digits"), 90, "suspension")
    reached = space.status("digits")["progress"]["step"]
    assert 100 <= reached < STEPS
    assert space.patch("digits", {"nodes": {"min": 2, "max": 2}}).returncode == 0
    space.patch("digits", {"suspend": False})
    status = space.wait_finished("digits", 240)
    assert status["state"] == "Succeeded", status
    assert status["plan"]["nodes"] == len({p["spec"]["nodeName"] for p in space.pods("digits")}) == 2
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == STEPS
    log = space.cluster.run(
        "logs", "-n", space.name, "-l", "batch.kubernetes.io/job-completion-index=0", "--tail=-1"
    ).stdout
    last = next(line for line in log.splitlines() if line.startswith(f"step {STEPS} accuracy"))
    assert float(last.split()[3]) > 0.95, last
    assert last.split()[5] == status["progress"]["samplesChecksum"]
    assert sum(status["cost"]["byCause"].values()) == pytest.approx(status["cost"]["accruedUSD"], rel=0.005)
