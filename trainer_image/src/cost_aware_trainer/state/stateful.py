"""State of objects beside model and optimizer: schedulers, a loss scaler, a loader's position, extra state of modules.

Each object's state is one tensor of bytes in a checkpoint, `session.<name>`. Where ranks hold different states, a loader's
position for example, there is one for each: `session.<name>.rank-<rank>`. They are written by `torch.save` and read by
`torch.load(weights_only=True)`, which runs no code of a checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import logging
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.layout import Box
from cost_aware_trainer.state.manifests import CheckpointManifest, plain
from cost_aware_trainer.state.state import StatePart
from cost_aware_trainer.state.validation import InvalidRunError

logger = logging.getLogger(__name__)

PREFIX = "session."
_OF_RANK = re.compile(r"(?P<name>.*)\.rank-(?P<rank>\d+)")
_NUMPY = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type) and issubclass(kind, np.dtype)),
]


class Stateful(Protocol):
    """Object whose state can be taken out and put back."""

    def state_dict(self) -> Any:
        """Takes the state: numbers, texts, tensors and arrays, in dictionaries, lists and tuples."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Puts a state back."""


class ExtraState:
    """What modules keep by `get_extra_state`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Takes the extra state of every module that has one, by its key in the model's state."""
        return {plain(key): value for key, value in self._model.state_dict().items() if is_extra(key)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives every module its extra state back."""
        keys = [key for key in self._model.state_dict() if is_extra(key)]
        self._model.load_state_dict({key: state[plain(key)] for key in keys if plain(key) in state}, strict=False)


class GroupOptions:
    """Options of an optimizer's groups, learning rates for example, which a schedule changes while it trains.

    An option that the script itself sets otherwise than at the first start stays as the script has it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._initial = optimizer, self._options(optimizer)

    @staticmethod
    def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        groups = ({key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups)
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in g.items()} for g in groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Takes the options of today and those of the first start."""
        kind = type(self._optimizer).__name__
        return {"kind": kind, "initial": self._initial, "current": self._options(self._optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the options of the checkpoint, but for those that the script has changed since.

        Raises:
            InvalidRunError: the checkpoint is of another optimizer, or of other groups.
        """
        groups = self._optimizer.param_groups
        kind = type(self._optimizer).__name__
        if state["kind"] != kind or len(state["current"]) != len(groups):
            raise InvalidRunError(
                f"optimizer: the checkpoint was saved with {state['kind']} of {len(state['current'])} parameter groups, the "
                f"script has {kind} of {len(groups)}; restore the optimizer, or name an empty folder"
            )
        for group, mine, initial, current in zip(
            groups, self._initial, state["initial"], state["current"], strict=True
        ):
            for key in current.keys() & initial.keys():
                if key not in mine or _are_equal(mine[key], initial[key]):
                    _set(group, key, current[key])
                else:
                    logger.info("optimizer: %s is %s in the script now; the checkpoint's is left", key, mine[key])
        self._initial = state["initial"]


def _are_equal(one: Any, other: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other))) if isinstance(one, Tensor) else one == other


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].copy_(value)
    else:
        group[key] = value


def is_extra(key: str) -> bool:
    """Whether a key of a model's state is a module's extra state, which is no tensor in place."""
    return key == "_extra_state" or key.endswith("._extra_state")


def _state_of(source: Any) -> Any:
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.get_state() if isinstance(source, torch.Generator) else source.state_dict()


def _restore(target: Any, state: Any) -> None:
    if isinstance(target, random.Random):
        target.setstate(state)
    elif isinstance(target, np.random.Generator):
        target.bit_generator.state = state
    elif isinstance(target, torch.Generator):
        target.set_state(state)
    else:
        target.load_state_dict(state)


