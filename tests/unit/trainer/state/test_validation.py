import pytest

from cost_aware_trainer.contract import (
    BatchPlan,
    DegreesPlan,
    OptimizerPlan,
    Recompute,
    Schedule,
    Sharding,
    StrategyPlan,
)
from cost_aware_trainer.state.validation import InvalidRunError, check_plan


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model.heads", 5, "model.heads: 5 does not divide model.hidden 32; write 4 or 8"),
        ("model.kv_heads", 3, "model.kv_heads: 3 does not divide model.heads 4; write 2 or 4"),
        ("model.hidden", 36, "rotary positions need an even size; write hidden: 40"),
        ("model.vocabulary", 100, "model.vocabulary: 100 cannot hold bytes; write 256 or more"),
        ("model.layers", 0, "model.layers: 0 is not positive"),
        ("degrees", DegreesPlan(tensor=2, data=2), "= 4 ranks, but 2 were started; write data: 1 or start 4"),
        ("degrees", DegreesPlan(data=4), "data 4 × tensor 1 × pipeline 1 = 4 ranks, but 2 were started; write data: 2"),
        ("batch", BatchPlan(global_samples=10, micro_samples=4), "10 is not a multiple .* = 8; write 8 or 16, or"),
        ("batch", BatchPlan(global_samples=7, micro_samples=1), "7 is not a multiple .* = 2; write 6 or 8$"),
        ("steps", 0, "steps: 0 is not positive"),
        ("optimizer", OptimizerPlan(learning_rate=1e-4), "minimum_learning_rate: 0.0003 is not between"),
        ("optimizer", OptimizerPlan(warmup_steps=-1), "optimizer.warmup_steps: -1 is negative"),
        ("optimizer", OptimizerPlan(learning_rate=float("nan")), "learning_rate: nan is not positive"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_nearest_possible_value(make_plan, changed, field, value, says):
    plan = make_plan(data=2)
    check_plan(plan, 2)
    outer, _, inner = field.partition(".")
    new = changed(getattr(plan, outer), **{inner: value}) if inner else value
    with pytest.raises(InvalidRunError, match=says):
        check_plan(changed(plan, **{outer: new}), 2)


STRATEGIES = [
    (DegreesPlan(tensor=4), {}, "degrees.tensor: 4 does not divide model.kv_heads 2; write 2$"),
    (DegreesPlan(pipeline=4), {}, "4 stages for model.layers 2; write pipeline: 2 or fewer"),
    (DegreesPlan(pipeline=2), {"stage_layers": (2, 1)}, r"\[2, 1\] are not 2 positive counts .* write \[1, 1\]"),
    (
        DegreesPlan(pipeline=2),
        {"schedule": Schedule.INTERLEAVED},
        "interleave: 1 does not go with .* interleaved; write 2",
    ),
    (DegreesPlan(data=2), {"interleave": 2}, "interleave: 2 does not go with degrees.pipeline 1; write 1"),
    (
        DegreesPlan(pipeline=2),
        {"schedule": Schedule.ZERO_BUBBLE, "recompute": Recompute.FULL},
        "recompute: full does not go with strategy.schedule zero-bubble",
    ),
    (
        DegreesPlan(pipeline=2, data=2),
        {"schedule": Schedule.ZERO_BUBBLE, "sharding": Sharding.ZERO3},
        "sharding: zero3 does not go with strategy.schedule zero-bubble; write none, or schedule: 1f1b",
    ),
    (DegreesPlan(pipeline=2), {"schedule": Schedule.ZERO_BUBBLE, "compile": True}, "compile: true does not go"),
]


@pytest.mark.parametrize(("degrees", "strategy", "says"), STRATEGIES)
def test_a_strategy_that_cannot_work_is_refused_with_one_that_can(make_plan, changed, degrees, strategy, says):
    plan = changed(make_plan(), degrees=degrees, strategy=StrategyPlan(**strategy))
    with pytest.raises(InvalidRunError, match=says):
        check_plan(plan, degrees.ranks)


def test_a_schedule_says_which_micro_batch_gives_it_enough_of_them(make_plan, changed):
    plan = changed(make_plan(), degrees=DegreesPlan(pipeline=2), batch=BatchPlan(global_samples=8, micro_samples=8))
    with pytest.raises(InvalidRunError, match=r"1 micro-batches, but strategy.schedule 1f1b needs 2 .*; write 4"):
        check_plan(plan, 2)
