"""Networks: which axis goes on which link level, how collectives fare on the seeds' topologies, in which zones replicas stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, permutations

from cost_aware_operator.costs.checks import AnalysisError, count, not_negative, positive, share
from cost_aware_operator.costs.models.communication import Fabric, Group, Level, Link
from cost_aware_operator.costs.tables.prices import USD_PER_GB_BETWEEN_ZONES

MOST_ZONES = 10
MOST_AXES = 5


class Topology(StrEnum):
    """How nodes are joined, by the seed's names. A mesh joins every pair, as a switch without contention does."""

    LINEAR = "linear"
    RING = "ring"
    MESH = "mesh"
    TREE = "tree"


class Collective(StrEnum):
    """Who sends what to whom."""

    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    SEND = "send"


class Algorithm(StrEnum):
    """How an all-reduce goes."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True)
class TopologyCost:
    """One collective on one topology."""

    topology: Topology
    """The topology."""
    seconds: float
    """Seconds of the collective."""
    usd: float
    """Dollars of all ranks while they communicate."""
    relative: float
    """Seconds over those of the best topology; 1 is the best."""


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of one parallel axis in a step."""

    axis: str
    """Name of the axis."""
    degree: int
    """Ranks along the axis."""
    collective: Collective
    """Kind of collective."""
    size_bytes: float
    """Bytes of one collective."""
    times: int
    """Collectives in a step."""
    hidden: float = 0.0
    """Share of the time that costs nothing, because computation hides it; 0 to 1."""


@dataclass(frozen=True)
class PlacedAxis:
    """An axis at its place in the order of ranks."""

    axis: str
    """Name of the axis."""
    stride: int
    """Distance in rank numbers between neighbours along the axis."""
    level: Level
    """Slowest level that the axis crosses."""
    seconds: float
    """Exposed seconds a step."""


@dataclass(frozen=True)
class Assignment:
    """One order of the axes."""

    axes: tuple[PlacedAxis, ...]
    """Axes from the fastest-varying rank number to the slowest."""
    seconds: float
    """Exposed seconds a step of all axes."""


@dataclass(frozen=True)
class Zone:
    """Nodes that could be had in one zone."""

    name: str
    """Name of the zone."""
    nodes: int
    """Most nodes that the zone has."""
    node_hourly_usd: float
    """Dollars an hour of one node."""


@dataclass(frozen=True)
class Placement:
    """One choice of nodes by zone."""

    nodes: tuple[tuple[str, int], ...]
    """Nodes of each zone, by name of the zone."""
    step_seconds: float
    """Seconds of one step."""
    compute_usd: float
    """Dollars of the nodes over all steps."""
    egress_usd: float
    """Dollars of traffic between zones over all steps."""

    @property
    def usd(self) -> float:
        """Both."""
        return self.compute_usd + self.egress_usd


