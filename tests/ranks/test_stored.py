"""A checkpoint that the version before has written is loaded, and the run goes on from it as if nobody had stopped it."""

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest

from cost_aware_trainer.contract import BatchPlan, DegreesPlan, RunPlan
from cost_aware_trainer.state.manifests import read_verified

GOLDEN = Path(__file__).resolve().parents[1] / "unit/trainer/golden"
STEP = 5


@pytest.fixture
def kept(tmp_path):
    """The plan of the run whose checkpoint is kept, over a copy of its data and its checkpoint; and the losses of its steps."""
    with tarfile.open(GOLDEN / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = json.loads((GOLDEN / "run.json").read_text())
    plan = RunPlan.from_document(run["plan"])
    checkpoint = dataclasses.replace(plan.checkpoint, folder=str(tmp_path / "checkpoint"))
    plan = dataclasses.replace(plan, checkpoint=checkpoint, data_folder=str(tmp_path / "data"))
    return plan, {int(step): loss for step, loss in run["losses"].items()}, run["samples_checksum"]


def test_a_checkpoint_of_the_version_before_is_whole_and_names_its_tensors(kept):
    plan, _, _ = kept
    manifest = read_verified(Path(plan.checkpoint.folder) / f"step-{STEP:08d}")
    assert (manifest.step, manifest.samples, manifest.run.seed) == (STEP, STEP * 8, plan.seed)
    assert len(manifest.tensors) > 20


@pytest.mark.parametrize("degrees", [DegreesPlan(data=2), DegreesPlan(pipeline=2)], ids=["as saved", "as stages"])
def test_a_run_of_the_version_before_goes_on_from_its_checkpoint_with_the_same_losses(kept, finish, degrees):
    plan, losses, checksum = kept
    run = finish(dataclasses.replace(plan, degrees=degrees, batch=BatchPlan(global_samples=8, micro_samples=2)))
    assert [step["step"] for step in run.steps] == list(range(STEP + 1, plan.steps + 1))
    assert [step["loss"] for step in run.steps] == pytest.approx([losses[s["step"]] for s in run.steps], abs=1e-4)
    assert run.result.samples_checksum == checksum
