import dataclasses

import pytest

from cost_aware_trainer.contract import Compression, DegreesPlan, Redundancy, Sharding, StrategyPlan
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.memory.tier import can_rebuild, groups_of, layout_key


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 4), (8, 2), (17, 1), (64, 8)])
def test_no_group_has_two_ranks_of_one_node_and_every_rank_has_a_group(nodes, per_node):
    groups = groups_of(nodes * per_node, per_node)
    assert sorted(rank for group in groups for rank in group) == list(range(nodes * per_node))
    for group in groups:
        assert len({rank // per_node for rank in group}) == len(group)
        assert 2 <= len(group) <= 15


def test_one_node_has_no_groups():
    assert groups_of(8, 8) == []


@pytest.mark.parametrize(
    ("kind", "lost", "can"),
    [
        (Redundancy.REPLICA, {0}, True),
        (Redundancy.REPLICA, {0, 4}, True),
        (Redundancy.REPLICA, {2, 4}, False),
        (Redundancy.REPLICA, {6, 0}, False),
        (Redundancy.PARITY, {4}, True),
        (Redundancy.PARITY, {0, 4}, False),
        (Redundancy.PARITY, {1, 3}, True),
    ],
)
def test_what_can_be_lost(kind, lost, can):
    assert can_rebuild(kind, [0, 2, 4, 6], lost) is can


def test_a_pair_has_copies_of_each_other():
    assert can_rebuild(Redundancy.REPLICA, [0, 1], {1})
    assert not can_rebuild(Redundancy.REPLICA, [0, 1], {0, 1})


def test_copies_belong_to_a_run_and_to_what_each_rank_holds_of_it(make_plan):
    facts = RunFacts(model={"layers": 2}, seed=7, global_samples=8, data_sha256="x")
    plan = make_plan(data=2)
    key = layout_key(plan, facts)
    same = dataclasses.replace(plan, strategy=StrategyPlan(compression=Compression.INT8, bucket_mib=2.0))
    assert layout_key(same, facts) == key
    others = [
        layout_key(dataclasses.replace(plan, degrees=DegreesPlan(tensor=2)), facts),
        layout_key(dataclasses.replace(plan, strategy=StrategyPlan(sharding=Sharding.ZERO3)), facts),
        layout_key(plan, dataclasses.replace(facts, seed=8)),
        layout_key(dataclasses.replace(plan, checkpoint=dataclasses.replace(plan.checkpoint, folder="/other")), facts),
    ]
    assert len({key, *others}) == 5
