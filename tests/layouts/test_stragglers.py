"""A slow rank shows on those that wait for it, as its doing and not as the network's."""

import statistics

import pytest

from cost_aware_trainer.contract import DegreesPlan

DELAY_SECONDS = 0.15


def waits(steps):
    """Median seconds of a step by phase, without the first, which builds things up."""
    return {phase: statistics.median(s["seconds"][phase] for s in steps[1:]) for phase in steps[0]["seconds"]}


@pytest.mark.alone
@pytest.mark.parametrize("degrees", [DegreesPlan(data=4), DegreesPlan(data=2, tensor=2), DegreesPlan(tensor=4)])
def test_peers_of_a_slow_rank_book_their_wait_for_it_and_it_does_not(pool, plan_of, degrees):
    plan = plan_of(degrees, steps=10, micro=16 // degrees.data)
    ranks = pool.run(4, "straggle", plan=plan.to_json(), slow_rank=1, seconds=DELAY_SECONDS)
    assert all(sum(s["seconds"].values()) == pytest.approx(s["step_seconds"]) for steps in ranks for s in steps)
    slow, *others = waits(ranks[1]), *(waits(ranks[rank]) for rank in (0, 2, 3))
    assert slow["straggler_wait"] < 0.3 * DELAY_SECONDS
    for other in others:
        assert 0.6 * DELAY_SECONDS < other["straggler_wait"] < 1.5 * DELAY_SECONDS
        # What is left is what sending takes on this machine, and that is all that the slow rank itself waits for.
        left = (steps["communication"] + steps["tensor_communication"] for steps in (other, slow))
        assert next(left) < next(left) + 0.6 * DELAY_SECONDS


@pytest.mark.alone
def test_stages_of_a_pipeline_are_not_compared(pool, plan_of):
    plan = plan_of(DegreesPlan(data=2, pipeline=2), steps=10)
    ranks = pool.run(4, "straggle", plan=plan.to_json(), slow_rank=0, seconds=DELAY_SECONDS)
    step_delay = DELAY_SECONDS * (16 // 2 // plan.batch.micro_samples)
    assert waits(ranks[1])["straggler_wait"] > 0.6 * step_delay
    for rank in (2, 3):
        assert waits(ranks[rank])["straggler_wait"] < 0.3 * step_delay
