"""Topologies: limits one can count, tensor inside the node, zones by what egress costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_aware_operator.costs.advice.topology import (
    Algorithm,
    AxisTraffic,
    Collective,
    NetworkTopologyOptimizer,
    Topology,
    Zone,
)
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.communication import Fabric, Level, Link

OPTIMIZER = NetworkTopologyOptimizer()
LINK = Link(12.5e9, 20e-6)
FREE = Link(1.0, 0.0)
FABRIC = Fabric(8, Link(230e9, 8e-6), Link(50e9, 20e-6))
FOUR = [Collective.ALL_REDUCE, Collective.BROADCAST, Collective.SCATTER, Collective.ALL_TO_ALL]


def all_to_all_load(edges: list[tuple[int, int]], n: int) -> float:
    """The busiest directed link when every rank sends 1/n of 1 byte to every other, by the shortest ways, halved where two are."""
    around: dict[int, list[int]] = {i: [] for i in range(n)}
    for a, b in edges:
        around[a].append(b)
        around[b].append(a)
    load: dict[tuple[int, int], float] = {}
    for source in range(n):
        ways, far, order = {source: 1.0}, {source: 0}, [source]
        for at in order:
            for b in around[at]:
                if b not in far:
                    far[b] = far[at] + 1
                    order.append(b)
                if far[b] == far[at] + 1:
                    ways[b] = ways.get(b, 0.0) + ways[at]
        flow = dict.fromkeys(order, 1.0)
        for at in reversed(order[1:]):
            for a in around[at]:
                if far[a] == far[at] - 1:
                    part = flow[at] * ways[a] / ways[at]
                    load[a, at] = load.get((a, at), 0.0) + part
                    flow[a] += part
    return max(load.values()) / n


@pytest.mark.parametrize("n", [3, 4, 7, 8, 16, 31])
def test_all_to_all_is_bound_by_the_busiest_link_of_a_routing(n: int) -> None:
    edges = {
        Topology.LINEAR: [(i, i + 1) for i in range(n - 1)],
        Topology.RING: [(i, (i + 1) % n) for i in range(n)],
        Topology.TREE: [((i - 1) // 2, i) for i in range(1, n)],
    }
    for topology, joined in edges.items():
        found = OPTIMIZER.seconds(topology, Collective.ALL_TO_ALL, 1.0, n, FREE)
        assert found == pytest.approx(max(all_to_all_load(joined, n), (n - 1) / n)), topology


def test_a_ring_and_a_mesh_move_least_for_an_all_reduce_and_a_line_up_to_twice_as_long() -> None:
    costs = {c.topology: c for c in OPTIMIZER.price(Collective.ALL_REDUCE, 4e9, 64, LINK, 3.06)}
    assert costs[Topology.MESH].relative == 1
    assert costs[Topology.RING].relative == pytest.approx(1, abs=0.01)
    assert costs[Topology.LINEAR].relative == pytest.approx(64 / 63, abs=0.01)
    ring = costs[Topology.RING]
    assert ring.usd == pytest.approx(ring.seconds / 3600 * 64 * 3.06)
    small = {c.topology: c.seconds for c in OPTIMIZER.price(Collective.ALL_REDUCE, 1e3, 64, LINK, 3.06)}
    assert small[Topology.TREE] < small[Topology.RING] / 8


def test_the_best_topology_depends_on_size_and_pattern() -> None:
    """In the seed it is always the line."""
    for collective in FOUR:
        best = OPTIMIZER.price(collective, 1e9, 16, LINK, 1.0)[0]
        assert best.topology is not Topology.LINEAR


def test_algorithms_by_level_and_size() -> None:
    assert OPTIMIZER.algorithm(FABRIC.group(8), 1e10)[0] is Algorithm.RING
    assert OPTIMIZER.algorithm(FABRIC.group(8), 1e2)[0] is Algorithm.TREE
    across = FABRIC.group(512)
    for size in (1e2, 1e6, 1e10):
        kind, seconds = OPTIMIZER.algorithm(across, size)
        assert seconds == across.all_reduce(size)
        assert kind in Algorithm


def test_tensor_stays_inside_the_node_and_data_goes_between() -> None:
    traffic = [
        AxisTraffic("data", 8, Collective.ALL_REDUCE, 2e9, 1, hidden=0.7),
        AxisTraffic("tensor", 8, Collective.ALL_REDUCE, 64e6, 1000),
        AxisTraffic("pipeline", 4, Collective.SEND, 8e6, 64),
    ]
    orders = OPTIMIZER.assign(traffic, FABRIC)
    assert len(orders) == 6
    assert (orders[0].axes[0].axis, orders[0].axes[0].level) == ("tensor", Level.NODE)
    assert all(axis.level is Level.NETWORK for axis in orders[0].axes[1:])
    assert orders[0].seconds < orders[-1].seconds / 3


def test_egress_decides_whether_a_cheaper_zone_is_cheaper() -> None:
    """A billion fp32 gradients over two zones: 8 GB a step, $0.16 (research/trainer.md, F)."""
    zones = [Zone("a", 16, 21.96), Zone("b", 8, 9.0)]
    places = OPTIMIZER.place(zones, 16, 1000, 10.0, 4e9, Link(5e9, 5e-4))
    assert {p.nodes for p in places} == {(("a", 16),), (("b", 8), ("a", 8))}
    split = next(p for p in places if len(p.nodes) == 2)
    assert split.egress_usd == pytest.approx(160)
    assert places[0].nodes == (("b", 8), ("a", 8))
    small = OPTIMIZER.place(zones, 16, 1000, 1.0, 4e9, Link(5e9, 5e-4))
    assert small[0].nodes == (("a", 16),)
    with pytest.raises(AnalysisError, match="nodes: 25 wanted, 24 in all zones: write 24 or fewer"):
        OPTIMIZER.place(zones, 25, 1, 1.0, 1.0, LINK)


@given(st.sampled_from(Topology), st.sampled_from(FOUR), st.floats(0, 1e12), st.integers(1, 5000), st.floats(1, 100))
def test_seconds_fall_with_bandwidth(t: Topology, c: Collective, size: float, ranks: int, factor: float) -> None:
    slow = OPTIMIZER.seconds(t, c, size, ranks, LINK)
    fast = OPTIMIZER.seconds(t, c, size, ranks, Link(LINK.bytes_per_second * factor, LINK.latency_seconds))
    assert 0 <= fast <= slow < math.inf


@given(st.floats(1, 50), st.floats(1, 50))
def test_dollars_rise_with_prices(price: float, egress: float) -> None:
    def usd(zone: float, gb: float) -> float:
        zones = [Zone("a", 4, 3.0 * zone), Zone("b", 4, 2.0 * zone)]
        return OPTIMIZER.place(zones, 6, 10, 1.0, 1e9, LINK, usd_per_gb=gb)[0].usd

    assert 0 < usd(1, 0.02) <= usd(price, 0.02) < math.inf
    assert usd(1, 0.02) <= usd(1, 0.02 * egress) < math.inf


@given(st.floats(), st.floats(), st.integers(), st.floats(), st.integers(-2, 50))
@settings(max_examples=200)
def test_any_figures_give_finite_dollars_or_name_the_field(
    size: float, seconds: float, nodes: int, usd: float, there: int
) -> None:
    calls = (
        lambda: OPTIMIZER.place([Zone("a", there, usd)], nodes, 10, seconds, size, LINK)[0].usd,
        lambda: OPTIMIZER.price(Collective.SCATTER, size, nodes, LINK, usd)[0].usd,
        lambda: OPTIMIZER.assign([AxisTraffic("data", nodes, Collective.ALL_REDUCE, size, there)], FABRIC)[0].seconds,
    )
    for call in calls:
        try:
            found = call()
        except AnalysisError as error:
            assert "write" in str(error)  # noqa: PT017
        else:
            assert 0 <= found < math.inf
