"""Vote of a step: the one small all-reduce in which ranks agree on its loss, its gradient's norm, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from cost_aware_trainer.distributed.collectives import Ranks, ring_bytes

_FLAGS = 7
_LIMBS = 4
_LIMB_BITS = 16


@dataclass(frozen=True)
class StepVote:
    """Contribution of a rank to the one small all-reduce of a step.

    A rank's own contribution may hold loss and norm as they are on its device: they are read once, with all the rest.
    """

    loss_sum: float | Tensor
    """Sum of this rank's training losses in the step, nats."""
    checksum: int
    """Checksum of the samples that this rank reports."""
    squared_norm: float | Tensor = 0.0
    """This rank's share of the gradient's squared norm."""
    wants_stop: bool = False
    """Whether the rank was asked to stop."""
    wants_checkpoint: bool = False
    """Whether a periodic checkpoint is due."""
    save_failed: bool = False
    """Whether a save has failed on this rank."""
    is_ready: bool = False
    """Whether the rank has seen a new plan. The combined vote says whether all have."""
    wants_copy: bool = False
    """Whether a copy to other nodes' memory is due."""
    is_copying: bool = False
    """Whether such a copy is under way."""
    buffers_changed: bool = False
    """Whether a forward pass changed a buffer that is not made equal after each step yet."""
    work_seconds: float = 0.0
    """Seconds that the rank itself has worked since the last vote."""
    work_seconds_of: tuple[float, ...] = ()
    """Those seconds of every rank, by rank; only in the combined vote."""


@dataclass(frozen=True)
class Agreed(StepVote):
    """Vote that all ranks have agreed on, with numbers on the host."""

    loss_sum: float
    """Sum of all ranks' training losses in the step, nats."""
    squared_norm: float = 0.0
    """Squared norm of the whole gradient."""

    @property
    def gradient_norm(self) -> float:
        """Norm of the whole gradient."""
        return math.sqrt(self.squared_norm)

    @property
    def asks(self) -> bool:
        """Whether there is more to do than the next step."""
        wants = self.wants_stop, self.wants_checkpoint, self.save_failed, self.wants_copy, self.is_ready
        return any(wants)

    @classmethod
    def any_of(cls, votes: Iterable[Agreed]) -> Agreed:
        """What one or another of several steps' votes asks for; the other numbers are the last one's."""
        *_, last = every = list(votes)
        asked: dict[str, Any] = {f.name: True for f in fields(cls) for vote in every if getattr(vote, f.name) is True}
        return replace(last, **asked)


@dataclass(frozen=True)
class Ballot:
    """Vote of a step that all ranks have cast, and that need not be counted yet."""

    ranks: Ranks
    """Ranks of the run."""
    summed: Tensor
    """Sums over all ranks, on the device: the loss, the squared norm, and then what `read` takes apart."""
    _copy: Tensor
    _copied: Any

    @classmethod
    def cast(cls, ranks: Ranks, vote: StepVote) -> Ballot:
        """Casts a rank's vote. Nobody waits for it on a device that works behind the host.

        Losses, squared norms and checksums (modulo 2^64) are summed. A flag is true if it is true on any rank, except
        `is_ready`, which must be true on all. Each rank's working time has a place of its own, to which the others add 0. A
        checksum travels as four limbs of 16 bits, whose sums float64 holds exactly for up to 2^37 ranks.
        """
        limbs = [float((vote.checksum >> (_LIMB_BITS * i)) & 0xFFFF) for i in range(_LIMBS)]
        votes = (
            *(vote.wants_stop, vote.wants_checkpoint, vote.save_failed),
            *(vote.wants_copy, vote.is_copying, vote.is_ready, vote.buffers_changed),
        )
        flags = [float(flag) for flag in votes]
        work = [vote.work_seconds if rank == ranks.rank else 0.0 for rank in range(ranks.size)]
        of_device = [
            torch.as_tensor(value, dtype=torch.float64, device=ranks.device)
            for value in (vote.loss_sum, vote.squared_norm)
        ]
        of_host = torch.tensor([*flags, *limbs, *work], dtype=torch.float64)
        summed = ranks.sum_tensor(torch.cat([torch.stack(of_device), ranks.to_device(of_host)]))
        return cls(ranks, summed, *ranks.to_host(summed))

    @property
    def loss_and_norm(self) -> Tensor:
        """Sum of losses and squared norm of the gradient, on the device."""
        return self.summed[:2]

    def read(self) -> Agreed:
        """Counts the votes: the one place in a step where the host reads from the device."""
        if self._copied is not None:
            with self.ranks.heartbeat.waiting():
                self._copied.synchronize()
        loss_sum, squared_norm, *rest = self._copy.tolist()
        (stop, checkpoint, failed, copy, copying, ready, buffers), rest = rest[:_FLAGS], rest[_FLAGS:]
        summed_limbs, work = rest[:_LIMBS], rest[_LIMBS:]
        checksum = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(summed_limbs)) & ((1 << 64) - 1)
        return Agreed(
            loss_sum,
            checksum,
            squared_norm,
            stop > 0,
            checkpoint > 0,
            failed > 0,
            ready == self.ranks.size,
            copy > 0,
            copying > 0,
            buffers > 0,
            work_seconds_of=tuple(work),
        )


def vote_bytes(ranks: Ranks) -> float:
    """Bytes that each rank sends for its vote, in a ring."""
    return ring_bytes((2 + _FLAGS + _LIMBS + ranks.size) * 8, ranks.size)
