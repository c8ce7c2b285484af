"""Checkpoints of a session: what it resumes from, and what it saves when the loop's body has ended."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from cost_aware_trainer.contract import CheckpointPlan
from cost_aware_trainer.distributed.buffers import SharedBuffers
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.state.checkpoint import Checkpointer
from cost_aware_trainer.state.manifests import CheckpointManifest, RunFacts, plain
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.saves import PeriodicSaves
from cost_aware_trainer.state.session_state import WholeChecksums, allocate_state, parts_in, whole_parts
from cost_aware_trainer.state.state import StatePart
from cost_aware_trainer.state.stateful import PREFIX, ExtraState, GroupOptions, StatefulObjects
from cost_aware_trainer.state.validation import InvalidRunError
from cost_aware_trainer.telemetry.metrics import RankMetrics

logger = logging.getLogger(__name__)


class _Due(enum.Enum):
    """Save that is due when the loop's body has ended."""

    NONE = enum.auto()
    PERIODIC = enum.auto()
    LAST = enum.auto()
    """The run stops or ends here, and waits for it."""


class SessionCheckpoints:
    """Checkpoints of a model and an optimizer that every rank holds whole, and of the objects beside them.

    Args:
        model: the session's, on the rank's device.
        optimizer: its, not stepped yet.
        scaler: loss scaler, if there is one.
        stateful: objects of the script, by name.
        ranks: ranks of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler | None,
        stateful: Mapping[str, Any],
        ranks: Ranks,
    ) -> None:
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        own = {"optimizer": GroupOptions(optimizer), "model": ExtraState(model)} | (
            {"scaler": scaler} if scaler else {}
        )
        if taken := own.keys() & stateful.keys():
            raise InvalidRunError(f"stateful: {', '.join(taken)} is a name of the session's own; write another")
        self._objects = StatefulObjects(own | dict(stateful), ranks)
        self._object_parts: list[StatePart] = []
        self._due = _Due.NONE
        self.buffers = SharedBuffers(model, ranks)
        """Buffers of the model, made equal after each step."""

    def resume(self, plan: CheckpointPlan, facts: RunFacts, metrics: RankMetrics) -> RunProgress | None:
        """Fills everything from the newest good checkpoint, or makes all ranks begin with rank 0's weights, and returns None.

        Raises:
            InvalidRunError: the state cannot be saved, or the checkpoint belongs to another run.
            CheckpointError: the checkpoint could not be loaded.
        """
        self.checkpointer = Checkpointer(plan, self._ranks, facts)
        """Checkpoints on the volume."""
        self.saves = PeriodicSaves(self.checkpointer, self._ranks, metrics, plan.interval_seconds)
        """Periodic saves to it."""
        self.checkpointer.check_folder()
        self._objects.check()
        allocate_state(self._optimizer)
        parts = [part for part in whole_parts(self._model, self._optimizer) if part.name.startswith("model.")]
        shapes = {part.name.removeprefix("model."): part.shape for part in parts}
        found = self.checkpointer.resume(self._parts_in, WholeChecksums(), shapes)
        if found:
            self._objects.restore(self._object_parts)
        else:
            self.checkpointer.begin_anew()
            self._optimizer.state.clear()
            self._copy(part.values for part in parts)
        buffers = {f"model.{plain(name)}": buffer for name, buffer in self._model.named_buffers()}
        self.saves.tolerate(name for name, buffer in buffers.items() if not _is_finite(buffer))
        if self._ranks.is_first:
            logger.info("session: %s", f"resuming after step {found.step}" if found else "no checkpoint, starting")
        return RunProgress.saved_in(found) if found else None

    def _parts_in(self, manifest: CheckpointManifest) -> list[StatePart]:
        """Makes the parts that a checkpoint fills, and keeps those of objects beside the model."""
        if self._object_parts:
            # a newer checkpoint was damaged, and the optimizer has forgotten what that one did not hold
            allocate_state(self._optimizer)
        parts = parts_in(manifest, self._model, self._optimizer)
        self._object_parts = [part for part in parts if part.name.startswith(PREFIX)]
        return parts

    def _copy(self, tensors: Iterable[Tensor]) -> None:
        """Copies rank 0's values to every rank."""
        if self._ranks.size > 1:
            with self._ranks.heartbeat.waiting():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def note(self, *, is_last: bool, is_due: bool) -> None:
        """Notes a save that is due when the loop's body has ended: after the last step, or a periodic one."""
        self._due = _Due.LAST if is_last else _Due.PERIODIC if is_due else _Due.NONE

    @property
    def is_due(self) -> bool:
        """Whether a save waits for the end of the loop's body."""
        return self._due is not _Due.NONE

    def save(self, progress: RunProgress, attempt: int) -> None:
        """Saves what is due. Every rank must call it.

        Raises:
            CheckpointError: this save, or the one before, failed on a rank.
        """
        due, self._due = self._due, _Due.NONE
        # an evaluation in the loop's body may have changed buffers on some ranks
        self.buffers.share(learn=True)
        parts = whole_parts(self._model, self._optimizer) + self._objects.parts()
        self.saves.save(progress, attempt, parts, WholeChecksums(), wait=due is _Due.LAST)
        # a forward pass may change buffers, and a script whatever it likes
        self.checkpointer.hold()


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())
