"""Collectives under the alpha-beta model, one link level at a time and across levels.

Time is latency plus bytes over bandwidth. `size_bytes` is always the whole buffer S: what every rank holds before or after
(all-reduce, broadcast), or all shards together (reduce-scatter, all-gather, all-to-all). Factors are those of nccl-tests,
doc/PERFORMANCE.md; ring and tree latencies follow Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). Links must have a positive bandwidth; a group of one rank communicates nothing, in 0 seconds.

Sizes and counts may be numbers or arrays (`elementwise`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from cost_aware_operator.costs.elementwise import Numbers, ceil, least, log2_ceil, most, where


class Level(StrEnum):
    """Where two ranks meet."""

    NODE = "inside the node"
    NETWORK = "between nodes"
    ZONE = "between zones"


@dataclass(frozen=True)
class Link:
    """One direction of one rank's connection."""

    bytes_per_second: float
    """Bandwidth that a collective reaches, bytes a second; positive."""
    latency_seconds: float
    """Seconds that a message waits; 0 or more."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise ValueError(f"bandwidth must be a positive number of bytes a second, got {self.bytes_per_second!r}")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ValueError(f"latency must be a finite number of seconds, 0 or more, got {self.latency_seconds!r}")

    @property
    def path(self) -> Path:
        """The link without its checks, for formulas."""
        return Path(self.bytes_per_second, self.latency_seconds)

    def send(self, size_bytes: float) -> float:
        """Point to point, seconds: alpha + S/B."""
        return float(self.path.send(size_bytes))

    def reduce_scatter(self, size_bytes: float, ranks: int) -> float:
        """Ring, seconds: (n-1) alpha + (n-1)/n S/B."""
        return float(self.path.ring(size_bytes, ranks))

    def all_gather(self, size_bytes: float, ranks: int) -> float:
        """Ring, seconds: (n-1) alpha + (n-1)/n S/B."""
        return float(self.path.ring(size_bytes, ranks))

    def all_to_all(self, size_bytes: float, ranks: int) -> float:
        """Pairwise, seconds: (n-1) alpha + (n-1)/n S/B."""
        return float(self.path.ring(size_bytes, ranks))

    def broadcast(self, size_bytes: float, ranks: int) -> float:
        """Pipelined tree, seconds: ceil(log2 n) alpha + S/B."""
        return float(self.path.broadcast(size_bytes, ranks))

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """The faster of ring and tree, seconds: small buffers go over the tree, large ones over the ring."""
        return float(self.path.all_reduce(size_bytes, ranks))

    def ring_all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Reduce-scatter then all-gather, seconds: 2(n-1) alpha + 2(n-1)/n S/B."""
        return 2 * self.reduce_scatter(size_bytes, ranks)

    def tree_all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Reduce to the root and broadcast, pipelined, seconds: 2 ceil(log2 n) alpha + 2 S/B."""
        return 2 * self.broadcast(size_bytes, ranks)


@dataclass(frozen=True)
class Path:
    """A link, or one link for each of many layouts."""

    bytes_per_second: Numbers
    """Bandwidth that a collective reaches, bytes a second."""
    latency_seconds: Numbers
    """Seconds that a message waits."""

    def send(self, size_bytes: Numbers) -> Numbers:
        """Point to point, seconds."""
        return self.latency_seconds + size_bytes / self.bytes_per_second

    def ring(self, size_bytes: Numbers, ranks: Numbers) -> Numbers:
        """One pass of a ring, seconds; 0 for one rank."""
        return (ranks - 1) * self.latency_seconds + (ranks - 1) / ranks * size_bytes / self.bytes_per_second

    def broadcast(self, size_bytes: Numbers, ranks: Numbers) -> Numbers:
        """Pipelined tree, seconds; 0 for one rank."""
        return where(ranks > 1, log2_ceil(ranks) * self.latency_seconds + size_bytes / self.bytes_per_second, 0.0)

    def all_reduce(self, size_bytes: Numbers, ranks: Numbers) -> Numbers:
        """The faster of ring and tree, seconds."""
        return least(2 * self.ring(size_bytes, ranks), 2 * self.broadcast(size_bytes, ranks))


@dataclass(frozen=True)
class Fabric:
    """The links under a job."""

    ranks_per_node: int
    """Ranks of one node."""
    node: Link
    """Link of one rank inside its node."""
    network: Link
    """Network of a whole node, which its ranks divide among themselves."""
    zone: Link | None = None
    """Share of a whole node of the link between zones; None where all nodes stand in one zone."""
    nodes_per_zone: int | None = None
    """Nodes of one zone; None where all nodes stand in one zone."""

    def group(self, size: Numbers, stride: Numbers = 1) -> Group:
        """`size` ranks, each `stride` after the one before, as laid out with ranks of one node numbered together."""
        per_node = most(1, least(size, self.ranks_per_node // most(1, stride)))
        return Group(self, size, per_node, ceil(size / per_node))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other. Counts may be arrays; seconds then are arrays too.

    All groups of the same kind run at once, so a group that has k of a node's R ranks gets k/R of the node's network.
    """

    fabric: Fabric
    """The links under the job."""
    size: Numbers
    """Ranks of the group."""
    per_node: Numbers
    """Ranks of the group in each of its nodes."""
    nodes: Numbers
    """Nodes that the group spans."""

    @property
    def level(self) -> Level:
        """The slowest level that the group crosses; of one group, not of many."""
        if self.nodes <= 1:
            return Level.NODE
        return Level.ZONE if self.fabric.zone is not None and self._leaves_zone else Level.NETWORK

    @property
    def _leaves_zone(self) -> bool:
        return self.fabric.nodes_per_zone is not None and bool(self.nodes > self.fabric.nodes_per_zone)

    @property
    def outer(self) -> Path:
        """The group's share of the slowest level."""
        inner, far = self.fabric.node, self.fabric.network
        if self.fabric.zone is not None and self._leaves_zone:
            far = self.fabric.zone
        share = least(1.0, self.per_node / self.fabric.ranks_per_node)
        inside = self.nodes <= 1
        return Path(
            where(inside, inner.bytes_per_second, far.bytes_per_second * share),
            where(inside, inner.latency_seconds, far.latency_seconds),
        )

    @property
    def _across(self) -> Path:
        """One rank's part of the group's share."""
        outer = self.outer
        return Path(outer.bytes_per_second / self.per_node, outer.latency_seconds)

    def ring(self, size_bytes: Numbers) -> Numbers:
        """One pass of a ring through every rank, which NCCL runs over all of a node's adapters at once.

        The slower of the two levels bounds the bandwidth. Latency counts each hop at its level's cost. 0 for one rank.
        """
        inner, outer, hops = self.fabric.node, self.outer, self.size - 1
        several = self.per_node > 1
        bandwidth = where(several, least(inner.bytes_per_second, outer.bytes_per_second), outer.bytes_per_second)
        crossing = where(several, least(hops, self.nodes - 1), hops)
        latency = crossing * outer.latency_seconds + (hops - crossing) * inner.latency_seconds
        return latency + hops / self.size * size_bytes / bandwidth

    def all_gather(self, size_bytes: Numbers) -> Numbers:
        """Seconds; the faster of one ring over all ranks and two levels (between nodes, then inside)."""
        ring = self.ring(size_bytes)
        # each of a node's ranks exchanges its own 1/k of the buffer across nodes with 1/k of the group's network
        inside = self.fabric.node.path.ring(size_bytes, self.per_node)
        two_level = inside + self._across.ring(size_bytes / self.per_node, self.nodes)
        return least(ring, where((self.nodes > 1) & (self.per_node > 1), two_level, ring))

    def reduce_scatter(self, size_bytes: Numbers) -> Numbers:
        """Seconds; the mirror image of the all-gather."""
        return self.all_gather(size_bytes)

    def all_reduce(self, size_bytes: Numbers) -> Numbers:
        """Seconds; the fastest of ring, tree and hierarchical.

        Hierarchical: reduce-scatter inside the node, all-reduce of each shard between nodes, all-gather inside the node.
        """
        inside = self.fabric.node.path.all_reduce(size_bytes, self.size)
        outside = least(
            2 * self.ring(size_bytes), least(self.hierarchical_all_reduce(size_bytes), self._tree(size_bytes))
        )
        return where(self.nodes <= 1, inside, outside)

    def hierarchical_all_reduce(self, size_bytes: Numbers) -> Numbers:
        """Seconds: RS(S) in the node + AR(S/k) between nodes on 1/k of the network + AG(S) in the node."""
        inner = self.fabric.node.path.ring(size_bytes, self.per_node)
        return 2 * inner + self._across.all_reduce(size_bytes / self.per_node, self.nodes)

    def _tree(self, size_bytes: Numbers) -> Numbers:
        inner, outer = self.fabric.node, self.outer
        bandwidth = least(inner.bytes_per_second, outer.bytes_per_second)
        depth = log2_ceil(self.nodes) * outer.latency_seconds + log2_ceil(self.per_node) * inner.latency_seconds
        return 2 * (depth + size_bytes / bandwidth)

    def all_to_all(self, size_bytes: Numbers) -> Numbers:
        """Seconds; what leaves the node goes over the network, the rest inside. 0 for one rank."""
        inside = size_bytes * (self.per_node - 1) / self.size / self.fabric.node.bytes_per_second
        leaving = size_bytes * (self.size - self.per_node) / self.size
        across = where(self.nodes > 1, leaving * self.per_node / self.outer.bytes_per_second, 0.0)
        return (self.size - 1) * self.outer.latency_seconds + most(inside, across)

    def broadcast(self, size_bytes: Numbers) -> Numbers:
        """Seconds; a pipelined tree over nodes, then inside."""
        return where(self.size > 1, self._tree(size_bytes) / 2, 0.0)

    def send(self, size_bytes: Numbers) -> Numbers:
        """From one rank to the next of the group, seconds; every group of the node sends at once."""
        inside = self.fabric.node.path.send(size_bytes)
        return where(self.size > 1, where(self.nodes <= 1, inside, self._across.send(size_bytes)), 0.0)
