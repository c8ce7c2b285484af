"""Memory tier: copies of a run's state in the memory of its nodes, to go on after the loss of one without reading the volume.

Every rank keeps its own state, and its share of its peers' states (see `copies`), in files of a memory-backed folder (tmpfs).
They outlive its process, but not its node. When ranks start again under the same layout, survivors read their own state, and
a rank on a replaced node gets its state from its peers. A group has one rank of each node, so that it loses at most one rank
with a node.

A generation is one state of the whole run. The last one that is complete on all ranks stays until the next one is complete.
So at whatever moment a node is lost, one generation can be rebuilt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cost_aware_trainer.contract import ENV_MEMORY_FOLDER, Redundancy, RunPlan
from cost_aware_trainer.data.hashing import OnBytes, unwatched
from cost_aware_trainer.distributed.collectives import TIMEOUT, Ranks
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.memory.copies import Fingerprint, ParityGroup, ReplicaError, RingCopies, pack, unpack
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.state import StatePart, checkpointable, copy_twins

logger = logging.getLogger(__name__)

MOST_NODES = 8
"""Nodes of one group. A parity over more nodes saves little memory and makes rebuilding slower."""
_KEPT = 2
"""Generations that stay."""
_PROGRESS = "progress."
_NONE = (-1, -1)


def groups_of(world_size: int, ranks_per_node: int) -> list[list[int]]:
    """Lists the ranks of each group: consecutive nodes, one rank of each. Empty if there is only one node."""
    nodes = world_size // ranks_per_node
    count = max(1, nodes // MOST_NODES)
    cuts = [nodes * index // count for index in range(count + 1)]
    return [
        [node * ranks_per_node + local for node in range(first, end)]
        for first, end in itertools.pairwise(cuts)
        for local in range(ranks_per_node)
        if end - first > 1
    ]


def can_rebuild(kind: Redundancy, group: list[int], lost: set[int]) -> bool:
    """Whether the others can rebuild the group's lost ranks."""
    gone = [rank in lost for rank in group]
    if kind is Redundancy.PARITY:
        return sum(gone) <= 1
    return not any(here and gone[(index + 1) % len(gone)] for index, here in enumerate(gone))


