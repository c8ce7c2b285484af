"""Stragglers in pipelines of one replica: stages differ in layers, and none of them has a peer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.factories.facts import job
from tests.support.factories.stragglers import PLAN, named, scrapes

from cost_aware_operator.control.reading.stragglers import stragglers_under
from cost_aware_operator.costs.models.stages import interleaved
from cost_aware_operator.observing.stragglers import StageWorks, stragglers
from cost_aware_trainer.contract import (
    BatchPlan,
    CheckpointPlan,
    DegreesPlan,
    ModelPlan,
    RunPlan,
    Schedule,
    StrategyPlan,
)
from cost_aware_trainer.distributed.layout import stages_of


@pytest.mark.parametrize(
    ("what", "works", "estimates", "slow"),
    [
        ("twice as slow as the others", [0.2, 0.4, 0.2, 0.2], [[1, 1, 1, 1]], [1]),
        ("slow for its one layer of four", [0.6, 0.4], [[3, 1]], [1]),
        ("as slow as its layers", [0.6, 0.2, 0.2], [[3, 1, 1]], []),
        ("under what estimates are wrong by", [0.2, 0.28, 0.2], [[1, 1, 1]], []),
        ("a head that costs what its FLOPs say", [0.2, 0.5], [[1, 2.5], [1, 1]], []),
        ("a head that costs nothing", [0.2, 0.2], [[1, 2.5], [1, 1]], []),
        ("slow whatever the head costs", [0.2, 0.9], [[1, 2], [1, 1]], [1]),
        ("estimates of other stages", [0.2, 0.9], [[1, 1, 1]], []),
    ],
)
def test_a_stage_of_one_rank_is_held_against_what_all_stages_compute(
    what: str, works: list[float], estimates: StageWorks, slow: list[int]
) -> None:
    assert named([works] * 4, 1, estimates) == slow, what


def test_a_stage_s_slowdown_is_told_by_the_mildest_estimate() -> None:
    (slow,) = stragglers(scrapes([[0.2, 0.9]] * 4), 1, [[1, 1], [1, 2]])
    assert slow.slowdown == pytest.approx(0.9 / 0.4)


def test_a_pipeline_s_stages_are_compared_by_layers_and_head_of_the_plan() -> None:
    spec = job().spec
    assert spec.model is not None
    plan = replace(PLAN, data=1, pipeline=4, stage_layers=(3, 1, 1, 1))
    lame = stragglers_under(spec, plan, scrapes([[0.6, 0.2, 0.5, 0.2]] * 4))
    assert [s.rank for s in lame] == [2]
    chunked = replace(plan, pipeline=2, schedule="interleaved", interleave=2, stage_layers=(2, 2))
    assert [s.rank for s in stragglers_under(spec, chunked, scrapes([[0.2, 0.5]] * 4))] == [1]
    assert stragglers_under(spec, chunked, scrapes([[0.2, 0.25]] * 4)) == ()


@pytest.mark.parametrize(("layers", "ranks", "chunks"), [(4, 2, 2), (7, 2, 3), (6, 3, 2), (13, 4, 2)])
def test_layers_of_interleaved_ranks_are_those_that_the_trainer_cuts(layers: int, ranks: int, chunks: int) -> None:
    plan = RunPlan(
        steps=1, data_folder="", batch=BatchPlan(global_samples=1, micro_samples=1), checkpoint=CheckpointPlan(folder=""),
        model=ModelPlan(layers=layers, hidden=8, heads=1, kv_heads=1, ffn=8, sequence_length=8, vocabulary=8),
        degrees=DegreesPlan(pipeline=ranks), strategy=StrategyPlan(schedule=Schedule.INTERLEAVED, interleave=chunks),
    )  # fmt: skip
    cut = tuple(sum(len(stage.layers) for stage in stages_of(rank, plan)) for rank in range(ranks))
    assert interleaved(layers, ranks, chunks) == cut
