"""Collectives under the alpha-beta model, one link level at a time and across levels.

Time is latency plus bytes over bandwidth. `size_bytes` is always the whole buffer S: what every rank holds before or after
(all-reduce, broadcast), or all shards together (reduce-scatter, all-gather, all-to-all). Factors are those of nccl-tests,
doc/PERFORMANCE.md; ring and tree latencies follow Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). Links must have a positive bandwidth; a group of one rank communicates nothing, in 0 seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Where two ranks meet."""

    NODE = "inside the node"
    NETWORK = "between nodes"
    ZONE = "between zones"


@dataclass(frozen=True)
class Link:
    """One direction of one rank's connection: bytes a second that a collective reaches, and seconds a message waits."""

    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise ValueError(f"bandwidth must be a positive number of bytes a second, got {self.bytes_per_second!r}")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ValueError(f"latency must be a finite number of seconds, 0 or more, got {self.latency_seconds!r}")

    def send(self, size_bytes: float) -> float:
        """Point to point, seconds: alpha + S/B."""
        return self.latency_seconds + size_bytes / self.bytes_per_second

    def reduce_scatter(self, size_bytes: float, ranks: int) -> float:
        """Ring, seconds: (n-1) alpha + (n-1)/n S/B."""
        return self._ring(size_bytes, ranks)

    def all_gather(self, size_bytes: float, ranks: int) -> float:
        """Ring, seconds: (n-1) alpha + (n-1)/n S/B."""
        return self._ring(size_bytes, ranks)

    def all_to_all(self, size_bytes: float, ranks: int) -> float:
        """Pairwise, seconds: (n-1) alpha + (n-1)/n S/B."""
        return self._ring(size_bytes, ranks)

    def broadcast(self, size_bytes: float, ranks: int) -> float:
        """Pipelined tree, seconds: ceil(log2 n) alpha + S/B."""
        return (
            math.ceil(math.log2(ranks)) * self.latency_seconds + size_bytes / self.bytes_per_second
            if ranks > 1
            else 0.0
        )

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """The faster of ring and tree, seconds: small buffers go over the tree, large ones over the ring."""
        return min(self.ring_all_reduce(size_bytes, ranks), self.tree_all_reduce(size_bytes, ranks))

    def ring_all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Reduce-scatter then all-gather, seconds: 2(n-1) alpha + 2(n-1)/n S/B."""
        return 2 * self._ring(size_bytes, ranks)

    def tree_all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Reduce to the root and broadcast, pipelined, seconds: 2 ceil(log2 n) alpha + 2 S/B."""
        return 2 * self.broadcast(size_bytes, ranks)

    def _ring(self, size_bytes: float, ranks: int) -> float:
        if ranks <= 1:
            return 0.0
        return (ranks - 1) * self.latency_seconds + (ranks - 1) / ranks * size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Fabric:
    """The links under a job: `network` and `zone` are a whole node's share, which its ranks divide among themselves."""

    ranks_per_node: int
    node: Link
    network: Link
    zone: Link | None = None
    nodes_per_zone: int | None = None

    def group(self, size: int, stride: int = 1) -> Group:
        """`size` ranks, each `stride` after the one before, as laid out with ranks of one node numbered together."""
        per_node = max(1, min(size, self.ranks_per_node // max(1, stride)))
        return Group(self, size, per_node, math.ceil(size / per_node))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, `per_node` of them in each of `nodes` nodes.

    All groups of the same kind run at once, so a group that has k of a node's R ranks gets k/R of the node's network.
    """

    fabric: Fabric
    size: int
    per_node: int
    nodes: int

    @property
    def level(self) -> Level:
        """The slowest level that the group crosses."""
        if self.nodes <= 1:
            return Level.NODE
        per_zone = self.fabric.nodes_per_zone
        return (
            Level.ZONE
            if self.fabric.zone is not None and per_zone is not None and self.nodes > per_zone
            else Level.NETWORK
        )

    @property
    def outer(self) -> Link:
        """The group's share of the slowest level."""
        if self.level is Level.NODE:
            return self.fabric.node
        whole = self.fabric.zone if self.level is Level.ZONE and self.fabric.zone is not None else self.fabric.network
        share = min(1.0, self.per_node / self.fabric.ranks_per_node)
        return Link(whole.bytes_per_second * share, whole.latency_seconds)

    def _ring(self, size_bytes: float) -> float:
        """One pass of a ring through every rank, which NCCL runs over all of a node's adapters at once.

        The slower of the two levels bounds the bandwidth. Latency counts each hop at its level's cost.
        """
        if self.size <= 1:
            return 0.0
        inner, outer = self.fabric.node, self.outer
        bandwidth = min(inner.bytes_per_second, outer.bytes_per_second) if self.per_node > 1 else outer.bytes_per_second
        hops = self.size - 1
        crossing = min(hops, self.nodes - 1) if self.per_node > 1 else hops
        latency = crossing * outer.latency_seconds + (hops - crossing) * inner.latency_seconds
        return latency + hops / self.size * size_bytes / bandwidth

    def all_gather(self, size_bytes: float) -> float:
        """Seconds; the faster of one ring over all ranks and two levels (between nodes, then inside)."""
        return min(self._ring(size_bytes), self._two_level(size_bytes))

    def reduce_scatter(self, size_bytes: float) -> float:
        """Seconds; the mirror image of the all-gather."""
        return self.all_gather(size_bytes)

    def _two_level(self, size_bytes: float) -> float:
        if self.nodes <= 1 or self.per_node <= 1:
            return self._ring(size_bytes)
        # each of a node's ranks exchanges its own 1/k of the buffer across nodes with 1/k of the group's network
        across = Link(self.outer.bytes_per_second / self.per_node, self.outer.latency_seconds)
        inside = self.fabric.node.all_gather(size_bytes, self.per_node)
        return inside + across.all_gather(size_bytes / self.per_node, self.nodes)

    def all_reduce(self, size_bytes: float) -> float:
        """Seconds; the fastest of ring, tree and hierarchical.

        Hierarchical: reduce-scatter inside the node, all-reduce of each shard between nodes, all-gather inside the node.
        """
        if self.size <= 1:
            return 0.0
        if self.nodes <= 1:
            return self.fabric.node.all_reduce(size_bytes, self.size)
        return min(2 * self._ring(size_bytes), self.hierarchical_all_reduce(size_bytes), self._tree(size_bytes))

    def hierarchical_all_reduce(self, size_bytes: float) -> float:
        """Seconds: RS(S) in the node + AR(S/k) between nodes on 1/k of the network + AG(S) in the node."""
        inner = self.fabric.node
        across = Link(self.outer.bytes_per_second / self.per_node, self.outer.latency_seconds)
        return (
            inner.reduce_scatter(size_bytes, self.per_node)
            + across.all_reduce(size_bytes / self.per_node, self.nodes)
            + inner.all_gather(size_bytes, self.per_node)
        )

    def _tree(self, size_bytes: float) -> float:
        inner, outer = self.fabric.node, self.outer
        bandwidth = min(inner.bytes_per_second, outer.bytes_per_second)
        depth = math.ceil(math.log2(max(1, self.nodes))) * outer.latency_seconds
        depth += math.ceil(math.log2(max(1, self.per_node))) * inner.latency_seconds
        return 2 * (depth + size_bytes / bandwidth)

    def all_to_all(self, size_bytes: float) -> float:
        """Seconds; what leaves the node goes over the network, the rest inside."""
        if self.size <= 1:
            return 0.0
        inside = size_bytes * (self.per_node - 1) / self.size / self.fabric.node.bytes_per_second
        leaving = size_bytes * (self.size - self.per_node) / self.size
        across = leaving * self.per_node / self.outer.bytes_per_second if self.nodes > 1 else 0.0
        return (self.size - 1) * self.outer.latency_seconds + max(inside, across)

    def broadcast(self, size_bytes: float) -> float:
        """Seconds; a pipelined tree over nodes, then inside."""
        return self._tree(size_bytes) / 2 if self.size > 1 else 0.0

    def send(self, size_bytes: float) -> float:
        """From one rank to the next of the group, seconds; every group of the node sends at once."""
        if self.size <= 1:
            return 0.0
        if self.nodes <= 1:
            return self.fabric.node.send(size_bytes)
        share = Link(self.outer.bytes_per_second / self.per_node, self.outer.latency_seconds)
        return share.send(size_bytes)
