"""Update of a session's weights: the scale of its losses, clipping, the rate, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

SMALLEST_SCALE = 2.0**-16
"""Scale of a loss scaler below which gradients that are not finite are no matter of the scale any more."""


class DivergedSessionError(RuntimeError):
    """Loss or gradient that is no longer a finite number. The last checkpoint is kept."""


@dataclass(frozen=True)
class SessionOptimizer:
    """Optimizer of a session, and what acts on gradients before it."""

    model: nn.Module
    """Model whose gradients are clipped."""
    optimizer: torch.optim.Optimizer
    """Optimizer of its parameters."""
    scaler: GradScaler | None
    """Loss scaler of fp16 training, if there is one."""
    learning_rate: Callable[[int], float] | None
    """Rate of a step, counted from 1, if it changes."""
    clip_norm: float
    """Largest gradient norm that is not scaled down."""

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a loss, scaled if there is a scaler."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self) -> None:
        """Takes the loss scaler's factor out of the gradients, if there is one."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)

    def squared_norm(self) -> Tensor:
        """Squared norm of all gradients, on their device."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum()

    def update(self, step: int, loss: float, norm: float, kept: int) -> None:
        """Applies a step's gradients.

        Args:
            step: number of the step, from 1.
            loss: its mean loss.
            norm: norm of the gradients.
            kept: step of the newest checkpoint, for the error's text.

        Raises:
            DivergedSessionError: the loss or the gradient is not finite.
        """
        if not math.isfinite(loss) or not (math.isfinite(norm) or self._may_skip()):
            raise DivergedSessionError(
                f"step {step}: loss {loss}, gradient norm {norm}: not finite; the checkpoint of step {kept} is kept; lower the "
                "learning rate or set clip_norm"
            )
        if norm > self.clip_norm:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, self.clip_norm / (norm + 1e-6))
        if self.learning_rate:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _may_skip(self) -> bool:
        """Whether a gradient that is not finite only means that the loss scaler is to try a smaller scale."""
        return self.scaler is not None and self.scaler.get_scale() > SMALLEST_SCALE
