"""Seconds that a device was busy, by what it did, from a trace that torch.profiler has exported. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP_MARK = "gpu_check.step"
"""Name of the marked blocks in which the host starts the kernels of a step that counts."""
OPTIMIZER_MARK = "gpu_check.optimizer"
"""Name of the marked blocks, within those, in which it starts the optimizer's kernels."""
GPU_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH_KINDS = frozenset({"cuda_runtime", "cuda_driver"})
CPU_KINDS = frozenset({"cpu_op"})
COMMUNICATION_BEGINNINGS = ("nccl", "gloo:", "c10d::")
MICROSECONDS = 1e6

Span = tuple[float, float]
"""Begin and end, microseconds."""


@dataclass(frozen=True)
class Busy:
    """Seconds by what the device did. No moment is counted twice, so they add up."""

    compute: float
    """Seconds of kernels that are neither of the optimizer nor of a collective."""
    communication: float
    """Seconds of collectives during which nothing else ran."""
    optimizer: float
    """Seconds of the optimizer's kernels, clipping included."""

    @property
    def total(self) -> float:
        """The sum."""
        return self.compute + self.communication + self.optimizer


def union_seconds(spans: Iterable[Span]) -> float:
    """Seconds that at least one span covers."""
    total, covered = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return total / MICROSECONDS


def busy_of(events: Sequence[Mapping[str, Any]], *, on_cuda: bool) -> Busy:
    """Busy seconds of the marked steps of a trace.

    A kernel belongs to the block in which the host started it, whenever it ran. Without CUDA the host's own operations are
    taken in place of kernels, which is good enough to try the code.

    Raises:
        ValueError: the trace holds no kernel of a marked step.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    steps, optimizers = (
        [span_of(event) for event in complete if event["name"] == name and event.get("cat") == "user_annotation"]
        for name in (STEP_MARK, OPTIMIZER_MARK)
    )
    launched_at = {
        event["args"]["correlation"]: float(event["ts"])
        for event in complete
        if event.get("cat") in LAUNCH_KINDS and "correlation" in event.get("args", {})
    }
    optimizer, communication, compute = [], [], []
    for event in complete:
        if event.get("cat") not in (GPU_KINDS if on_cuda else CPU_KINDS):
            continue
        span = span_of(event)
        at = launched_at.get(event.get("args", {}).get("correlation"), span[0]) if on_cuda else span[0]
        if not _is_within(at, steps):
            continue
        if event["name"].lower().startswith(COMMUNICATION_BEGINNINGS):
            communication.append(span)
        else:
            (optimizer if _is_within(at, optimizers) else compute).append(span)
    if not compute:
        raise ValueError(
            "the profiler's trace holds no kernel: CUPTI may be missing, or another profiler may be at work"
        )
    own = union_seconds(optimizer)
    both = union_seconds([*compute, *optimizer])
    everything = union_seconds([*compute, *optimizer, *communication])
    return Busy(compute=both - own, communication=everything - both, optimizer=own)


def span_of(event: Mapping[str, Any]) -> Span:
    """Begin and end of a complete event, microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_within(at: float, blocks: Iterable[Span]) -> bool:
    return any(begin <= at <= end for begin, end in blocks)
