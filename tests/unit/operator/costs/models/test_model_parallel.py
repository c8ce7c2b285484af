"""Memory of a rank against published figures; layers over stages against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.models.compute import model_flops
from cost_aware_operator.costs.models.layout import Layout, Practice, Recompute, StateSharding
from cost_aware_operator.costs.models.memory import GIB
from cost_aware_operator.costs.models.model_parallel import DecoderShape, ModelParallelCostAnalyzer, activation_elements
from cost_aware_operator.costs.models.stages import spread
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration, NumberFormat

ANALYZER = ModelParallelCostAnalyzer()
GPT = DecoderShape(96, 12288, 96, 96, 4 * 12288, 2048, 51200, gated_mlp=False, tied_embeddings=True)
LLAMA_8B = DecoderShape(32, 4096, 32, 8, 14336, 8192, 128256)
LAYOUT = Layout(1, 1, 1, 1, StateSharding.DDP, 1, Recompute.NONE, 1, 64, NumberFormat.FP16)


def practice(layout: Layout, shape: DecoderShape = GPT) -> Practice:
    return Practice.of(layout, AcceleratorGeneration.AMPERE, gated_mlp=shape.gated_mlp)


def states_gib(layout: Layout) -> float:
    found = ANALYZER.memory_of_rank(GPT, layout, practice(layout))
    return found.weights + found.gradients + found.optimizer


def test_parameters_of_published_models() -> None:
    assert GPT.parameters == pytest.approx(174.6e9, rel=0.005)
    assert LLAMA_8B.parameters == 8_030_261_248


def test_model_flops_are_those_of_narayanan_et_al() -> None:
    """72 B s L h^2 (1 + s/6h + V/12Lh), equation 3 of the SC21 paper without the recompute's third."""
    b, s, layers, h, v = 64, 2048, 96, 12288, 51200
    published = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(GPT, b) == pytest.approx(published, rel=1e-9)


@pytest.mark.parametrize(
    ("sharding", "bytes_a_weight"), [("ddp", 16.0), ("zero1", 4 + 12 / 64), ("zero2", 2 + 14 / 64), ("zero3", 14 / 64)]
)
def test_states_shrink_as_zero_says(sharding: str, bytes_a_weight: float) -> None:
    """Rajbhandari et al. 2020, figure 1; their ZeRO-3 gathers by tensor, and holds two of the largest beside its share."""
    layout = replace(LAYOUT, data=64, sharding=StateSharding(sharding))
    expected = bytes_a_weight * GPT.parameters
    if sharding == "zero3":
        expected += 2 * 2 * GPT.hidden * GPT.ffn + 2 * GPT.hidden * GPT.ffn
    assert states_gib(layout) == pytest.approx(expected / GIB, rel=0.001)


def test_fsdp_holds_two_layers_gathered_beside_its_share() -> None:
    layout = replace(LAYOUT, data=64, sharding=StateSharding.ZERO3, precision=NumberFormat.BF16)
    expected = 16 / 64 * GPT.parameters + 2 * 2 * GPT.layer_parameters + 4 * GPT.layer_parameters
    assert states_gib(layout) == pytest.approx(expected / GIB, rel=0.001)


def test_activations_are_near_korthikanti_s_34_bytes_with_sequence_parallelism() -> None:
    """Equation 4 counts dropout masks too, which fused kernels regenerate: 34 bytes against 26 here."""
    elements = activation_elements(GPT, 8, sequence_parallel=True)
    assert 2 * elements * 8 / GPT.hidden == pytest.approx(30, rel=0.15)


def test_recompute_trades_activations_for_time() -> None:
    for precision in (NumberFormat.FP16, NumberFormat.BF16):
        found = []
        for recompute in Recompute:
            layout = replace(LAYOUT, recompute=recompute, precision=precision, sharding=StateSharding.ZERO3, data=8)
            found.append(ANALYZER.memory_of_rank(LLAMA_8B, layout, practice(layout, LLAMA_8B)).activations)
        assert found[0] > found[1] > found[2]


def test_every_axis_takes_its_share() -> None:
    base = ANALYZER.memory_of_rank(LLAMA_8B, LAYOUT, practice(LAYOUT, LLAMA_8B)).total
    for axis in ("tensor", "pipeline", "context"):
        layout = replace(LAYOUT, **{axis: 4})
        assert ANALYZER.memory_of_rank(LLAMA_8B, layout, practice(layout, LLAMA_8B)).total < base


COSTS = st.lists(st.floats(0, 10), min_size=1, max_size=9)


@given(costs=COSTS, data=st.data())
def test_layers_are_distributed_as_well_as_brute_force_can(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    counts = ANALYZER.distribute(costs, stages)
    assert sum(counts) == len(costs)
    assert all(n >= 1 for n in counts)
    borders = [sum(counts[:i]) for i in range(stages + 1)]
    worst = max(sum(costs[a:b]) for a, b in pairwise(borders))
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True))
        for cut in combinations(range(1, len(costs)), stages - 1)
    )
    assert worst == pytest.approx(best)


@given(layers=st.integers(1, 24), head=st.floats(0, 5), data=st.data())
def test_equal_layers_need_no_search(layers: int, head: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    costs = [1.0] * (layers - 1) + [1.0 + head]

    def worst(counts: tuple[int, ...]) -> float:
        return max(n + (head if i == stages - 1 else 0) for i, n in enumerate(counts))

    found = spread(layers, stages, head).counts()
    if layers % stages == 0:
        assert found == (layers // stages,) * stages, "frameworks split evenly where layers divide"
        return
    assert sum(found) == layers
    assert min(found) >= 1
    assert worst(found) == pytest.approx(worst(ANALYZER.distribute(costs, stages)))


@pytest.mark.parametrize(("costs", "stages"), [([1.0], 2), ([1.0, float("nan")], 1), ([-1.0], 1)])
def test_impossible_distributions_are_refused(costs: list[float], stages: int) -> None:
    with pytest.raises(ValueError, match="layer"):
        ANALYZER.distribute(costs, stages)
