"""Nodes of the cluster, asked for as rarely as prices and placement allow."""

from __future__ import annotations

from typing import Protocol

from cost_aware_operator.engines.cluster import Cluster
from cost_aware_operator.sources.clock import Clock
from cost_aware_operator.workload.usage import PodUse, pod_use
from cost_aware_operator.workload.views import NodeView, node_view

NODE_SECONDS = 60.0
"""How long a list of all nodes is believed."""
OWN_NODE_SECONDS = 20.0
"""How long what is known of a node under a pod is believed: a spot node is told of its end two minutes before, or half of one."""


class Nodes(Protocol):
    """Nodes by name."""

    async def get(self, name: str) -> NodeView | None:
        """A node's labels."""

    async def all(self, instance_types: tuple[str, ...]) -> tuple[NodeView, ...] | None:
        """All nodes of some types; None where they may not be listed."""

    async def uses(self, name: str) -> tuple[PodUse, ...] | None:
        """What pods take of a node; None where they may not be listed."""


class CachedNodes:
    """Nodes, asked for three times a minute each."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, tuple[float, NodeView | None]] = {}
        self._listed: dict[tuple[str, ...], tuple[float, tuple[NodeView, ...] | None]] = {}
        self._used: dict[str, tuple[float, tuple[PodUse, ...] | None]] = {}

    async def get(self, name: str) -> NodeView | None:
        """A node's labels; None where it may not be read or is gone and was never known."""
        known = self._known.get(name)
        if known is not None and self._clock.monotonic() - known[0] < OWN_NODE_SECONDS:
            return known[1]
        document = await self._cluster.node(name)
        # a node that has gone is still the one whose price its pods were paid at
        view = node_view(document) if document is not None else known[1] if known else None
        self._known[name] = (self._clock.monotonic(), view)
        return view

    async def all(self, instance_types: tuple[str, ...]) -> tuple[NodeView, ...] | None:
        """All nodes of some types, or of any; None where they may not be listed. Asked for once a minute."""
        known = self._listed.get(instance_types)
        if known is not None and self._clock.monotonic() - known[0] < NODE_SECONDS:
            return known[1]
        documents = await self._cluster.nodes(instance_types)
        found = None if documents is None else tuple(node_view(document) for document in documents)
        self._listed[instance_types] = (self._clock.monotonic(), found)
        return found

    async def uses(self, name: str) -> tuple[PodUse, ...] | None:
        """What pods take of a node; None where pods of all namespaces may not be listed. Asked for once a minute."""
        known = self._used.get(name)
        if known is not None and self._clock.monotonic() - known[0] < NODE_SECONDS:
            return known[1]
        documents = await self._cluster.pods_on(name)
        found = None if documents is None else tuple(map(pod_use, documents))
        self._used[name] = (self._clock.monotonic(), found)
        return found
