"""The models and plans that the layouts are compared on."""

import dataclasses

import pytest
from tests.support.ranks.layouts import GLOBAL_SAMPLES, MODELS

from cost_aware_trainer.contract import BatchPlan, CheckpointPlan, DegreesPlan, OptimizerPlan, RunPlan, StrategyPlan


@pytest.fixture(scope="session")
def plan_of(data_folder, tmp_path_factory):
    def make(degrees=DegreesPlan(), *, model=MODELS[4], folder=None, micro=None, steps=20, **strategy):  # noqa: B008
        share = GLOBAL_SAMPLES // degrees.data
        # As many micro-batches as stages; two without stages, so that gradients are accumulated.
        micro = micro or max(1, share // (degrees.pipeline if degrees.pipeline > 1 else 2))
        folder = folder or tmp_path_factory.mktemp("checkpoints") / "run"
        return RunPlan(
            steps=steps,
            model=model,
            batch=BatchPlan(global_samples=GLOBAL_SAMPLES, micro_samples=micro),
            checkpoint=CheckpointPlan(folder=str(folder), interval_seconds=3600.0),
            data_folder=str(data_folder),
            degrees=degrees,
            strategy=StrategyPlan(**strategy),
            optimizer=OptimizerPlan(warmup_steps=3),
            evaluate_every_steps=10,
            evaluation_samples=10,
            seed=7,
        )

    return make


@pytest.fixture(scope="session")
def train(pool):
    """Rank 0's account of a run under a plan."""

    def run(plan, **arguments):
        answers = pool.run(plan.degrees.ranks, "train", plan=plan.to_json(), **arguments)
        return answers[0]

    return run


@pytest.fixture(scope="session")
def reference(train, plan_of):
    """The same run on one rank, trained once for each model."""
    runs = {}

    def of(model, **strategy):
        key = (*dataclasses.astuple(model), *strategy.items())
        if key not in runs:
            runs[key] = train(plan_of(model=model, **strategy))
        return runs[key]

    return of
