"""AdamW as the plan describes it. The learning rate is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cost_aware_trainer.contract import OptimizerPlan


def learning_rate(plan: OptimizerPlan, step: int, total_steps: int) -> float:
    """Learning rate of step 1 … total_steps: a linear warm-up, then half a cosine down to the minimum at the last step."""
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    progress = (step - plan.warmup_steps) / max(1, total_steps - plan.warmup_steps)
    span = plan.learning_rate - plan.minimum_learning_rate
    return plan.minimum_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], plan: OptimizerPlan) -> torch.optim.AdamW:
    """Builds AdamW over named parameters. Norms, embeddings and other vectors do not decay."""
    decaying: list[nn.Parameter] = []
    constant: list[nn.Parameter] = []
    for name, parameter in named:
        is_matrix = parameter.dim() > 1 and not name.startswith("embedding.")
        (decaying if is_matrix else constant).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": plan.weight_decay},
        {"params": constant, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    # One kernel for all parameters, four times as fast on a CPU too. It alone clips on the way, and obeys a flag on the device.
    return torch.optim.AdamW(filled, lr=plan.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def update(optimizer: torch.optim.AdamW, loss_and_norm: Tensor, largest_norm: float) -> None:
    """Applies clipped gradients, or leaves everything as it is where loss or norm are not finite. Nothing is read from the device.

    Args:
        optimizer: from `build_optimizer`.
        loss_and_norm: the step's loss, and the squared norm of the whole gradient, (2).
        largest_norm: norm down to which gradients are scaled.
    """
    # torch's own way for loss scalers: the kernel divides gradients by one number, and does nothing if the other is 1
    scale = ((loss_and_norm[1].sqrt() + 1e-6) / largest_norm).clamp(min=1.0)
    is_spoilt = loss_and_norm.isfinite().all().logical_not()
    optimizer.grad_scale, optimizer.found_inf = scale.float(), is_spoilt.float()  # type: ignore[attr-defined]
    optimizer.step()
