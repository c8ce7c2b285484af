"""Buffers of a stranger's model, a batch norm's statistics for example: rank 0's count, as under DistributedDataParallel."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_aware_trainer.distributed.collectives import Ranks


class SharedBuffers:
    """Buffers that each replica's forward passes change by its own samples, made equal after each step.

    Without that, a run's losses would depend on when it saves, which makes them equal too. Only buffers that have ever
    changed on a rank are sent: constants, as masks and rotation tables, are not.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._known: set[int] = set()
        self._none = torch.empty(0)
        self._seen = self._versions()

    def _versions(self) -> list[tuple[Tensor, int]]:
        return [(buffer, buffer._version) for buffer in self._all()]

    def _all(self) -> list[Tensor]:
        found = [module._buffers[name] for module, name in self._places]
        return [buffer if buffer is not None else self._none for buffer in found]

    def have_changed(self) -> bool:
        """Whether a buffer has changed on this rank that is not shared after each step yet."""
        return self._ranks.size > 1 and bool(self._changed() - self._known)

    def _changed(self) -> set[int]:
        """Numbers of the buffers that have changed, and of those beside them in their modules.

        Torch's batch norm writes its running statistics without a mark, but counts its batches with one.
        """
        pairs = zip(self._seen, self._versions(), strict=True)
        marked = [number for number, ((before, old), (now, new)) in enumerate(pairs) if before is not now or old != new]
        modules = {id(self._places[number][0]) for number in marked}
        return {number for number, (module, _) in enumerate(self._places) if id(module) in modules}

    def share(self, *, learn: bool) -> None:
        """Copies rank 0's buffers to every rank: those that are known to change, and with `learn`, equal on all, more."""
        if self._ranks.size == 1 or not (self._known or learn):
            return
        with self._ranks.heartbeat.waiting():
            if learn:
                changed = self._changed()
                mask = torch.tensor([number in changed for number in range(len(self._seen))], dtype=torch.int32)
                mask = mask.to(self._ranks.device)
                dist.all_reduce(mask)
                self._known |= {number for number, count in enumerate(mask.tolist()) if count}
            buffers = self._all()
            chosen = sorted((buffers[number] for number in sorted(self._known)), key=_kind)
            for _, same in itertools.groupby(chosen, _kind):
                self._copy(list(same))
        self._seen = self._versions()

    def _copy(self, buffers: list[Tensor]) -> None:
        joined = torch.cat([buffer.detach().flatten() for buffer in buffers])
        dist.broadcast(joined, src=0)
        with torch.no_grad():
            for buffer, part in zip(buffers, joined.split([b.numel() for b in buffers]), strict=True):  # type: ignore[no-untyped-call]
                buffer.copy_(part.view_as(buffer))


def _kind(buffer: Tensor) -> str:
    return str(buffer.dtype)
