"""The scheduler: gives pods their nodes. A job's pods start together or wait, first come, first served. The planning is pure.

What is left out of Kubernetes': preferences, preemption, pod affinity, and anti-affinity other than by labels and host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cost_aware_operator.api import LABEL_JOB
from cost_aware_operator.api.units import quantity
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.placement import FORBIDDING, tolerates
from cost_aware_operator.workload.usage import Amounts, pod_use
from cost_aware_operator.workload.views import NodeView, node_view

WRITER = "scheduler"
HOST_LABEL = "kubernetes.io/hostname"
_ENDED = ("Succeeded", "Failed")
Document = Mapping[str, Any]


@dataclass(frozen=True)
class Scheduled:
    """Which pods get which nodes, and why the others wait."""

    nodes: Mapping[ObjectKey, str]
    """Names of nodes by pod."""
    waiting: Mapping[ObjectKey, str]
    """Why a pod waits, by pod."""


def schedule(pods: Iterable[Document], nodes: Iterable[Document], jobs: Iterable[Document] = ()) -> Scheduled:
    """Gives the pending pods nodes, from all pods, nodes and Jobs that there are."""
    alive = [pod for pod in pods if _phase(pod) not in _ENDED]
    free = [_Place(node_view(node)) for node in sorted(nodes, key=_natural)]
    by_name = {place.node.name: place for place in free}
    groups: dict[str, list[Document]] = {}
    for pod in alive:
        groups.setdefault(_owner(pod), []).append(pod)
        place = by_name.get((pod.get("spec") or {}).get("nodeName") or "")
        if place is not None:
            place.take(pod)
    wanted = {job["metadata"]["uid"]: _pods_wanted(job) for job in jobs}
    bound: dict[ObjectKey, str] = {}
    waiting: dict[ObjectKey, str] = {}
    for owner, group in sorted(groups.items(), key=lambda one: (min(map(_age, one[1])), one[0])):
        pending = sorted((pod for pod in group if _is_pending(pod)), key=_natural)
        if not pending:
            continue
        if len(group) == len(pending) < wanted.get(owner, 0):
            why = f"{len(pending)} of {wanted[owner]} pods of the job are made"
            waiting.update({ObjectKey.of(pod): why for pod in pending})
            continue
        found = _places(pending, free)
        if found is None:
            why = _wait(pending, free)
            waiting.update({ObjectKey.of(pod): why for pod in pending})
            continue
        for pod, place in zip(pending, found, strict=True):
            place.take(pod)
            bound[ObjectKey.of(pod)] = place.node.name
    return Scheduled(bound, waiting)


def sync_scheduling(store: ObjectStore, now: datetime) -> tuple[str, ...]:
    """Gives nodes to the pods that can have one, and tells the others why they wait. Harmless to repeat.

    Returns:
        Writes that the store refused, for the log.
    """
    pods = list(store.list("Pod"))
    planned = schedule(pods, store.list("Node"), store.list("Job"))
    refused: list[str] = []
    for pod in pods:
        key = ObjectKey.of(pod)
        try:
            if key in planned.nodes:
                store.patch(key, {"spec": {"nodeName": planned.nodes[key]}}, WRITER)
            if key in planned.nodes or ((pod.get("spec") or {}).get("nodeName") and _phase(pod) not in _ENDED):
                _tell(store, key, now, status="True")
            elif key in planned.waiting:
                _tell(store, key, now, status="False", message=planned.waiting[key])
        except ApiError as error:
            refused.append(f"{key}: {error}")
    return tuple(refused)


def _tell(store: ObjectStore, key: ObjectKey, now: datetime, *, status: str, message: str = "") -> None:
    """Writes the pod's PodScheduled condition, if it says something else so far."""
    found = store.get(key)
    if found is None:
        return
    conditions = (found.get("status") or {}).get("conditions") or []
    before: Document = next((one for one in conditions if one["type"] == "PodScheduled"), {})
    at = before.get("lastTransitionTime") if before.get("status") == status else None
    told = {"type": "PodScheduled", "status": status, "lastTransitionTime": at or now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    if message:
        told |= {"reason": "Unschedulable", "message": message}
    if told != before:
        rest = [one for one in conditions if one["type"] != "PodScheduled"]
        store.patch(key, {"status": {"phase": _phase(found), "conditions": [*rest, told]}}, WRITER, only_status=True)


@dataclass
class _Place:
    """A node with the pods on it."""

    node: NodeView
    """The node."""
    pods: list[Document] = field(default_factory=list)
    """Pods that take something of it."""
    kept_for: str = ""
    """The job that waits for this node; empty where none does."""

    def take(self, pod: Document) -> None:
        self.pods.append(pod)

    def could(self, pod: Document) -> bool:
        """Whether a pod may go here and fits while nothing else is here."""
        return _may(self.node, pod) and not self.short(pod, ())

    def can(self, pod: Document) -> bool:
        """Whether a pod may go here now."""
        return not self.kept_for and self.could(pod) and not self.repels(pod) and not self.short(pod, self.pods)

    def repels(self, pod: Document) -> bool:
        return any(_keeps_apart(pod, other) for other in self.pods)

    def short(self, pod: Document, beside: Sequence[Document]) -> list[str]:
        """Resources of which too little is left."""
        taken = [pod_use(other).amounts for other in beside]
        found = []
        for name, amount in pod_use(pod).amounts.items():
            allocatable = self.node.allocatable.get(name)
            if allocatable is None:
                # what a node does not count is not limited, but for devices
                if "/" in name and amount:
                    found.append(name)
            elif amount + sum(each.get(name, 0.0) for each in taken) > quantity(allocatable) + 1e-9:
                found.append(name)
        return sorted(found)

    def told(self, pod: Document) -> str:
        """What of the node is taken, and by whom."""
        if self.kept_for:
            return f"{self.node.name}: kept for {self.kept_for}, which came first"
        amounts: Amounts = pod_use(pod).amounts
        short = self.short(pod, self.pods)
        parts = []
        for name in short:
            takers = sorted({_name(other) for other in self.pods if pod_use(other).amounts.get(name)})
            taken = sum(pod_use(other).amounts.get(name, 0.0) for other in self.pods)
            share = f"{_amount(name, taken)} of {_amount(name, quantity(self.node.allocatable[name]))}"
            parts.append(f"{name}: {share} taken by {', '.join(takers)}, {_amount(name, amounts[name])} needed")
        return f"{self.node.name}: " + ("; ".join(parts) or f"taken by {_name(self.pods[0])}")


def _places(pending: Sequence[Document], places: Sequence[_Place]) -> list[_Place] | None:
    """A node for each pod, or nothing at all."""
    found: list[_Place] = []
    tried = [_Place(place.node, list(place.pods), place.kept_for) for place in places]
    for pod in pending:
        at = next((i for i, place in enumerate(tried) if place.can(pod)), None)
        if at is None:
            return None
        tried[at].take(pod)
        found.append(places[at])
    return found


def _wait(pending: Sequence[Document], places: Sequence[_Place]) -> str:
    """Why pods wait. Nodes that they could use are kept for them, unless there are too few in all."""
    first = pending[0]
    fitting = [place for place in places if place.could(first)]
    needed = f"needs {len(pending)} {'node' if len(pending) == 1 else 'nodes'}"
    empty = [_Place(place.node) for place in fitting]
    if _places(pending, empty) is None:
        return f"{needed}; {len(fitting)} of {len(places)} nodes are of its kind and large enough"
    taken = [place for place in fitting if not place.can(first)]
    said = f"{needed}, {len(fitting) - len(taken)} free; " + "; ".join(place.told(first) for place in taken)
    for place in fitting:
        place.kept_for = place.kept_for or _name(first)
    return said[:1000]


def _may(node: NodeView, pod: Document) -> bool:
    spec = pod.get("spec") or {}
    if not node.ready or node.unschedulable:
        return False
    if any(node.labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return False
    tolerations = spec.get("tolerations") or []
    if any(t.effect in FORBIDDING and not any(tolerates(own, t) for own in tolerations) for t in node.taints):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return required is None or any(_holds(term, node) for term in required.get("nodeSelectorTerms") or [])


def _holds(term: Document, node: NodeView) -> bool:
    by_label = [(node.labels.get(one["key"]), one) for one in term.get("matchExpressions") or []]
    by_field = [(node.name, one) for one in term.get("matchFields") or []]
    return all(_matches(found, one) for found, one in [*by_label, *by_field])


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda found, values: found in values,
    "NotIn": lambda found, values: found not in values,
    "Exists": lambda found, _: found is not None,
    "DoesNotExist": lambda found, _: found is None,
    "Gt": lambda found, values: found is not None and int(found) > int(values[0]),
    "Lt": lambda found, values: found is not None and int(found) < int(values[0]),
}


def _matches(found: str | None, requirement: Document) -> bool:
    return _OPERATORS[requirement["operator"]](found, requirement.get("values") or ())


def _keeps_apart(pod: Document, other: Document) -> bool:
    """Whether one of two pods must not be on the other's node."""
    return _avoids(pod, other) or _avoids(other, pod)


def _avoids(pod: Document, other: Document) -> bool:
    if pod["metadata"]["namespace"] != other["metadata"]["namespace"]:
        return False
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("podAntiAffinity") or {}
    labels = (other["metadata"].get("labels") or {}).items()
    return any(
        term["topologyKey"] == HOST_LABEL
        and ((term.get("labelSelector") or {}).get("matchLabels") or {}).items() <= labels
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    )


def _pods_wanted(job: Document) -> int:
    spec, status = job["spec"], job.get("status") or {}
    left = int(spec.get("completions") or 1) - int(status.get("succeeded") or 0)
    return min(int(spec.get("parallelism", 1)), left)


def _is_pending(pod: Document) -> bool:
    return not (pod.get("spec") or {}).get("nodeName") and "deletionTimestamp" not in pod["metadata"]


def _phase(pod: Document) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def _owner(pod: Document) -> str:
    owners = [r["uid"] for r in pod["metadata"].get("ownerReferences") or () if r.get("controller")]
    return str(owners[0] if owners else pod["metadata"]["uid"])


def _name(pod: Document) -> str:
    """The job that a pod belongs to, or the pod."""
    metadata = pod["metadata"]
    job = (metadata.get("labels") or {}).get(LABEL_JOB) or (metadata.get("labels") or {}).get("job-name")
    return f"{metadata['namespace']}/{job or metadata['name']}"


def _age(pod: Document) -> tuple[str, str]:
    return pod["metadata"]["creationTimestamp"], _name(pod)


def _natural(document: Document) -> list[tuple[int, str]]:
    """A key by which node 10 comes after node 2."""
    parts = re.split(r"(\d+)", document["metadata"]["name"])
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.4g} GiB" if "memory" in name or "storage" in name else f"{amount:.4g}"