def layout_key(plan: RunPlan, facts: RunFacts) -> str:
    """Key of a run and its layout: equal for plans under which every rank holds the same part of the state."""
    strategy = plan.strategy
    parts = {
        "facts": dataclasses.asdict(facts),
        "folder": plan.checkpoint.folder,
        "degrees": dataclasses.asdict(plan.degrees),
        "stages": [strategy.schedule, strategy.interleave, strategy.stage_layers],
        "sharding": strategy.sharding,
        "kind": plan.checkpoint.redundancy,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class MemoryCopies:
    """Copies of one generation on one rank: the files `own` and `held`, and `meta.json`, written last."""

    folder: Path
    """Folder of the files, named after step and attempt."""

    @property
    def number(self) -> tuple[int, int]:
        """Step and attempt of the generation."""
        step, attempt = self.folder.name.removeprefix("step-").split("-attempt-")
        return int(step), int(attempt)

    def write(self, key: str, own: Tensor, kept: Tensor, fingerprints: list[Fingerprint]) -> None:
        """Writes all files. The folder gets its name only when it is whole."""
        partial = self.folder.with_name(f".{self.folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        own.numpy().tofile(partial / "own")
        kept.numpy().tofile(partial / "held")
        prints = [[fingerprint.size_bytes, fingerprint.sha256.hex()] for fingerprint in fingerprints]
        (partial / "meta.json").write_text(json.dumps({"key": key, "fingerprints": prints}))
        shutil.rmtree(self.folder, ignore_errors=True)
        partial.rename(self.folder)

    def read(self, on_bytes: OnBytes = unwatched) -> tuple[Tensor, Tensor, list[Fingerprint]]:
        """Reads this rank's own state, its share of its peers' states, and the fingerprints of the group's states."""
        own = torch.from_numpy(np.fromfile(self.folder / "own", dtype=np.uint8))
        on_bytes(own.numel())
        kept = torch.from_numpy(np.fromfile(self.folder / "held", dtype=np.uint8))
        on_bytes(kept.numel())
        meta = json.loads((self.folder / "meta.json").read_text())
        return (
            own,
            kept,
            [Fingerprint(size_bytes, bytes.fromhex(sha256)) for size_bytes, sha256 in meta["fingerprints"]],
        )

    def is_of(self, key: str) -> bool:
        """Whether the copies belong to this run and layout."""
        try:
            return bool(json.loads((self.folder / "meta.json").read_text())["key"] == key)
        except (OSError, ValueError, KeyError):
            return False


class MemoryTier:
    """States of a run in its nodes' memory. Does nothing if the plan asks for none, or if there is only one node."""

    def __init__(self, plan: RunPlan, ranks: Ranks, facts: RunFacts) -> None:
        root = os.environ.get(ENV_MEMORY_FOLDER, "")
        self._folder = Path(root) / f"rank-{ranks.rank}"
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.size)
        self._facts = facts
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redundancy")
        self._saving: Future[None] | None = None
        self._due_at_seconds = -math.inf
        wanted, nodes = plan.checkpoint.redundancy is not Redundancy.NONE, ranks.size // self._per_node
        self.is_on = bool(root) and wanted and nodes > 1
        if wanted and not self.is_on and ranks.is_first:
            reason = "there is one node only" if nodes < 2 else f"{ENV_MEMORY_FOLDER} is not set"
            logger.warning("checkpoint.redundancy: %s does nothing: %s", plan.checkpoint.redundancy, reason)
        self.join(plan, ranks)

    def join(self, plan: RunPlan, ranks: Ranks) -> None:
        """Makes the groups, at the start and when the run goes on under another plan. Every rank must call it."""
        self._plan, self._ranks, self._key = plan, ranks, layout_key(plan, self._facts)
        self._kind, self._due_at_seconds = plan.checkpoint.redundancy, -math.inf
        self._keeper: RingCopies | ParityGroup | None = None
        self._groups = groups_of(ranks.size, self._per_node) if self.is_on else []
        for members in self._groups:
            group = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
            if ranks.rank in members and isinstance(group, dist.ProcessGroup):
                self._keeper = RingCopies(group) if self._kind is Redundancy.REPLICA else ParityGroup(group)

    def leave(self) -> None:
        """Waits until nothing is under way, and drops the groups."""
        self.poll(wait=True)
        self._keeper = None

    def close(self, *, is_complete: bool) -> None:
        """Ends the tier. Removes the copies of a complete run, which are not needed any more."""
        self.leave()
        self._executor.shutdown(wait=True)
        if is_complete and self.is_on:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_due(self) -> bool:
        """Whether to copy now. Rank 0's clock alone decides."""
        return self.is_on and self._ranks.is_first and time.monotonic() >= self._due_at_seconds

    def poll(self, *, wait: bool = False) -> bool:
        """Whether a save is under way. One that failed is logged, and only this copy is lost."""
        if self._saving is not None and (wait or self._saving.done()):
            saving, self._saving = self._saving, None
            try:
                saving.result()
            except (OSError, RuntimeError) as error:
                logger.error("COPY IN MEMORY FAILED: %s; the one before it and the volume's checkpoints stay", error)
        return self._saving is not None

    def save(self, progress: RunProgress, attempt: int, parts: list[StatePart]) -> None:
        """Copies the state and begins to send it. Every rank must call it, when none of them has a save under way."""
        self.poll(wait=True)
        self._due_at_seconds = time.monotonic() + self._plan.checkpoint.redundancy_interval_seconds
        state = {**checkpointable(parts), **_as_tensors(progress)}
        packed = pack(state)
        copies = MemoryCopies(self._folder / f"step-{progress.step:08d}-attempt-{attempt}")
        # All ranks have finished the last generation. The run can fall back on it until this one is complete.
        for old in self._generations()[_KEPT - 1 :]:
            shutil.rmtree(old.folder, ignore_errors=True)
        self._saving = self._executor.submit(self._send, packed, copies)

    def _send(self, packed: Tensor, copies: MemoryCopies) -> None:
        keeper = self._keeper
        assert keeper is not None  # noqa: S101  the tier is on
        keeper.save(packed)
        kept = keeper.peer_state if isinstance(keeper, RingCopies) else keeper.parity
        assert kept is not None  # noqa: S101  it was just saved
        copies.write(self._key, packed, kept, keeper.fingerprints)

    def _generations(self) -> list[MemoryCopies]:
        """Lists the copies that this rank holds, the newest first."""
        if not self._folder.exists():
            return []
        found = [MemoryCopies(path) for path in self._folder.iterdir() if path.name.startswith("step-")]
        return sorted(found, key=lambda copies: copies.number, reverse=True)

    def resume(self, parts: list[StatePart], volume_step: int) -> RunProgress | None:
        """Fills `parts` from the newest state that the nodes hold together; None if it is not newer than the volume's.

        Every rank must call it. A state that cannot be rebuilt is logged, and the run goes on from the volume; `parts` then stay
        as they were. Older copies stay until `forget`.
        """
        if not self.is_on:
            return None
        mine = {copies.number: copies for copies in self._generations() if copies.is_of(self._key)}
        number, lost = self._newest(mine)
        if number[0] <= volume_step:
            self._say(mine, volume_step)
            return None
        state: dict[str, Tensor] = {}
        problem = ""
        try:
            state = self._rebuild(mine.get(number), parts)
        except (ReplicaError, OSError, ValueError) as error:
            problem = f"rank {self._ranks.rank}: {error}"
        problem = self._ranks.first_problem(problem)
        if problem:
            logger.error("COPIES IN MEMORY of step %d cannot be used: %s", number[0], problem)
            self.forget()
            return None
        for other in mine.keys() - {number}:
            # newer ones that are not whole, and older ones, must not be taken for the one to fall back on
            shutil.rmtree(mine[other].folder, ignore_errors=True)
        for name, values in checkpointable(parts).items():
            values.copy_(state[name])
        copy_twins(parts)
        if self._ranks.is_first:
            where = f"ranks {lost} got theirs from their peers" if lost else "all ranks had theirs"
            logger.info("resuming step %d from memory, the volume has step %d: %s", number[0], volume_step, where)
        return _from_tensors(state)

    def _newest(self, mine: dict[tuple[int, int], MemoryCopies]) -> tuple[tuple[int, int], list[int]]:
        """Finds the newest generation that can be rebuilt, and the ranks that lack it; equal on all ranks."""
        numbers = [*mine, *[_NONE] * _KEPT][:_KEPT]
        flat = [float(part) for number in numbers for part in number]
        width = len(flat)
        slots = [0.0] * (width * self._ranks.size)
        slots[width * self._ranks.rank : width * (self._ranks.rank + 1)] = flat
        told = [int(value) for value in self._ranks.sum(slots)]
        numbers_of = [
            {(told[at], told[at + 1]) for at in range(width * rank, width * (rank + 1), 2)}
            for rank in range(self._ranks.size)
        ]
        for number in sorted(set.union(*numbers_of) - {_NONE}, reverse=True):
            lost = [rank for rank, known in enumerate(numbers_of) if number not in known]
            if all(can_rebuild(self._kind, group, set(lost)) for group in self._groups):
                return number, lost
        return _NONE, []

    def _say(self, mine: dict[tuple[int, int], MemoryCopies], volume_step: int) -> None:
        if mine and max(mine)[0] > volume_step:
            logger.error(
                "COPIES IN MEMORY up to step %d cannot be used: too many nodes were lost; the volume has step %d",
                max(mine)[0],
                volume_step,
            )

    def _rebuild(self, copies: MemoryCopies | None, parts: list[StatePart]) -> dict[str, Tensor]:
        keeper, own = self._keeper, None
        assert keeper is not None  # noqa: S101  the tier is on
        # some ranks have much to read and others nothing
        meeting, problem = self._ranks.meet("copies"), ""
        try:
            if copies is not None:
                own, kept, keeper.fingerprints = copies.read(meeting.progressed)
                if isinstance(keeper, RingCopies):
                    keeper.peer_state = kept
                else:
                    keeper.parity = kept
        except (OSError, ValueError) as error:
            problem = f"rank {self._ranks.rank}: {error}"
        problem = meeting.agree(problem)
        if problem:
            raise ReplicaError(problem)
        rebuilt = keeper.rebuild(own)
        place = dist.get_group_rank(keeper.group, self._ranks.rank)
        keeper.fingerprints[place].check(rebuilt, self._ranks.rank)
        state = unpack(rebuilt)
        shapes = {name: tuple(values.shape) for name, values in checkpointable(parts).items()}
        different = [name for name, shape in shapes.items() if name not in state or tuple(state[name].shape) != shape]
        if different:
            raise ReplicaError(f"{different[0]} has another shape in memory than in the plan")
        return state

    def forget(self) -> None:
        """Removes copies from which the run does not go on, so that they cannot be mixed with later ones."""
        if self.is_on:
            shutil.rmtree(self._folder, ignore_errors=True)


def _as_tensors(progress: RunProgress) -> dict[str, Tensor]:
    checksum = progress.checksum - (1 << 64) if progress.checksum >> 63 else progress.checksum
    loss = math.nan if progress.loss is None else progress.loss
    return {
        f"{_PROGRESS}step": torch.tensor(progress.step),
        f"{_PROGRESS}checksum": torch.tensor(checksum),
        f"{_PROGRESS}loss": torch.tensor(loss, dtype=torch.float64),
    }


def _from_tensors(state: dict[str, Tensor]) -> RunProgress:
    step, checksum, loss = (state[f"{_PROGRESS}{name}"].item() for name in ("step", "checksum", "loss"))
    return RunProgress(int(step), int(checksum) & ((1 << 64) - 1), None if math.isnan(loss) else float(loss))
