"""What a session refuses at its start or its first backward pass, by name, because it would go wrong without a word later."""

from __future__ import annotations

import gc
import random
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from cost_aware_trainer.state.validation import InvalidRunError


def check_numbers(**positive: int) -> None:
    """Checks that arguments are positive.

    Raises:
        InvalidRunError: one is not.
    """
    for name, value in positive.items():
        if value < 1:
            raise InvalidRunError(f"{name}: {value} is not positive; write at least 1")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checks that the session alone shares out the model, and sees all that the optimizer trains.

    Raises:
        InvalidRunError: something else sums gradients, or a parameter is not of the model.
    """
    if dist.is_initialized():
        raise InvalidRunError(
            "process group: the script has made the default one already, and a session makes its own; remove "
            "init_process_group, and fully_shard or init_device_mesh, which call it"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise InvalidRunError(
                f"model: {name or 'it'} is wrapped in DistributedDataParallel, and gradients would be summed twice; give the "
                "session the plain module"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise InvalidRunError(
                f"model: {name} is a DTensor, and a session holds parameters whole; remove fully_shard"
            )
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise InvalidRunError(
                    f"optimizer: group {number} holds a parameter of shape {tuple(parameter.shape)} that is not of the model: its "
                    "gradient would not be summed over ranks, nor its value saved; train both as one module, "
                    "nn.ModuleDict({'model': model, 'criterion': criterion}) for example"
                )


def check_helpers(optimizer: torch.optim.Optimizer, given: Collection[Any]) -> None:
    """Looks for a scheduler of this optimizer, or a loss scaler in use, that the session does not know. Takes about 0.1 s.

    Raises:
        InvalidRunError: there is one, which would begin anew on resume.
    """
    for helper in _helpers(optimizer):
        if any(helper is known or getattr(known, "optimizer", None) is optimizer for known in given):
            continue
        if isinstance(helper, GradScaler):
            raise InvalidRunError(
                "scaler: the script scales losses by a GradScaler of its own, so that the session would report scaled losses "
                "and clip scaled gradients; write TrainingSession(..., scaler=scaler) and session.step(loss)"
            )
        raise InvalidRunError(
            f"scheduler: {type(helper).__name__} changes this optimizer's rate, and would begin anew on resume; write "
            "TrainingSession(..., stateful={'scheduler': scheduler}), or learning_rate= with a function of the step"
        )


def _helpers(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler | GradScaler]:
    for found in gc.get_objects():
        kind = type(found)
        if (issubclass(kind, LRScheduler) and found.__dict__.get("optimizer") is optimizer) or (
            issubclass(kind, GradScaler) and found.__dict__.get("_scale") is not None
        ):
            yield found


def is_of_peer(error: BaseException) -> bool:
    """Whether an error tells of another rank's end, and not of its cause."""
    signs = (
        "closed by peer",
        "reset by peer",
        "Timed out waiting",
        "Broken pipe",
        "Connection refused",
        "remote process",
    )
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def seed_all(seed: int) -> None:
    """Seeds the random numbers of torch, on all devices, of numpy and of Python: after a restart they go on as they would have."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
