import pytest

from cost_aware_trainer.contract import BatchPlan, DegreesPlan, OptimizerPlan
from cost_aware_trainer.validation import InvalidRunError, check_plan


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model.heads", 5, "model.heads: 5 does not divide model.hidden 32; write 4 or 8"),
        ("model.kv_heads", 3, "model.kv_heads: 3 does not divide model.heads 4; write 2 or 4"),
        ("model.hidden", 36, "rotary positions need an even size; write hidden: 40"),
        ("model.vocabulary", 100, "model.vocabulary: 100 cannot hold bytes; write 256 or more"),
        ("model.layers", 0, "model.layers: 0 is not positive"),
        ("degrees", DegreesPlan(data=1, tensor=2), "degrees.tensor: 2 is not supported"),
        ("degrees", DegreesPlan(pipeline=2), "degrees.pipeline: 2 is not supported"),
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
