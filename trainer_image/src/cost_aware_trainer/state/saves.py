"""Periodic saves of a run, for the bundled trainer and for sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from cost_aware_trainer.contract import Metric
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.state.checkpoint import Checkpointer, CheckpointError
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.state import Checksums, StatePart
from cost_aware_trainer.telemetry.metrics import RankMetrics


class NotFiniteError(CheckpointError):
    """State that holds numbers that are not finite, and is therefore never saved as good."""


def first_not_finite(parts: list[StatePart]) -> str:
    """Name of the first part that holds a NaN or an infinity; empty if all numbers are finite. One pass over the values."""
    chosen = [part for part in parts if part.values.is_floating_point() and part.values.numel()]
    by_device: dict[torch.device, list[StatePart]] = {}
    for part in chosen:
        by_device.setdefault(part.values.device, []).append(part)
    for same in by_device.values():
        largest = torch._foreach_norm([part.values for part in same], ord=math.inf)
        are_finite = torch.stack([value.double() for value in largest]).isfinite()
        if not bool(are_finite.all()):
            return same[int(are_finite.int().argmin())].name
    return ""


class PeriodicSaves:
    """Saves in the plan's interval. A failure on one rank is an error on all."""

    def __init__(self, checkpointer: Checkpointer, ranks: Ranks, metrics: RankMetrics, interval_seconds: float) -> None:
        self._checkpointer, self._ranks, self._metrics = checkpointer, ranks, metrics
        self._interval_seconds = interval_seconds
        self._failure = ""
        self._tolerated: frozenset[str] = frozenset()
        self._saved_at_seconds = time.monotonic()
        self.waited_seconds = 0.0
        """Seconds of the last save that the ranks waited for."""

    def join(self, ranks: Ranks, interval_seconds: float) -> None:
        """Goes on with new process groups. No save may be under way."""
        self._ranks, self._interval_seconds = ranks, interval_seconds
        self._checkpointer.join(ranks)

    def is_due(self) -> bool:
        """Whether to save now. Rank 0's clock alone decides. Never during a save, because the new one would wait for it."""
        due = time.monotonic() - self._saved_at_seconds >= self._interval_seconds
        return self._ranks.is_first and due and not self._checkpointer.is_saving

    def has_failed(self) -> bool:
        """Whether the save under way has failed on this rank. `settle` then raises on all ranks."""
        try:
            self._checkpointer.poll()
        except CheckpointError as error:
            self._failure = str(error)
            return True
        self._metrics.set(Metric.CHECKPOINT_STEP, self._checkpointer.saved_step)
        return False

    def save(
        self, progress: RunProgress, attempt: int, parts: list[StatePart], checksums: Checksums, *, wait: bool
    ) -> None:
        """Starts a save after the one before has ended. With `wait` it returns when the checkpoint exists.

        Raises:
            NotFiniteError: the state is not finite on a rank; nothing is written.
            CheckpointError: one of the two failed on a rank.
        """
        self.check_finite(progress, parts)
        began_seconds = time.monotonic()
        self.settle()
        self._checkpointer.start_save(progress, attempt, parts, checksums)
        if wait:
            self.settle()
            self._metrics.set(Metric.CHECKPOINT_STEP, self._checkpointer.saved_step)
            self.waited_seconds = time.monotonic() - began_seconds
        self._saved_at_seconds = time.monotonic()

    def tolerate(self, names: Iterable[str]) -> None:
        """Names tensors that need not be finite: a model's mask, whose buffer holds infinities from the start."""
        self._tolerated = frozenset(names)

    def check_finite(self, progress: RunProgress, parts: list[StatePart]) -> None:
        """Checks on all ranks that a state is finite. Every rank must call it.

        Raises:
            NotFiniteError: it is not, on a rank.
        """
        problem = self._ranks.first_problem(first_not_finite([p for p in parts if p.name not in self._tolerated]))
        if problem:
            saved = self._checkpointer.saved_step
            kept = f"the checkpoint of step {saved} is kept" if saved else "there is no checkpoint before it"
            raise NotFiniteError(
                f"step {progress.step}: {problem} is not finite after the update, so this state is not saved; {kept}; lower the "
                "learning rate, or clip gradients"
            )

    def settle(self) -> None:
        """Waits until no save is under way on any rank.

        Raises:
            CheckpointError: a save failed on a rank.
        """
        try:
            # every rank's save ends when all have, however long that takes
            with self._ranks.heartbeat.waiting():
                self._checkpointer.wait(self._ranks.heartbeat.beat)
        except CheckpointError as error:
            self._failure = str(error)
        problem = self._ranks.first_problem(self._failure)
        if problem:
            raise CheckpointError(problem)