def _encoded(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _decoded(content: bytes) -> Any:
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


class StatefulObjects:
    """Objects of a session whose state its checkpoints hold.

    Args:
        objects: anything with `state_dict` and `load_state_dict`, or a random number generator, by name.
        ranks: ranks of the run.
    """

    def __init__(self, objects: Mapping[str, Any], ranks: Ranks) -> None:
        self._objects, self._ranks = dict(objects), ranks

    def check(self) -> None:
        """Takes every object's state once, so that what cannot be saved is said at the start.

        Raises:
            InvalidRunError: an object's state cannot be taken, or not be read back.
        """
        for name, source in self._objects.items():
            try:
                _decoded(_encoded(_state_of(source)))
            except Exception as error:
                # whatever a stranger's object raises, or pickle says of it
                why = str(error).strip().splitlines()
                raise InvalidRunError(
                    f"{name}: the state of {type(source).__name__} would not come back after a restart: "
                    f"{type(error).__name__}: {why[0] if why else ''}; give it a state_dict() of numbers, texts and tensors"
                ) from error

    def parts(self) -> list[StatePart]:
        """Takes the states as tensors of bytes, equal on all ranks. Every rank must call it."""
        contents = {name: _encoded(_state_of(source)) for name, source in self._objects.items()}
        if not contents:
            return []
        tensors: dict[str, bytes] = {}
        for name, differs in zip(contents, self._differ(list(contents.values())), strict=True):
            if differs:
                gathered = self._gathered(contents[name])
                tensors |= {f"{name}.rank-{rank}": content for rank, content in enumerate(gathered)}
            else:
                tensors[name] = contents[name]
        return [
            _part(name, torch.frombuffer(bytearray(content), dtype=torch.uint8)) for name, content in tensors.items()
        ]

    def _differ(self, contents: list[bytes]) -> list[bool]:
        """Whether each content differs between ranks: compared by their digests."""
        if self._ranks.size == 1:
            return [False] * len(contents)
        mine = b"".join(hashlib.sha256(content).digest() for content in contents)
        of_ranks = self._all(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        whole = torch.stack(of_ranks).view(self._ranks.size, len(contents), -1)
        differs: list[bool] = (whole != whole[:1]).any(2).any(0).tolist()
        return differs

    def _gathered(self, content: bytes) -> list[bytes]:
        sizes = [int(size) for size in self._all(torch.tensor([len(content)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        of_ranks = self._all(padded)
        return [bytes(values[:size].numpy()) for values, size in zip(of_ranks, sizes, strict=True)]

    def _all(self, mine: Tensor) -> list[Tensor]:
        mine = mine.to(self._ranks.device)
        of_ranks = [torch.empty_like(mine) for _ in range(self._ranks.size)]
        with self._ranks.heartbeat.waiting():
            dist.all_gather(of_ranks, mine)
            return [values.cpu() for values in of_ranks]

    @staticmethod
    def parts_in(manifest: CheckpointManifest) -> list[StatePart]:
        """Makes empty parts for the states that a checkpoint holds, to be filled."""
        return [
            _part(name.removeprefix(PREFIX), torch.empty(facts.shape, dtype=torch.uint8))
            for name, facts in manifest.tensors.items()
            if name.startswith(PREFIX)
        ]

    def restore(self, parts: Iterable[StatePart]) -> None:
        """Gives the objects the states of filled parts. What has no state there begins anew, and is named in the log.

        Raises:
            InvalidRunError: a state is of another number of ranks, or its object does not take it.
        """
        saved: dict[str, dict[int, bytes]] = {}
        for part in parts:
            name, rank = part.name.removeprefix(PREFIX), -1
            if of_rank := _OF_RANK.fullmatch(name):
                name, rank = of_rank["name"], int(of_rank["rank"])
            saved.setdefault(name, {})[rank] = bytes(part.values.numpy())
        for name in saved.keys() - self._objects.keys():
            logger.warning("%s: the checkpoint holds its state, and the session is not given it: it is left", name)
        for name, target in self._objects.items():
            if name in saved:
                self._restore(name, target, saved[name])
            else:
                logger.warning("%s: the checkpoint holds no state of it: it begins anew", name)

    def _restore(self, name: str, target: Any, saved: dict[int, bytes]) -> None:
        if -1 not in saved and len(saved) != self._ranks.size:
            raise InvalidRunError(
                f"{name}: {len(saved)} ranks saved a state of their own each, which cannot be shared out to {self._ranks.size}; "
                f"start {len(saved)} ranks, or give all ranks one state, as session.batches' indices have"
            )
        try:
            _restore(target, _decoded(saved[-1] if -1 in saved else saved[self._ranks.rank]))
        except InvalidRunError:
            raise
        except Exception as error:
            # whatever a stranger's object raises
            raise InvalidRunError(
                f"{name}: {type(target).__name__} does not take its state of the checkpoint: {type(error).__name__}: {error}"
            ) from error


def _part(name: str, values: Tensor) -> StatePart:
    shape = tuple(values.shape)
    return StatePart(f"{PREFIX}{name}", values, Box((0,) * len(shape), shape), shape, name, is_copy=False)
