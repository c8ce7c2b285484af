"""The nodes of a local engine: those that a person declares, or the machine that this is."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cost_aware_operator.costs.tables.prices import MOST_HOURLY_USD, PriceBook
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.node_labels import INSTANCE_TYPE_LABELS, ZONE_LABELS

WRITER = "kubelet"
THIS_MACHINE = "local"
"""Instance type of the machine that this is. No table has a price for it."""
ZONE = "local"
MOST_DECLARED = 500
PODS_OF_A_NODE = 110
GPU = "nvidia.com/gpu"
_FORM = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,51}[A-Za-z0-9])?)(?:\*([0-9]+))?", re.ASCII)


class NodeTextError(ValueError):
    """Text that declares no nodes. It says what to write instead."""


@dataclass(frozen=True)
class NodeSize:
    """What pods may take of a node."""

    cores: float
    """Cores."""
    memory_bytes: int
    """Memory, bytes."""
    gpus: int
    """GPUs."""


@dataclass(frozen=True)
class DeclaredNodes:
    """Nodes of one type."""

    instance_type: str
    """Their instance type."""
    count: int
    """How many there are."""
    size: NodeSize
    """What pods may take of each."""


def declared_nodes(
    texts: Sequence[str], book: PriceBook, here: NodeSize, hourly_usd: float | None = None
) -> tuple[DeclaredNodes, ...]:
    """Nodes as `TYPE` or `TYPE*COUNT` declare them; without any, one that is this machine.

    A type that the book does not know is taken if its price is given, and then it is as large as this machine.

    Raises:
        NodeTextError: a text or the price cannot be used.
    """
    if hourly_usd is not None and not (math.isfinite(hourly_usd) and 0 < hourly_usd <= MOST_HOURLY_USD):
        most = f"{MOST_HOURLY_USD:,.0f}"
        raise NodeTextError(f"--hourly {hourly_usd:g}: write dollars an hour of one node, above 0 and at most {most}")
    found: dict[str, DeclaredNodes] = {}
    for text in texts:
        instance_type, count = _parsed(text)
        if instance_type in found:
            raise NodeTextError(f"--node {instance_type} is there twice: write it once, as {instance_type}*COUNT")
        size = _size_of(instance_type, book, here, hourly_usd)
        found[instance_type] = DeclaredNodes(instance_type, count, size)
    if sum(nodes.count for nodes in found.values()) > MOST_DECLARED:
        raise NodeTextError(f"--node: more than {MOST_DECLARED} nodes in all: write fewer")
    return tuple(found.values()) or (DeclaredNodes(THIS_MACHINE, 1, here),)


def price_rows(nodes: Sequence[DeclaredNodes], hourly_usd: float | None, as_of: str) -> str:
    """Rows for `PriceBook.overridden` that give the declared nodes the price of `--hourly`; no rows without one."""
    if hourly_usd is None:
        return "[]"
    said = {"hourlyUSD": hourly_usd, "source": "--hourly", "asOf": as_of}
    return json.dumps([{"instanceType": one.instance_type, **said} for one in nodes])


def node_documents(nodes: Sequence[DeclaredNodes], now: datetime) -> list[dict[str, Any]]:
    """Nodes as Kubernetes has them, each with its status."""
    return [_document(one, number, now) for one in nodes for number in range(one.count)]


def put_nodes(store: ObjectStore, documents: Sequence[Mapping[str, Any]]) -> None:
    """Makes the store's nodes those that are declared; others are removed. Raises ApiError where the store refuses."""
    wanted = {ObjectKey.of(document) for document in documents}
    for found in list(store.list("Node")):
        if ObjectKey.of(found) not in wanted:
            store.delete(ObjectKey.of(found))
    for document in documents:
        store.apply({name: value for name, value in document.items() if name != "status"}, WRITER)
        before = (store.get(ObjectKey.of(document)) or {}).get("status") or {}
        if _steady(before) != _steady(document["status"]):
            # all of it, so that what an earlier declaration had more of is gone
            store.apply_status(document, WRITER)


def this_machine(root: Path = Path("/"), run: Callable[[Sequence[str]], str | None] | None = None) -> NodeSize:
    """The machine that this is, within its control group's limits. `run` gives a program's output, None where it failed."""
    return NodeSize(_cores(root), _memory_bytes(root), _gpus(root, run or _run))


def _parsed(text: str) -> tuple[str, int]:
    match = _FORM.fullmatch(text)
    if match is None:
        raise NodeTextError(f"--node {text!r}: write an instance type, or TYPE*COUNT such as p3.2xlarge*2, no spaces")
    count = (
        int(match[2]) if match[2] is not None and len(match[2]) < 10 else 1 if match[2] is None else MOST_DECLARED + 1
    )
    if not 1 <= count <= MOST_DECLARED:
        raise NodeTextError(f"--node {text}: the count must be from 1 to {MOST_DECLARED}")
    return match[1], count


def _size_of(instance_type: str, book: PriceBook, here: NodeSize, hourly_usd: float | None) -> NodeSize:
    known = book.instances.get(instance_type)
    if known is None:
        if hourly_usd is None and not book.knows(instance_type) and instance_type != THIS_MACHINE:
            similar = book.similar(instance_type)
            near = f": did you mean {' or '.join(similar)}?" if similar else ""
            raise NodeTextError(
                f"--node {instance_type}: not in the price tables{near} Or give its price with --hourly"
            )
        return here
    memory = here.memory_bytes if known.memory_gib is None else int(known.memory_gib * 2**30)
    return NodeSize(known.vcpus or here.cores, memory, known.accelerators)


def _document(nodes: DeclaredNodes, number: int, now: datetime) -> dict[str, Any]:
    name, size, at = f"{nodes.instance_type.lower().replace('_', '-')}-{number}", nodes.size, now
    amounts = {
        "cpu": f"{round(size.cores * 1000)}m",
        "memory": f"{size.memory_bytes // 1024}Ki",
        "pods": str(PODS_OF_A_NODE),
    }
    if size.gpus:
        amounts[GPU] = str(size.gpus)
    labels = {
        INSTANCE_TYPE_LABELS[0]: nodes.instance_type,
        ZONE_LABELS[0]: ZONE,
        "karpenter.sh/capacity-type": "on-demand",
        "kubernetes.io/hostname": name,
    }
    text = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": text}
    status = {"capacity": amounts, "allocatable": dict(amounts), "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def _steady(status: Mapping[str, Any]) -> object:
    """All of a status but its times."""
    conditions = status.get("conditions") or []
    return status.get("allocatable"), [(one["type"], one["status"]) for one in conditions]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cores(root: Path) -> float:
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:
        cores = float(os.cpu_count() or 1)
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = min(cores, int(quota) / int(period))
    return cores


def _memory_bytes(root: Path) -> int:
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    whole = int(total[1]) * 1024 if total is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([whole, *(int(limit) for limit in limits if limit.isdecimal())])


def _gpus(root: Path, run: Callable[[Sequence[str]], str | None]) -> int:
    listed = run(["nvidia-smi", "-L"])
    if listed is not None:
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
