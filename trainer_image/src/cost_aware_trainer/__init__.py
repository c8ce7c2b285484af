"""Training side: a pod's agent, the runtime that torchrun starts on every rank, and a session for your own model.

`TrainingSession` is imported at its first use, so that the agent and the contract stay free of PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_aware_trainer.training.sessions.session import TrainingSession as TrainingSession

__all__ = ["TrainingSession"]


def __getattr__(name: str) -> Any:
    if name == "TrainingSession":
        from cost_aware_trainer.training.sessions.session import TrainingSession

        return TrainingSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