class NetworkTopologyOptimizer:
    """Collectives priced, axes ordered, replicas placed."""

    def seconds(self, topology: Topology, collective: Collective, size_bytes: float, ranks: int, link: Link) -> float:
        """Seconds of a collective over `ranks` ranks; every link carries `link` in each direction.

        `size_bytes` is the whole buffer S as in `communication`. With B and alpha of a link, messages pipelined where all of S
        passes a rank:

            linear  all-reduce 2 S/B, broadcast S/B, scatter (n-1)/n S/B, all at (n-1) alpha a pass; all-to-all f(n-f)/n S/B through
                    the middle link, f = floor(n/2)
            ring    all-reduce 2 (n-1)/n S/B; broadcast and scatter go both ways round, floor(n/2) alpha; all-to-all by the shorter
                    way, floor(n^2/4)/2n S/B on a link, no less than (n-1)/n S/B into a rank
            mesh    all-reduce by halving and doubling, 2 ceil(log2 n) alpha + 2 (n-1)/n S/B (Thakur et al. 2005); broadcast and
                    scatter over a binomial tree; all-to-all (n-1) alpha + (n-1)/n S/B
            tree    binary, inner ranks forward to both children at once: depth alpha a pass, 2 S/B, S/B, (n-1)/n S/B; all-to-all
                    m(n-m)/n S/B through a link under the root, with m ranks below it

        Raises:
            AnalysisError: a size or a count out of range, or a collective other than the seed's four.
        """
        size, n = not_negative("size_bytes", size_bytes), count("ranks", ranks)
        if collective in (Collective.ALL_GATHER, Collective.SEND):
            raise AnalysisError(
                f"collective: {collective} is not priced by topology: write all-reduce, broadcast, scatter or all-to-all"
            )
        if n == 1:
            return 0.0
        hops = {
            Topology.LINEAR: n - 1,
            Topology.RING: n // 2,
            Topology.MESH: math.ceil(math.log2(n)),
            Topology.TREE: n.bit_length() - 1,
        }[topology]
        part = (n - 1) / n
        scale: float
        if collective is Collective.ALL_REDUCE:
            hops = 2 * (n - 1 if topology is Topology.RING else hops)
            scale = 2 * (part if topology in (Topology.RING, Topology.MESH) else 1.0)
        elif collective is Collective.BROADCAST:
            scale = 1.0
        elif collective is Collective.SCATTER:
            scale = part
        else:
            hops = {Topology.MESH: n - 1, Topology.TREE: 2 * hops}.get(topology, hops)
            below = _largest_branch(n)
            scale = max(
                part,
                {
                    Topology.LINEAR: (n // 2) * (n - n // 2) / n,
                    Topology.RING: (n * n // 4) / (2 * n),
                    Topology.MESH: part,
                    Topology.TREE: below * (n - below) / n,
                }[topology],
            )
        return hops * link.latency_seconds + scale * size / link.bytes_per_second

    def price(
        self, collective: Collective, size_bytes: float, ranks: int, link: Link, rank_hourly_usd: float
    ) -> tuple[TopologyCost, ...]:
        """The seed's four topologies, the cheapest first: dollars are what all ranks cost while they communicate.

        Raises:
            AnalysisError: a figure out of range.
        """
        usd = positive("rank_hourly_usd", rank_hourly_usd, 1e9)
        found = {t: self.seconds(t, collective, size_bytes, ranks, link) for t in Topology}
        best = min(found.values())
        costs = [TopologyCost(t, s, s / 3600 * ranks * usd, s / best if best > 0 else 1.0) for t, s in found.items()]
        return tuple(sorted(costs, key=lambda cost: cost.seconds))

    def algorithm(self, group: Group, size_bytes: float) -> tuple[Algorithm, float]:
        """The fastest all-reduce of a group over its levels, and its seconds.

        Raises:
            AnalysisError: a size out of range.
        """
        size = not_negative("size_bytes", size_bytes)
        best = group.all_reduce(size)
        if group.size <= 1:
            return Algorithm.RING, 0.0
        if group.nodes <= 1:
            ring = group.fabric.node.ring_all_reduce(size, group.size)
            return (Algorithm.RING if ring <= best else Algorithm.TREE), best
        if group.hierarchical_all_reduce(size) <= best:
            return Algorithm.HIERARCHICAL, best
        return (Algorithm.TREE if 2 * group.broadcast(size) <= best else Algorithm.RING), best

    def assign(self, traffic: Sequence[AxisTraffic], fabric: Fabric) -> tuple[Assignment, ...]:
        """Every order of the axes over the fabric, the one with the least exposed communication first.

        An axis that comes earlier has neighbours with closer rank numbers, so it stays inside a node for longer.

        Raises:
            AnalysisError: no axis, more than five, an axis twice, or figures out of range.
        """
        if not 1 <= len(traffic) <= MOST_AXES:
            raise AnalysisError(f"traffic: {len(traffic)} axes: write 1 to {MOST_AXES}")
        if len({t.axis for t in traffic}) < len(traffic):
            raise AnalysisError("traffic: an axis stands twice: write each once")
        for one in traffic:
            count(f"traffic.{one.axis}.degree", one.degree, 1, 10**7)
            count(f"traffic.{one.axis}.times", one.times, 0)
            not_negative(f"traffic.{one.axis}.size_bytes", one.size_bytes, 1e16)
            share(f"traffic.{one.axis}.hidden", one.hidden)
        found = []
        for order in permutations(traffic):
            stride, axes = 1, []
            for one in order:
                group = fabric.group(one.degree, stride)
                seconds = one.times * (1 - one.hidden) * _group_seconds(group, one) if one.degree > 1 else 0.0
                axes.append(PlacedAxis(one.axis, stride, group.level, seconds))
                stride *= one.degree
            found.append(Assignment(tuple(axes), sum(axis.seconds for axis in axes)))
        return tuple(sorted(found, key=lambda assignment: assignment.seconds))

    def place(
        self,
        zones: Sequence[Zone],
        nodes: int,
        steps: int,
        step_seconds: float,
        gradient_bytes: float,
        zone_link: Link,
        *,
        hidden: float = 0.0,
        usd_per_gb: float = USD_PER_GB_BETWEEN_ZONES,
    ) -> tuple[Placement, ...]:
        """Every useful choice of zones for a data-parallel job, the cheapest first.

        Gradients are reduced inside a zone, all-reduced between z zones, and handed out again: 2 (z-1) S bytes cross a step in all,
        and take an all-reduce over `zone_link` of which a share `hidden` is free. `step_seconds` is that of a single zone. A choice
        fills its cheaper zones first and uses each of them.

        Raises:
            AnalysisError: no zone, too many, fewer nodes in all than wanted, or figures out of range.
        """
        count("nodes", nodes, 1, 10**6)
        count("steps", steps)
        positive("step_seconds", step_seconds, 1e9)
        size = not_negative("gradient_bytes", gradient_bytes, 1e16)
        share("hidden", hidden)
        not_negative("usd_per_gb", usd_per_gb, 1e6)
        if not 1 <= len(zones) <= MOST_ZONES:
            raise AnalysisError(f"zones: {len(zones)} of them: write 1 to {MOST_ZONES}")
        for zone in zones:
            count(f"zones.{zone.name}.nodes", zone.nodes, 0)
            positive(f"zones.{zone.name}.node_hourly_usd", zone.node_hourly_usd, 1e6)
        there = sum(zone.nodes for zone in zones)
        if there < nodes:
            raise AnalysisError(f"nodes: {nodes} wanted, {there} in all zones: write {there} or fewer")
        cheapest_first = sorted((z for z in zones if z.nodes), key=lambda z: z.node_hourly_usd)
        found = []
        for z in range(1, len(cheapest_first) + 1):
            across = (1 - hidden) * zone_link.all_reduce(size, z)
            egress = steps * 2 * (z - 1) * size / 1e9 * usd_per_gb
            for chosen in combinations(cheapest_first, z):
                counts = _fill(chosen, nodes)
                if counts is None:
                    continue
                hourly = sum(zone.node_hourly_usd * n for zone, n in zip(chosen, counts, strict=True))
                seconds = step_seconds + across
                where = tuple((zone.name, n) for zone, n in zip(chosen, counts, strict=True))
                found.append(Placement(where, seconds, steps * seconds / 3600 * hourly, egress))
        return tuple(sorted(found, key=lambda placement: placement.usd))


def _fill(zones: Sequence[Zone], nodes: int) -> list[int] | None:
    """One node in each zone, the rest in the cheapest; None where they do not fit, or a zone would stay empty."""
    left = nodes - len(zones)
    if left < 0 or sum(zone.nodes for zone in zones) < nodes:
        return None
    counts = []
    for zone in zones:
        more = min(left, zone.nodes - 1)
        left -= more
        counts.append(1 + more)
    return counts


def _largest_branch(ranks: int) -> int:
    """Ranks under the left child of the root of a complete binary tree."""
    depth = ranks.bit_length() - 1
    if depth == 0:
        return 0
    half = 1 << (depth - 1)
    return half - 1 + min(ranks - (2 * half - 1), half)


def _group_seconds(group: Group, traffic: AxisTraffic) -> float:
    of = {
        Collective.ALL_REDUCE: group.all_reduce,
        Collective.ALL_GATHER: group.all_gather,
        Collective.SCATTER: group.all_gather,
        Collective.ALL_TO_ALL: group.all_to_all,
        Collective.SEND: group.send,
    }
    return float(of.get(traffic.collective, group.broadcast)(traffic.size_bytes))
