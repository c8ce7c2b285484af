"""Fixtures of small runs: sources, data made of them, and plans that train on these."""

import dataclasses
import random

import pytest

from cost_aware_trainer.contract import BatchPlan, CheckpointPlan, DegreesPlan, ModelPlan, OptimizerPlan, RunPlan
from cost_aware_trainer.data.token_files import prepare

MODEL = ModelPlan(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence_length=16, vocabulary=256)


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    chooser = random.Random(0)
    for index in range(150):
        lines = [f"def f{chooser.randrange(50)}(x):\n    return x + {chooser.randrange(99)}\n" for _ in range(20)]
        (folder / f"module_{index}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory, source_folder):
    folder = tmp_path_factory.mktemp("data")
    assert prepare(folder, source_folder)
    return folder


@pytest.fixture
def make_plan(data_folder, tmp_path):
    def make(name="checkpoints", *, data=1, steps=12, interval_seconds=3600.0, keep=2, model=MODEL, micro=2, **changes):
        return RunPlan(
            steps=steps,
            model=model,
            batch=BatchPlan(global_samples=8, micro_samples=micro),
            checkpoint=CheckpointPlan(folder=str(tmp_path / name), interval_seconds=interval_seconds, keep=keep),
            data_folder=str(data_folder),
            degrees=DegreesPlan(data=data),
            optimizer=changes.pop("optimizer", OptimizerPlan(warmup_steps=3)),
            evaluate_every_steps=5,
            evaluation_samples=10,
            seed=7,
            **changes,
        )

    return make


@pytest.fixture
def changed():
    return dataclasses.replace
