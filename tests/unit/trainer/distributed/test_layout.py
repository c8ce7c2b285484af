import dataclasses
import itertools
import math

import pytest

from cost_aware_trainer.contract import DegreesPlan, Schedule, Sharding, StrategyPlan
from cost_aware_trainer.distributed.layout import Coordinates, all_stages, boxes_of, stage_layers, stages_of
from cost_aware_trainer.models.decoder import parameter_shapes

LAYOUTS = [
    (DegreesPlan(data=2, tensor=2, pipeline=2), StrategyPlan()),
    (DegreesPlan(data=3, tensor=2), StrategyPlan(sharding=Sharding.ZERO3)),
    (DegreesPlan(pipeline=2), StrategyPlan(schedule=Schedule.ZERO_BUBBLE_V, interleave=2)),
    (DegreesPlan(pipeline=2, data=2), StrategyPlan(schedule=Schedule.INTERLEAVED, interleave=2)),
]


@pytest.fixture
def arrange(make_plan, changed):
    def arranged(degrees, strategy, **model):
        plan = make_plan()
        return changed(plan, degrees=degrees, strategy=strategy, model=changed(plan.model, layers=5, **model))

    return arranged


@pytest.mark.parametrize(("degrees", "strategy"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_ranks_of_a_replica_hold_every_element_and_replicas_hold_the_same(arrange, degrees, strategy, tied):
    plan = arrange(degrees, strategy, tied_embeddings=tied)
    shapes = parameter_shapes(plan.model)
    held = {rank: boxes_of(rank, plan, shapes) for rank in range(degrees.ranks)}
    for name, shape in shapes.items():
        boxes = {boxes[name] for boxes in held.values() if name in boxes}
        assert sum(box.elements for box in boxes) == math.prod(shape), name
        assert not any(a.common(b) for a, b in itertools.combinations(boxes, 2)), name


def test_every_rank_has_its_own_place(arrange):
    degrees = DegreesPlan(data=3, tensor=2, pipeline=4)
    places = [Coordinates.of(rank, degrees) for rank in range(degrees.ranks)]
    assert len(set(places)) == degrees.ranks
    assert [place.rank(degrees) for place in places] == list(range(degrees.ranks))
    assert places[1] == Coordinates(data=0, tensor=1, pipeline=0)


def test_layers_are_split_evenly_the_first_stages_taking_the_remainder_or_as_the_plan_says(arrange):
    assert stage_layers(arrange(DegreesPlan(pipeline=3), StrategyPlan())) == (2, 2, 1)
    plan = arrange(DegreesPlan(pipeline=3), StrategyPlan(stage_layers=(1, 3, 1)))
    assert [stage.layers for stage in all_stages(plan)] == [range(1), range(1, 4), range(4, 5)]


def test_the_v_shaped_schedule_puts_both_ends_on_the_first_rank(arrange):
    plan = arrange(DegreesPlan(pipeline=2), StrategyPlan(schedule=Schedule.ZERO_BUBBLE_V, interleave=2))
    assert [stage.index for stage in stages_of(0, plan)] == [0, 3]
    straight = dataclasses.replace(plan, strategy=StrategyPlan(schedule=Schedule.INTERLEAVED, interleave=2))
    assert [stage.index for stage in stages_of(0, straight)] == [0, 2]
