"""Buckets change when gradients travel, and nothing else."""

import statistics

import pytest
from tests.support.ranks.layouts import MODELS, assert_same_run

from cost_aware_trainer.contract import Compression, DegreesPlan


def overlapped(run):
    return statistics.median(step["overlapped_seconds"] / step["step_seconds"] for step in run["steps"][1:])


@pytest.mark.alone
@pytest.mark.parametrize("degrees", [DegreesPlan(data=4), DegreesPlan(data=2, pipeline=2)])
def test_losses_do_not_depend_on_buckets_and_small_ones_travel_behind_computation(train, plan_of, reference, degrees):
    small, whole = (train(plan_of(degrees, bucket_mib=mib)) for mib in (0.004, 1024.0))
    for run in (small, whole):
        assert_same_run(run, reference(MODELS[4]))
        assert all(0 <= step["overlapped_seconds"] < step["step_seconds"] for step in run["steps"])
    # A bucket that holds all is complete when there is nothing left to compute. What a busy machine lets pass between its start and
    # the end of the backward pass counts as overlap too, so nothing is said of how much less.
    assert overlapped(small) > 0.02
    assert overlapped(small) > overlapped(whole)


@pytest.mark.alone
def test_compressed_sums_are_timed_too(train, plan_of):
    run = train(plan_of(DegreesPlan(data=2), bucket_mib=0.004, compression=Compression.INT8))
    assert overlapped(run) > 0.02


def test_a_run_goes_on_in_process_with_other_buckets(pool, plan_of, reference):
    first = plan_of(DegreesPlan(data=4))
    other = plan_of(DegreesPlan(data=4), folder=first.checkpoint.folder, bucket_mib=0.01)
    run = pool.run(4, "reconfigure", plan=first.to_json(), successors={5: other.to_json()})[0]
    assert_same_run(run, reference(MODELS[4]))
    assert {step["attempt"] for step in run["steps"]} == {0, 1}
