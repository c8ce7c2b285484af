"""A step reads the device once, whatever it trains: each further read would stand in the way of a GPU's queue."""

import pytest

from cost_aware_trainer.contract import DegreesPlan, Precision, Recompute, Schedule, Sharding

LAYOUTS = {
    "one": (DegreesPlan(), {}),
    "micro-batches": (DegreesPlan(), {"micro": 1}),
    "data": (DegreesPlan(data=2), {}),
    "tensor": (DegreesPlan(tensor=2), {"precision": Precision.BF16}),
    "pipeline": (DegreesPlan(pipeline=2), {"schedule": Schedule.ONE_FORWARD_ONE_BACKWARD, "recompute": Recompute.FULL}),
    "zero1": (DegreesPlan(data=2), {"sharding": Sharding.ZERO1}),
    "zero3": (DegreesPlan(data=2), {"sharding": Sharding.ZERO3, "recompute": Recompute.SELECTIVE}),
    "all": (DegreesPlan(data=2, tensor=2, pipeline=2), {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_the_trainer_reads_the_device_once(pool, plan_of, name):
    degrees, strategy = LAYOUTS[name]
    plan = plan_of(degrees, steps=30, **strategy)
    for rank in pool.run(degrees.ranks, "host_reads", plan=plan.to_json(), steps=3):
        for places in rank:
            assert len(places) == 1, places
            assert places[0].startswith("votes.py")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_of_a_session_reads_the_device_once(pool, tmp_path, world, micro_batches):
    folder = str(tmp_path / "run")
    for rank in pool.run(world, "session_host_reads", folder=folder, micro_batches=micro_batches, steps=3):
        for places in rank[:-1]:
            assert len(places) == 1, places
            assert places[0].startswith("votes.py")
