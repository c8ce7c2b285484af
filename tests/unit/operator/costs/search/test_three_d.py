"""The search against an exhaustive one, and what must never get worse when something gets better or cheaper."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_aware_operator.api.spec import Objective
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.layout import Layout, Recompute, StateSharding
from cost_aware_operator.costs.models.machines import Machine, usable_gib
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.pipeline import PipelineSchedule
from cost_aware_operator.costs.models.predict import memory_of_ranks, predict
from cost_aware_operator.costs.search.combinations import Bounds, Offer, Work
from cost_aware_operator.costs.search.three_d import Need, ThreeDParallelCostAnalyzer, goodput_of
from cost_aware_operator.costs.tables.hardware import NumberFormat, accelerator

ANALYZER = ThreeDParallelCostAnalyzer()
LLAMA_8B = DecoderShape(32, 4096, 32, 8, 14336, 8192, 128256)


def offer(
    gpu: str = "H100-SXM-80GB", usd: float = 55.04, gpus: int = 8, precision: NumberFormat = NumberFormat.BF16
) -> Offer:
    one = accelerator(gpu)
    return Offer(gpu, Machine(one, gpus, one.link_gbytes_per_s, one.network_gbit_per_s), usd, precision)


def every_layout(work: Work, machine: Machine, bounds: Bounds, precision: NumberFormat) -> list[Layout]:
    """All that may be tried, by the simplest loops there are."""
    shape, found = work.shape, []
    degrees = range(1, bounds.nodes_max * machine.gpus_per_node + 1)
    for data, tensor, pipeline in product(degrees, repeat=3):
        ranks = data * tensor * pipeline
        nodes = ranks / machine.gpus_per_node
        if nodes != int(nodes) or not bounds.nodes_min <= nodes <= bounds.nodes_max or pipeline > shape.layers:
            continue
        if shape.heads % tensor or shape.kv_heads % tensor or shape.ffn % tensor or work.global_batch % data:
            continue
        share = work.global_batch // data
        for micro in (n for n in range(1, min(share, 64) + 1) if share % n == 0):
            chunks = [
                v
                for v in range(1, shape.layers + 1)
                if v == 1 or (pipeline > 1 and shape.layers % (pipeline * v) == 0 and share // micro % pipeline == 0)
            ]
            for v, sharding, recompute in product(chunks, StateSharding, Recompute):
                if data == 1 and sharding is not StateSharding.DDP:
                    continue
                schedules = [PipelineSchedule.ONE_F_ONE_B]
                if pipeline > 1 and v == 1:
                    schedules += [PipelineSchedule.GPIPE, PipelineSchedule.ZERO_BUBBLE]
                found += [
                    Layout(
                        data, tensor, pipeline, 1, sharding, v, recompute, micro, work.global_batch, precision, schedule
                    )
                    for schedule in schedules
                ]
    return found


SMALL = st.builds(
    lambda layers, heads, groups, ffn, vocabulary: DecoderShape(
        layers, 64 * heads * groups, heads * groups, groups, 64 * ffn, 512, vocabulary
    ),
    layers=st.integers(1, 6),
    heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 3]),
    ffn=st.integers(1, 6),
    vocabulary=st.sampled_from([256, 50_000]),
)


@settings(max_examples=15)
@given(
    shape=SMALL,
    batch=st.sampled_from([1, 4, 6, 12]),
    gpus=st.sampled_from([1, 2]),
    nodes=st.integers(1, 3),
    gpu=st.sampled_from(
        [("H100-SXM-80GB", NumberFormat.BF16), ("A100-SXM-40GB", NumberFormat.BF16), ("V100-SXM2-16GB", NumberFormat.FP16)]
    ),
    memory_gib=st.sampled_from([1.4, 1.6, 80.0]),
    objective=st.sampled_from(Objective),
)  # fmt: skip
def test_nothing_better_than_what_is_found_exists(
    shape: DecoderShape,
    batch: int,
    gpus: int,
    nodes: int,
    gpu: tuple[str, NumberFormat],
    memory_gib: float,
    objective: Objective,
) -> None:
    one = offer(gpu[0], gpus=gpus, precision=gpu[1])
    machine = replace(one.machine, accelerator=replace(one.machine.accelerator, memory_gib=memory_gib))
    one, work, bounds = replace(one, machine=machine), Work(shape, batch, 100), Bounds(1, nodes)
    layouts = every_layout(work, machine, bounds, gpu[1])
    costs: list[tuple[float, float]] = []
    for layout in layouts:
        if memory_of_ranks(shape, machine, layout).total <= usable_gib(machine):
            n = layout.ranks // gpus
            hours = work.steps * predict(shape, machine, layout).step_seconds / goodput_of(work, one, n) / 3600
            costs.append((hours * n * one.node_hourly_usd, hours))
    try:
        ranking = ANALYZER.search(work, [one], bounds, objective)
    except AnalysisError:
        assert not layouts
        return
    assert ranking.combinations == len(layouts)
    assert len(ranking.columns) == len(costs)
    if not costs:
        assert ranking.shortfalls[0].need is Need.MEMORY
        return
    by = 0 if objective is Objective.COST else 1
    figures = ranking.columns.usd if by == 0 else ranking.columns.hours
    np.testing.assert_allclose(np.sort(figures), np.sort([c[by] for c in costs]), rtol=1e-9)
    assert figures[0] == pytest.approx(min(c[by] for c in costs))
    assert np.all(np.diff(figures) >= -1e-6 * figures[:-1]), "the ranking is in order"


def best_usd(one: Offer, bounds: Bounds, shape: DecoderShape = LLAMA_8B) -> float:
    columns = ANALYZER.search(Work(shape, 64, 1000), [one], bounds).columns
    return float(columns.usd[0]) if len(columns) else math.inf


@pytest.mark.parametrize("part", ["price", "network", "link", "memory", "peak", "memory bandwidth"])
@settings(max_examples=12)
@given(factor=st.floats(1.0, 8.0), nodes=st.integers(1, 3))
def test_better_or_cheaper_hardware_never_costs_more(part: str, factor: float, nodes: int) -> None:
    one = offer("A100-SXM-40GB")
    gpu, machine = one.machine.accelerator, one.machine
    peaks = {p: factor * peak for p, peak in gpu.peak_tflops.items()}
    improved = {
        "price": replace(one, node_hourly_usd=one.node_hourly_usd / factor),
        "network": replace(one, machine=replace(machine, network_gbit_per_s=factor * machine.network_gbit_per_s)),
        "link": replace(one, machine=replace(machine, link_gbytes_per_s=factor * machine.link_gbytes_per_s)),
        "memory": replace(one, machine=replace(machine, accelerator=replace(gpu, memory_gib=factor * gpu.memory_gib))),
        "peak": replace(one, machine=replace(machine, accelerator=replace(gpu, peak_tflops=peaks))),
        "memory bandwidth": replace(
            one,
            machine=replace(machine, accelerator=replace(gpu, memory_gbytes_per_s=factor * gpu.memory_gbytes_per_s)),
        ),
    }[part]
    bounds = Bounds(nodes, nodes)
    assert best_usd(improved, bounds) <= best_usd(one, bounds) * (1 + 1e-9)


def test_every_bound_is_kept() -> None:
    bounds = Bounds(
        2, 4, data=(2, 4, 8), tensor=(1, 2, 4), pipeline=(2, 4), micro_batch=(1, 2), shardings=(StateSharding.ZERO1,),
        recomputes=(Recompute.FULL,), schedules=(PipelineSchedule.INTERLEAVED,), max_hourly_usd=180.0, deadline_seconds=300_000,
    )  # fmt: skip
    ranking = ANALYZER.search(Work(LLAMA_8B, 64, 1000), [offer()], bounds)
    assert len(ranking.columns) > 0
    for row in range(len(ranking.columns)):
        layout = ranking.layout(row)
        assert layout.data in bounds.data
        assert layout.tensor in bounds.tensor
        assert layout.pipeline in bounds.pipeline
        assert layout.micro_batch in bounds.micro_batch
        assert layout.sharding is StateSharding.ZERO1
        assert layout.recompute is Recompute.FULL
        assert layout.interleave > 1
        assert 2 <= ranking.columns.nodes[row] <= 3
        assert ranking.columns.hours[row] * 3600 <= 300_000


def test_dollars_buy_time_along_the_pareto_front_and_nothing_beats_it() -> None:
    ranking = ANALYZER.search(Work(LLAMA_8B, 64, 1000), [offer(), offer("A100-SXM-80GB", 27.4)], Bounds(1, 8))
    usd, hours = ranking.columns.usd, ranking.columns.hours
    front = ranking.pareto()
    assert usd[front[0]] == usd.min()
    assert hours[front[-1]] == hours.min()
    assert np.all(np.diff(usd[front]) > 0)
    assert np.all(np.diff(hours[front]) < 0)
    for row in range(0, len(usd), 37):
        assert any(usd[f] <= usd[row] and hours[f] <= hours[row] for f in front)


def test_a_run_too_dear_or_too_slow_says_what_the_nearest_would_take() -> None:
    work = Work(LLAMA_8B, 64, 1000)
    everything = ANALYZER.search(work, [offer()], Bounds(1, 4)).columns
    for name, need, nearest in (
        ("budget_usd", Need.BUDGET, everything.usd.min()),
        ("deadline_seconds", Need.DEADLINE, everything.hours.min()),
        ("max_hourly_usd", Need.HOURLY, 55.04),
    ):
        ranking = ANALYZER.search(work, [offer()], replace(Bounds(1, 4), **{name: 0.5}))
        assert len(ranking.columns) == 0
        assert ranking.shortfalls[-1].need is need
        assert ranking.shortfalls[-1].nearest == pytest.approx(nearest)


@pytest.mark.parametrize(
    ("work", "offers", "bounds", "message"),
    [
        (Work(LLAMA_8B, 64, 1), [], Bounds(), "offers: is empty"),
        (
            Work(LLAMA_8B, 63, 1),
            [offer()],
            Bounds(7, 7, tensor=(1,), pipeline=(1,)),
            "write data: 7, tensor: 1, pipeline: 8",
        ),
        (Work(LLAMA_8B, 64, 1), [offer()], Bounds(data=(3,)), "parallelism: the degrees asked for do not fill"),
        (Work(DecoderShape(1, 64, 1, 1, 64, 8, 64), 7, 1), [offer()], Bounds(), "batch.global"),
    ],
)
def test_impossible_questions_name_the_field(work: Work, offers: list[Offer], bounds: Bounds, message: str) -> None:
    with pytest.raises(AnalysisError) as error:
        ANALYZER.search(work, offers, bounds)
    assert message in str(error.value)


@pytest.mark.parametrize("usd", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(usd: float) -> None:
    with pytest.raises(AnalysisError, match="hourly_usd"):
        offer(usd=usd)
