"""A state that is not finite on one rank is saved by none."""

import pytest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_on_one_rank_is_refused_by_name_on_all(pool, value):
    for said in pool.run(3, "check_finite", bad_rank=1, value=value):
        assert said.startswith("step 7: model.b is not finite after the update, so this state is not saved")


def test_infinities_that_were_there_from_the_start_are_no_reason(pool):
    assert pool.run(2, "check_finite", bad_rank=0, value=0.0) == ["", ""]
