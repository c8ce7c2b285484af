"""Collectives: worked examples, limits, and that more bandwidth never costs time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.models.communication import Fabric, Group, Level, Link

LINK = Link(100e9, 10e-6)
FABRIC = Fabric(8, Link(240e9, 5e-6), Link(200e9, 20e-6), Link(5e9, 500e-6), nodes_per_zone=4)
SIZES = st.floats(0, 1e12)
RANKS = st.integers(1, 4096)


def test_a_ring_moves_twice_n_minus_1_over_n_of_the_buffer() -> None:
    assert LINK.ring_all_reduce(8e9, 8) == pytest.approx(2 * 7 / 8 * 8e9 / 100e9 + 14 * 10e-6)


def test_small_buffers_go_over_the_tree_and_large_ones_over_the_ring() -> None:
    assert LINK.all_reduce(1e3, 64) == LINK.tree_all_reduce(1e3, 64) < LINK.ring_all_reduce(1e3, 64)
    assert LINK.all_reduce(1e10, 64) == LINK.ring_all_reduce(1e10, 64) < LINK.tree_all_reduce(1e10, 64)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    assert LINK.ring_all_reduce(1e9, 16) == LINK.reduce_scatter(1e9, 16) + LINK.all_gather(1e9, 16)


def test_groups_know_the_slowest_level_they_cross() -> None:
    assert FABRIC.group(8).level is Level.NODE
    assert FABRIC.group(16).level is Level.NETWORK
    assert FABRIC.group(64).level is Level.ZONE


def test_a_strided_group_has_fewer_ranks_a_node_and_its_share_of_the_network() -> None:
    group = FABRIC.group(4, stride=8)
    assert (group.per_node, group.nodes) == (1, 4)
    assert group.outer.bytes_per_second == pytest.approx(200e9 / 8)


def test_a_ring_over_whole_nodes_runs_at_the_node_s_network() -> None:
    """All adapters carry a part of the ring, so 32 GPUs on 4 nodes reach nearly the node's 200 GB/s (nccl-tests bus bandwidth)."""
    seconds = FABRIC.group(32).all_reduce(16e9)
    assert 2 * 31 / 32 * 16e9 / seconds / 1e9 == pytest.approx(200, rel=0.02)


def test_hierarchical_wins_where_latency_counts() -> None:
    group = FABRIC.group(32)
    assert group.hierarchical_all_reduce(1e6) < 2 * group.ring(1e6)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
@given(size=SIZES, ranks=RANKS, stride=st.integers(1, 64), factor=st.floats(1, 100))
def test_time_is_finite_not_negative_and_falls_with_bandwidth(
    name: str, size: float, ranks: int, stride: int, factor: float
) -> None:
    def seconds(node: float, network: float) -> float:
        group: Group = Fabric(8, Link(240e9 * node, 5e-6), Link(200e9 * network, 20e-6)).group(ranks, stride)
        return float(getattr(group, name)(size))

    slow = seconds(1, 1)
    assert 0 <= slow < 1e9
    assert seconds(factor, 1) <= slow * (1 + 1e-9)
    assert seconds(1, factor) <= slow * (1 + 1e-9)
    if ranks == 1:
        assert slow == 0


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_a_link_needs_a_bandwidth(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth must be a positive number"):
        Link(bandwidth, 0.0)
