import pytest

from cost_aware_trainer.agent.supervisor import can_follow_in_process
from cost_aware_trainer.contract import BatchPlan, DegreesPlan, RunOrder, Sharding, StrategyPlan


@pytest.fixture
def running(make_plan):
    return RunOrder(
        version=1, namespace="n", job="j", attempt=3, nodes=2, ranks_per_node=1, rendezvous_host="h",
        entry=("-m", "cost_aware_trainer", "--plan", "/run/catj/attempt-3/plan.json"), plan=make_plan(data=2),
    )  # fmt: skip


def following(changed, running, **plan):
    entry = ("-m", "cost_aware_trainer", "--plan", "/run/catj/attempt-4/plan.json")
    return changed(running, attempt=4, entry=entry, plan=changed(running.plan, **plan))


@pytest.mark.parametrize(
    "change",
    [
        {"degrees": DegreesPlan(tensor=2)},
        {"batch": BatchPlan(global_samples=8, micro_samples=4)},
        {"strategy": StrategyPlan(sharding=Sharding.ZERO3)},
    ],
)
def test_another_layout_of_the_same_run_needs_no_restart(changed, running, change):
    assert can_follow_in_process(running, following(changed, running, **change))


@pytest.mark.parametrize(
    "change", [{}, {"seed": 9}, {"steps": 13}, {"batch": BatchPlan(global_samples=16, micro_samples=2)}]
)
def test_the_same_plan_or_another_run_is_a_restart(changed, running, change):
    assert not can_follow_in_process(running, following(changed, running, **change))


@pytest.mark.parametrize("change", [{"nodes": 1}, {"rendezvous_host": "other"}, {"entry": ("x.py",)}, {"plan": None}])
def test_other_ranks_or_another_program_are_a_restart(changed, running, change):
    order = changed(following(changed, running, degrees=DegreesPlan(tensor=2)), **change)
    assert not can_follow_in_process(running, order)
