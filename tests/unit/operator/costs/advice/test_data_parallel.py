"""Data parallelism: the seed's tables where they hold, overlap that is achieved, batches that stay what they were."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.advice.data_parallel import DataParallelCostAnalyzer, exposed_seconds
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.communication import Fabric, Link
from cost_aware_operator.costs.models.layout import Layout, Recompute, StateSharding
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.tables.hardware import NumberFormat, accelerator

ANALYZER = DataParallelCostAnalyzer()
ANY = st.one_of(st.floats(), st.integers(), st.booleans())


def fabric(network: float = 12.5e9) -> Fabric:
    return Fabric(8, Link(230e9, 8e-6), Link(network, 20e-6))


@pytest.mark.parametrize(
    ("nodes", "hours", "usd", "efficiency"),
    [(1, 24.0, 73.44, 1.0), (4, 7.2, 88.13, 0.83), (8, 4.8, 117.50, 0.63)],
)
def test_the_seed_s_dollars_follow_from_its_hours(nodes: int, hours: float, usd: float, efficiency: float) -> None:
    cost = ANALYZER.cost_of_times(24.0, hours, nodes, 3.06)
    assert round(cost.total_usd, 2) == usd
    assert abs(cost.efficiency - efficiency) <= 0.0051
    assert cost.lost_usd == pytest.approx(cost.total_usd - 73.44)


@pytest.mark.parametrize(("nodes", "efficiency", "hours", "usd"), [(4, 0.8, 7.5, 91.80), (8, 0.6, 5.0, 122.40)])
def test_its_efficiencies_give_other_hours(nodes: int, efficiency: float, hours: float, usd: float) -> None:
    cost = ANALYZER.cost_of_efficiency(24.0, efficiency, nodes, 3.06)
    assert (cost.hours, round(cost.total_usd, 2)) == (pytest.approx(hours), usd)


def test_predicted_efficiency_falls_as_nodes_are_added() -> None:
    shape = DecoderShape(24, 2048, 16, 16, 8192, 2048, 50304, gated_mlp=False, tied_embeddings=True)
    layout = Layout(1, 1, 1, 1, StateSharding.ZERO1, 1, Recompute.NONE, 2, 512, NumberFormat.BF16)
    machine = Machine(accelerator("A100-SXM-40GB"), 8, 300, 100)
    costs = ANALYZER.predicted(shape, machine, layout, (8, 16, 32, 64), 1000, 21.957642)
    assert [c.nodes for c in costs] == [1, 2, 4, 8]
    assert costs[0].efficiency == pytest.approx(1)
    assert 1 > costs[1].efficiency > costs[2].efficiency > costs[3].efficiency > 0
    assert costs[0].total_usd < costs[3].total_usd
    with pytest.raises(AnalysisError, match=r"data_degrees: 3 x micro_batch 2 .* write 2"):
        ANALYZER.predicted(shape, machine, layout, (3,), 1, 1.0)


def test_a_billion_fp32_gradients_over_100_gbit_take_0_64_seconds() -> None:
    """research/trainer.md, E, without latency: 8 GB each way over 12.5 GB/s."""
    group = Fabric(1, Link(1e12, 0), Link(12.5e9, 0)).group(1024)
    assert ANALYZER.synchronisation(group, 4e9, 0.0).total_seconds == pytest.approx(0.64, rel=0.01)


def test_a_long_backward_hides_all_but_the_last_bucket() -> None:
    group = fabric().group(16)
    found = ANALYZER.synchronisation(group, 1e9, 1e3)
    assert found.exposed_seconds == pytest.approx(found.total_seconds / found.buckets)
    assert found.slowed_seconds > 0
    assert ANALYZER.synchronisation(group, 1e9, 0.0).exposed_seconds == pytest.approx(found.total_seconds)
    assert ANALYZER.synchronisation(fabric().group(1), 1e9, 1.0).cost_seconds == 0


@given(c=st.floats(1e-6, 10), n=st.integers(1, 50), window=st.floats(0, 100))
def test_the_closed_form_is_what_a_stream_of_buckets_does(c: float, n: int, window: float) -> None:
    end = 0.0
    for i in range(1, n + 1):
        end = max(end, window * i / n) + c
    assert exposed_seconds(c, n, window) == pytest.approx(end - window, rel=1e-6, abs=1e-9)


@given(st.floats(1, 1e12), st.floats(0, 100), st.integers(1, 512), st.floats(1, 100), st.sampled_from(StateSharding))
def test_more_bandwidth_or_more_backward_never_exposes_more(
    size: float, window: float, ranks: int, factor: float, sharding: StateSharding
) -> None:
    def exposed(network: float, seconds: float) -> float:
        return ANALYZER.synchronisation(fabric(network).group(ranks), size, seconds, sharding=sharding).exposed_seconds

    slow = exposed(1e9, window)
    assert 0 <= slow < math.inf
    assert exposed(1e9 * factor, window) <= slow * (1 + 1e-9)
    assert exposed(1e9, window * factor) <= slow * (1 + 1e-9)


@pytest.mark.parametrize(
    ("batch", "ranks", "largest", "passes", "efficiency"),
    [
        (512, 8, 32, (32, 32), 1.0),
        (96, 8, 8, (8, 4), 1.0),  # 12 a rank: powers of two in as many passes
        (400, 4, 50, (50, 50), 1.0),  # no power of two under 50 takes two passes
        (1000, 8, 64, (63, 62), 1.0),  # the seed computes 8 x 64 = 512 of the 1,000
        (10, 4, 8, (3,), 10 / 12),
    ],
)
def test_the_global_batch_is_kept(
    batch: int, ranks: int, largest: int, passes: tuple[int, ...], efficiency: float
) -> None:
    share = ANALYZER.distribute_batch(batch, ranks, largest)
    assert (share.global_batch, share.micro_batch_sizes, share.efficiency) == (batch, passes, pytest.approx(efficiency))
    assert share.even is (batch % ranks == 0)


@given(st.integers(1, 10**5), st.integers(1, 512), st.integers(1, 1024))
def test_no_sequence_is_lost_and_no_pass_too_many(batch: int, ranks: int, largest: int) -> None:
    if ranks > batch:
        with pytest.raises(AnalysisError, match=f"ranks: {ranks} is more than global_batch .* write {batch} or fewer"):
            ANALYZER.distribute_batch(batch, ranks, largest)
        return
    share = ANALYZER.distribute_batch(batch, ranks, largest)
    assert share.global_batch == batch
    assert sum(share.micro_batch_sizes) == share.larger
    assert max(share.micro_batch_sizes) <= largest
    assert len(share.micro_batch_sizes) == math.ceil(share.larger / largest)
    assert min(share.micro_batch_sizes) >= 1


@given(ANY, ANY, ANY, ANY)
def test_any_input_gives_finite_dollars_or_names_the_field(one: float, other: float, nodes: int, usd: float) -> None:
    for call in (ANALYZER.cost_of_times, ANALYZER.cost_of_efficiency):
        try:
            cost = call(one, other, nodes, usd)
        except AnalysisError as error:
            assert "write" in str(error)  # noqa: PT017
        else:
            assert 0 < cost.total_usd < math.inf
