"""Change of layout in living processes: the pieces of the state that each rank needs, and their exchange.

Every rank computes the moves from both plans, so nothing has to be asked for. If several replicas hold a piece and the
receiver is one of them, the piece is its own. Otherwise the replicas send in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cost_aware_trainer.contract import Reconfiguration, RunPlan
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.layout import Box, Shape, boxes_of
from cost_aware_trainer.state.state import MOMENTS, RESIDUAL, StatePart, copy_twins, residual_parts
from cost_aware_trainer.state.validation import InvalidRunError, check_plan


@dataclass(frozen=True)
class Succession:
    """Means by which a run learns of another plan, and by which its ranks meet again under it."""

    newest: Callable[[], Reconfiguration | None]
    """Returns the newest other plan that the agent has written, if any."""
    written_seconds_ago: Callable[[], float]
    """Returns the seconds since the agent wrote it."""
    rejoin: Callable[[str], Ranks]
    """Makes new process groups for a generation; see `Rendezvous.join`."""


@dataclass(frozen=True)
class Move:
    """Move of a piece of a parameter, and of both of its moments, from a rank of the old layout to one of the new."""

    source: int
    """Rank that holds the piece."""
    target: int
    """Rank that needs the piece."""
    name: str
    """Name of the parameter."""
    piece: Box
    """Part of the whole parameter that moves."""


def check_successor(old: RunPlan, new: RunPlan, world_size: int) -> None:
    """Checks that a run can go on under another plan in the same processes.

    Raises:
        InvalidRunError: the plan is impossible, or changes more than degrees, strategy and micro-batch.
    """
    check_plan(new, world_size)
    if not old.same_run_as(new):
        raise InvalidRunError(
            "only degrees, strategy and batch.micro_samples can change while a run goes on; "
            "start it again to change the rest"
        )


def moves(old: RunPlan, new: RunPlan, shapes: Mapping[str, Shape], rank: int) -> Iterator[Move]:
    """Lists all moves in which `rank` takes part, in one order on every rank."""
    world = range(old.degrees.ranks)
    holders: dict[str, dict[Box, list[int]]] = {}
    for source in world:
        for name, box in boxes_of(source, old, shapes).items():
            holders.setdefault(name, {}).setdefault(box, []).append(source)
    for target in world:
        for name, wanted in boxes_of(target, new, shapes).items():
            for box, sources in holders[name].items():
                source = target if target in sources else sources[target % len(sources)]
                piece = box.common(wanted) if rank in (source, target) else None
                if piece:
                    yield Move(source, target, name, piece)


@dataclass(frozen=True)
class Carried:
    """State of a rank between two layouts, in CPU memory."""

    plan: RunPlan
    """Plan of the old layout."""
    step: int
    """Last completed step."""
    values: dict[str, Tensor]
    """Values of this rank's parts, by name in the state."""
    boxes: dict[str, Box]
    """Box of each part, by parameter."""
    has_residuals: bool
    """Whether the ranks carry residuals of compression."""

    @classmethod
    def of(cls, plan: RunPlan, step: int, parts: list[StatePart], residuals: Mapping[str, Tensor]) -> Carried:
        """Takes the state out of device memory. State in CPU memory stays where it is.

        `residuals` are those of compression, by parameter, or empty on all ranks.
        """
        values: dict[str, Tensor] = {}
        for part in parts:
            values.setdefault(part.name, part.values.detach().to("cpu"))
        values |= {f"{RESIDUAL}{name}": residual.to("cpu") for name, residual in residuals.items()}
        boxes = {part.parameter: part.box for part in parts if part.shape}
        return cls(plan, step, values, boxes, bool(residuals))


def hand_over(
    carried: Carried, new: RunPlan, parts: list[StatePart], shapes: Mapping[str, Shape], ranks: Ranks
) -> dict[str, Tensor]:
    """Fills the new layout's parts from the state that all ranks carry; returns its residuals. Every rank must call it."""
    mine = list(moves(carried.plan, new, shapes, ranks.rank))
    targets: dict[str, StatePart] = {}
    for part in parts:
        targets.setdefault(part.name, part)
    for prefix, suffix in (("model.", ""), *(("optimizer.state.", f".{moment}") for moment in MOMENTS)):
        _exchange(carried, mine, targets, prefix, suffix, ranks)
    for part in parts:
        if not part.shape:
            # AdamW's count of steps is the run's.
            part.values.fill_(carried.step)
    copy_twins(parts)
    if not carried.has_residuals:
        return {}
    residual_targets = {part.name: part for part in residual_parts(parts)}
    _exchange(carried, mine, residual_targets, RESIDUAL, "", ranks)
    return {part.parameter: part.values for part in residual_targets.values()}


def _exchange(
    carried: Carried, mine: list[Move], targets: Mapping[str, StatePart], prefix: str, suffix: str, ranks: Ranks
) -> None:
    """Sends all pieces of one kind, weights or one of the moments, in one exchange."""
    outgoing: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    incoming: list[list[Move]] = [[] for _ in range(ranks.size)]
    for move in mine:
        name = f"{prefix}{move.name}{suffix}"
        if move.source == ranks.rank:
            piece = carried.values[name][move.piece.slices(carried.boxes[move.name])]
            outgoing[move.target].append(piece.flatten())
        if move.target == ranks.rank:
            incoming[move.source].append(move)
    sent_sizes = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
    received_sizes = [sum(move.piece.elements for move in pieces) for pieces in incoming]
    sent = torch.cat([torch.empty(0), *(piece for pieces in outgoing for piece in pieces)]).to(ranks.device)
    received = sent
    if ranks.size > 1:
        received = torch.empty(sum(received_sizes), device=ranks.device)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
    arrived = [move for pieces in incoming for move in pieces]
    values = torch.split(received, [move.piece.elements for move in arrived])
    for move, piece in zip(arrived, values, strict=True):
        part = targets[f"{prefix}{move.name}{suffix}"]
        part.values[move.piece.slices(part.box)].copy_(piece.view(move.piece.sizes))
