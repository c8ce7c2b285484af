"""A run that changes its layout in living processes is the same run."""

import dataclasses
import random
import statistics

import pytest
from tests.support.ranks.layouts import MODELS, assert_same_run, layouts
from tests.support.ranks.pool import PoolError

from cost_aware_trainer.contract import DegreesPlan, Redundancy, Schedule, Sharding

WAYS = [
    *((degrees, {}) for degrees in layouts(4)),
    (DegreesPlan(data=4), {"sharding": Sharding.ZERO3}),
    (DegreesPlan(data=2, tensor=2), {"sharding": Sharding.ZERO2}),
    (DegreesPlan(data=2, pipeline=2), {"schedule": Schedule.ZERO_BUBBLE_V, "interleave": 2, "micro": 2}),
    (DegreesPlan(tensor=2, pipeline=2), {"schedule": Schedule.INTERLEAVED, "interleave": 2}),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_walk_over_all_ways_trains_the_same_samples_to_the_same_losses(pool, plan_of, reference, tied):
    model = dataclasses.replace(MODELS[4], tied_embeddings=tied)
    first = plan_of(WAYS[0][0], model=model)
    folder = first.checkpoint.folder
    ways = [plan_of(degrees, model=model, folder=folder, **way) for degrees, way in WAYS[1:]]
    successors = {2 * number: way.to_json() for number, way in enumerate(ways, start=1)}
    run = pool.run(4, "reconfigure", plan=first.to_json(), successors=successors)[0]
    assert_same_run(run, reference(model))
    changed = [step for step in run["steps"] if step["attempt"] and "reconfiguration_seconds" in step]
    assert [step["step"] for step in changed] == [2 * number + 1 for number in range(1, len(WAYS))]
    assert [step["attempt"] for step in changed] == list(range(1, len(WAYS)))


@pytest.mark.alone
def test_ten_random_changes_leave_the_samples_as_they_are_in_about_a_second_each(pool, plan_of, reference):
    chooser = random.Random(5)
    first = plan_of(DegreesPlan(data=4), steps=30)
    ways = [plan_of(degrees, folder=first.checkpoint.folder, steps=30) for degrees in layouts(4)]
    steps = [2 * half for half in sorted(chooser.sample(range(1, 15), 10))]
    successors = {step: chooser.choice(ways).to_json() for step in steps}
    run = pool.run(4, "reconfigure", plan=first.to_json(), successors=successors)[0]
    alone = pool.run(1, "train", plan=plan_of(steps=30).to_json())[0]
    assert_same_run(run, alone)
    changed = [step for step in run["steps"] if step["attempt"] and "reconfiguration_seconds" in step]
    seconds = [sum(step["reconfiguration_seconds"].values()) for step in changed]
    assert len(seconds) == 10
    # Each process group has threads; those of ten former layouts would be a hundred. The pool's own, after whatever ran in it
    # before, are about forty.
    assert run["threads"] < 70
    # On an idle machine of two cores about 0.3 s; the bound leaves room for a busy one.
    assert statistics.median(seconds) < 3, seconds


@pytest.mark.parametrize("kind", [Redundancy.REPLICA, Redundancy.PARITY])
def test_copies_in_memory_go_along_with_the_layout(pool, plan_of, reference, tmp_path, kind):
    copied = {"redundancy": kind, "redundancy_interval_seconds": 0.001}
    ways = [DegreesPlan(data=4), DegreesPlan(data=2, tensor=2), DegreesPlan(pipeline=4)]
    plans = [plan_of(degrees, folder=tmp_path / "run") for degrees in ways]
    plans = [dataclasses.replace(p, checkpoint=dataclasses.replace(p.checkpoint, **copied)) for p in plans]
    successors = {5: plans[1].to_json(), 11: plans[2].to_json()}
    memory = str(tmp_path / "memory")
    run = pool.run(4, "reconfigure", plan=plans[0].to_json(), successors=successors, memory=memory)[0]
    assert_same_run(run, reference(MODELS[4]))
    assert {step["attempt"] for step in run["steps"]} == {0, 1, 2}
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_plan_that_cannot_follow_ends_the_run_with_its_reason(pool, plan_of):
    first = plan_of(DegreesPlan(data=2))
    wrong = dataclasses.replace(plan_of(DegreesPlan(tensor=2), folder=first.checkpoint.folder), seed=1)
    with pytest.raises(PoolError, match=r"only degrees, strategy and batch\.micro_samples can change"):
        pool.run(2, "reconfigure", plan=first.to_json(), successors={2: wrong.to_json()})
