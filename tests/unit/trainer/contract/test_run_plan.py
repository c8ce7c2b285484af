import dataclasses

import pytest

from cost_aware_trainer.contract import (
    BatchPlan,
    Compression,
    DegreesPlan,
    OptimizerPlan,
    RunPlan,
    Sharding,
    StrategyPlan,
)

LAYOUT_FIELDS = {
    "degrees": DegreesPlan(data=1, tensor=2),
    "strategy": StrategyPlan(sharding=Sharding.ZERO3),
    "batch": BatchPlan(global_samples=8, micro_samples=4),
}


@pytest.mark.parametrize("name", LAYOUT_FIELDS)
def test_another_layout_trains_the_same_run_by_other_work(make_plan, changed, name):
    plan = make_plan(data=2)
    other = changed(plan, **{name: LAYOUT_FIELDS[name]})
    assert plan.same_run_as(other)
    assert other.same_run_as(plan)
    assert not plan.same_layout_as(other)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunPlan) if f.name not in LAYOUT_FIELDS])
def test_every_other_field_of_a_plan_makes_another_run_of_the_same_layout(make_plan, changed, name):
    plan = make_plan(data=2)
    value = getattr(plan, name)
    if dataclasses.is_dataclass(value):
        first, *_ = dataclasses.fields(value)
        value = changed(value, **{first.name: getattr(value, first.name) * 2})
    else:
        value = value * 2
    other = changed(plan, **{name: value})
    assert not plan.same_run_as(other)
    assert plan.same_layout_as(other)


def test_another_global_batch_is_another_run_and_other_work(make_plan, changed):
    plan = make_plan(data=2)
    other = changed(plan, batch=BatchPlan(global_samples=16, micro_samples=2))
    assert not plan.same_run_as(other)
    assert not plan.same_layout_as(other)


def test_the_size_of_gradient_buckets_alone_is_no_other_layout(make_plan, changed):
    plan = make_plan(data=2, strategy=StrategyPlan(compression=Compression.INT8))
    other = changed(plan, strategy=changed(plan.strategy, bucket_mib=16.0))
    assert plan.same_layout_as(other)
    assert plan.same_run_as(other)
    assert plan != other


def test_a_plan_counts_the_micro_batches_of_a_replica(make_plan):
    assert make_plan(data=2, micro=2, optimizer=OptimizerPlan()).micro_batches == 2
    assert make_plan(data=1, micro=1).micro_batches == 8
