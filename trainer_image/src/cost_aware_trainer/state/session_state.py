"""State of any model and any of torch's optimizers, as whole tensors by name, for the checkpoints of a session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cost_aware_trainer.data.samples import checksum_text
from cost_aware_trainer.distributed.layout import Box
from cost_aware_trainer.state.manifests import COMPILED, CheckpointManifest, TensorFacts, plain
from cost_aware_trainer.state.state import Checksums, StatePart, checksum
from cost_aware_trainer.state.stateful import StatefulObjects, is_extra
from cost_aware_trainer.state.validation import InvalidRunError


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer the state that its first step would give it, so that loading can fill it. Gradients and rates are 0.

    Raises:
        InvalidRunError: the optimizer keeps other things than tensors.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRunError(
            "optimizer: LBFGS calls the loss itself; use one that steps once per backward pass, as AdamW"
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for name, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                raise InvalidRunError(
                    f"optimizer: {type(optimizer).__name__} keeps {name} as {type(value).__name__}, which checkpoints "
                    "cannot hold; use one whose state are tensors, as SGD's or AdamW's"
                )


def whole_parts(model: nn.Module, optimizer: torch.optim.Optimizer, *, are_plain: bool = True) -> list[StatePart]:
    """Lists the state in place: `model.…` for parameters and buffers, `optimizer.state.<parameter>.…` for the optimizer's.

    Args:
        model: the session's.
        optimizer: its.
        are_plain: whether names are those of the modules, as always but in checkpoints of compiled modules of old.

    Raises:
        InvalidRunError: the model's state holds something that is not in place.
    """
    named = plain if are_plain else str
    in_place = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=False).items():
        if is_extra(name):
            continue
        if not isinstance(value, Tensor) or (value.numel() and value.untyped_storage().data_ptr() not in in_place):
            raise InvalidRunError(
                f"model: {plain(name)} in its state_dict() is made anew by a hook, so that nothing would be restored into it; "
                "keep it as a parameter or a buffer, or return it by get_extra_state()"
            )
        tensors[f"model.{named(name)}"] = value
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.state.{named(name)}.{key}"] = value
    return [_whole(name, tensor.detach()) for name, tensor in tensors.items()]


def parts_in(manifest: CheckpointManifest, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[StatePart]:
    """Lists what of the state a checkpoint holds, in place. The optimizer forgets parameters that were never used until then.

    Raises:
        InvalidRunError: the optimizer there kept other things of a parameter.
    """
    are_plain = not any(COMPILED in name for name in manifest.tensors)
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.state.{plain(name) if are_plain else name}."
        held = {key.removeprefix(prefix) for key in manifest.tensors if key.startswith(prefix)}
        wanted = {key for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
        if not held:
            optimizer.state.pop(parameter, None)
        elif held != wanted:
            raise InvalidRunError(
                f"optimizer: the checkpoint holds {', '.join(sorted(held))} of {plain(name)}, {type(optimizer).__name__} "
                f"keeps {', '.join(sorted(wanted)) or 'nothing'}; restore the optimizer, or name an empty folder"
            )
    return whole_parts(model, optimizer, are_plain=are_plain) + StatefulObjects.parts_in(manifest)


def _whole(name: str, tensor: Tensor) -> StatePart:
    shape = tuple(tensor.shape)
    return StatePart(name, tensor, Box((0,) * len(shape), shape), shape, name, is_copy=False)


class WholeChecksums(Checksums):
    """Checksums of a run in which every rank holds every tensor whole, so that no rank has to be asked."""

    def __init__(self) -> None:
        """Needs neither mesh nor shapes."""

    def facts(self, state: Mapping[str, Tensor], parts: list[StatePart]) -> dict[str, TensorFacts]:
        """Computes facts of all tensors; `state` holds staged values."""
        return {
            part.name: TensorFacts(
                shape=part.shape,
                dtype=str(part.values.dtype),
                checksum=checksum_text(checksum(state[part.name], part.box, part.shape)),
            )
            for part in parts
        }

    def wrong(self, parts: list[StatePart], facts: Mapping[str, TensorFacts]) -> Iterator[str]:
        """Yields names of tensors whose content is not that of `facts`, or that are missing there."""
        for part in parts:
            expected = facts.get(part.name)
            if expected is None or expected.checksum != checksum_text(checksum(part.values, part.box, part.shape)):
                yield part.name
