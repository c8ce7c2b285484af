"""What pods take of a node: requests, as the scheduler adds them up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cost_aware_operator.api import LABEL_JOB
from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.units import quantity

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class PodUse:
    """Amounts that one pod takes of its node."""

    amounts: Amounts
    """Base units by resource, `pods` among them."""
    priority: int = 0
    """The pod's priority."""
    job: JobKey | None = None
    """The training job that it belongs to; None for any other pod."""


def pod_use(document: Mapping[str, Any]) -> PodUse:
    """Amounts that a pod takes, as the API server has it: limits count as requests if there are no others.

    The rule is the scheduler's: containers and sidecars together, or an init container with the sidecars before it where that is
    more, and the overhead of the runtime class (kubernetes.io/docs/concepts/workloads/pods/init-containers, "resource sharing").

    Raises:
        ValueError: not a quantity, which the API server would not have let pass.
    """
    metadata, spec = document["metadata"], document.get("spec") or {}
    sidecars: Amounts = {}
    initial: Amounts = {}
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            sidecars = _sum(sidecars, _requests(container))
            initial = _most(initial, sidecars)
        else:
            initial = _most(initial, _sum(sidecars, _requests(container)))
    together = _sum(sidecars, *map(_requests, spec.get("containers") or []))
    whole = _sum(_most(together, initial), _amounts(spec.get("overhead") or {}), {"pods": 1.0})
    name = (metadata.get("labels") or {}).get(LABEL_JOB)
    return PodUse(whole, spec.get("priority") or 0, JobKey(metadata["namespace"], name) if name else None)


def taken_by_others(uses: Iterable[PodUse], job: JobKey, priority: int) -> Amounts:
    """What pods that are not the job's take, those aside that its pods, of this priority, would displace."""
    return _sum(*(use.amounts for use in uses if use.job != job and use.priority >= priority))


def _requests(container: Mapping[str, Any]) -> Amounts:
    return _amounts((container.get("resources") or {}).get("requests") or {})


def _amounts(quantities: Mapping[str, str]) -> Amounts:
    return {name: quantity(amount) for name, amount in quantities.items()}


def _sum(*amounts: Amounts) -> Amounts:
    names = {name for each in amounts for name in each}
    return {name: sum(each.get(name, 0.0) for each in amounts) for name in names}


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {*one, *other}}
