"""GiB of a rank's memory by what holds them."""

from __future__ import annotations

from dataclasses import dataclass

from cost_aware_operator.costs.elementwise import Numbers, where

GIB = 2.0**30
FRAMEWORK_GIB = 0.6
"""Memory of a process with torch imported and a process group up: 0.52 GiB resident on CPU (torch 2.15, gloo). On a GPU the
CUDA context takes about as much."""
GPU_FRAMEWORK_GIB = 1.2
"""Memory of the process on a GPU with NCCL: context (about 0.5), communicator buffers (about 0.5), cuBLAS workspaces."""


@dataclass(frozen=True)
class MemoryGib:
    """Peak memory of one rank by what holds it, GiB."""

    weights: float
    """GiB of weights in the precision of compute."""
    gradients: float
    """GiB of gradients."""
    optimizer: float
    """GiB of optimizer states, master weights included."""
    activations: float
    """GiB of activations kept for backward, and of the layer in work."""
    logits: float
    """GiB of the head's output and its gradient."""
    framework: float
    """GiB of the process: torch, the GPU's context, communicators."""

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.framework


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage's ranks by what holds it, GiB. Numbers, or arrays for many layouts."""

    weights: Numbers
    """GiB of weights in the precision of compute."""
    gradients: Numbers
    """GiB of gradients."""
    optimizer: Numbers
    """GiB of optimizer states, master weights included."""
    activations: Numbers
    """GiB of activations kept for backward, and of the layer in work."""
    logits: Numbers
    """GiB of the head's output and its gradient; 0 on every stage before the last."""
    framework: float
    """GiB of the process: torch, the GPU's context, communicators."""

    @property
    def total(self) -> Numbers:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.framework

    def told(self) -> MemoryGib:
        """The figures of one layout."""
        return MemoryGib(**{name: float(getattr(self, name)) for name in MemoryGib.__dataclass_fields__})

    def or_fuller(self, other: StageMemory) -> StageMemory:
        """The fuller of two stages, layout by layout."""
        mine = self.total >= other.total
        return StageMemory(
            where(mine, self.weights, other.weights),
            where(mine, self.gradients, other.gradients),
            where(mine, self.optimizer, other.optimizer),
            where(mine, self.activations, other.activations),
            where(mine, self.logits, other.logits),
            self.framework,
        )


def between(lean: MemoryGib, usual: MemoryGib, usable_gib: float) -> MemoryGib:
    """Mix of usual and lean kernels that fills `usable_gib`; only lean ones where nothing else fits."""
    share = max(0.0, min(1.0, (usable_gib - lean.total) / max(usual.total - lean.total, 1e-12)))
    return MemoryGib(
        **{n: getattr(lean, n) + share * (getattr(usual, n) - getattr(lean, n)) for n in MemoryGib.__dataclass_fields__}
    )
