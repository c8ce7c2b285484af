"""AdamW as the plan describes it. The learning rate is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

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
    on_cuda = any(parameter.is_cuda for parameter in (*decaying, *constant))
    # one kernel for all parameters; on a CPU torch's own choice is as fast
    return torch.optim.AdamW(
        filled, lr=plan.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True if on_cuda else None
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
