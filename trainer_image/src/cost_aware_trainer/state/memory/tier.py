"""Copies of a run's state in the memory of its nodes, for going on after one was lost without reading the volume.

Every rank keeps its own state and what `replicas` gives it of its peers' in files of a memory-backed folder (tmpfs), which
outlive its process and not its node. When ranks start again under the same layout, survivors bring theirs and a rank on
a replaced node gets its own from its peers. Groups are made of one rank of each node, so that no node's loss takes two.

A generation is one state of the whole run. The last one that is complete on all ranks stays until the next one is, so
whatever moment a node is lost in, one can be rebuilt.
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
from cost_aware_trainer.distributed.collectives import TIMEOUT, Ranks
from cost_aware_trainer.state.checkpoint import RunProgress
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.memory.copies import Fingerprint, ParityGroup, ReplicaError, RingCopies, pack, unpack
from cost_aware_trainer.state.state import StatePart, checkpointable, copy_twins

logger = logging.getLogger(__name__)

MOST_NODES = 8
"""Nodes of one group: a parity over more costs each of them little less memory, and a rebuilding more traffic."""
_KEPT = 2
_PROGRESS = "progress."
_NONE = (-1, -1)


def groups_of(world_size: int, ranks_per_node: int) -> list[list[int]]:
    """Ranks by group: of consecutive nodes, one rank each; none where there is one node."""
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
    """Whether the group's lost ranks can be rebuilt by the others."""
    gone = [rank in lost for rank in group]
    if kind is Redundancy.PARITY:
        return sum(gone) <= 1
    return not any(here and gone[(index + 1) % len(gone)] for index, here in enumerate(gone))


def layout_key(plan: RunPlan, facts: RunFacts) -> str:
    """The same for plans of one run under which every rank holds the same part of the state."""
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
class CopyGeneration:
    """What a rank holds of one state: files `own` and `held`, and `meta.json`, written last."""

    folder: Path

    @property
    def number(self) -> tuple[int, int]:
        """Step and attempt."""
        step, attempt = self.folder.name.removeprefix("step-").split("-attempt-")
        return int(step), int(attempt)

    def write(self, key: str, own: Tensor, held: Tensor, fingerprints: list[Fingerprint]) -> None:
        """Writes everything, under its name only when it is whole."""
        partial = self.folder.with_name(f".{self.folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        own.numpy().tofile(partial / "own")
        held.numpy().tofile(partial / "held")
        prints = [[fingerprint.length, fingerprint.sha256.hex()] for fingerprint in fingerprints]
        (partial / "meta.json").write_text(json.dumps({"key": key, "fingerprints": prints}))
        shutil.rmtree(self.folder, ignore_errors=True)
        partial.rename(self.folder)

    def read(self) -> tuple[Tensor, Tensor, list[Fingerprint]]:
        """Own state, what is held of peers, and fingerprints of the group's states."""
        own, held = (torch.from_numpy(np.fromfile(self.folder / name, dtype=np.uint8)) for name in ("own", "held"))
        meta = json.loads((self.folder / "meta.json").read_text())
        return own, held, [Fingerprint(length, bytes.fromhex(sha256)) for length, sha256 in meta["fingerprints"]]

    def is_of(self, key: str) -> bool:
        """Whether it belongs to this run and layout."""
        try:
            return bool(json.loads((self.folder / "meta.json").read_text())["key"] == key)
        except (OSError, ValueError, KeyError):
            return False


class MemoryTier:
    """A run's states in its nodes' memory; does nothing where the plan asks for none or there is one node only."""

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
        """Makes the groups, at first and when the run goes on under another plan; every rank must call it."""
        self._plan, self._ranks, self._key = plan, ranks, layout_key(plan, self._facts)
        self._kind, self._due_at_seconds = plan.checkpoint.redundancy, -math.inf
        self._keeper: RingCopies | ParityGroup | None = None
        self._groups = groups_of(ranks.size, self._per_node) if self.is_on else []
        for members in self._groups:
            group = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
            if ranks.rank in members and isinstance(group, dist.ProcessGroup):
                self._keeper = RingCopies(group) if self._kind is Redundancy.REPLICA else ParityGroup(group)

    def leave(self) -> None:
        """Waits until nothing is under way and lets go of the groups."""
        self.poll(wait=True)
        self._keeper = None

    def close(self, *, is_complete: bool) -> None:
        """Ends; a run that is complete needs no copies any more."""
        self.leave()
        self._executor.shutdown(wait=True)
        if is_complete and self.is_on:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_due(self) -> bool:
        """By rank 0's clock alone."""
        return self.is_on and self._ranks.is_first and time.monotonic() >= self._due_at_seconds

    def poll(self, *, wait: bool = False) -> bool:
        """Whether a save is under way; one that failed is told of, and costs nothing but this copy."""
        if self._saving is not None and (wait or self._saving.done()):
            saving, self._saving = self._saving, None
            try:
                saving.result()
            except (OSError, RuntimeError) as error:
                logger.error("COPY IN MEMORY FAILED: %s; the one before it and the volume's checkpoints stay", error)
        return self._saving is not None

    def save(self, progress: RunProgress, attempt: int, parts: list[StatePart]) -> None:
        """Copies the state and begins to send it; every rank must call it, when none of them has a save under way."""
        self.poll(wait=True)
        self._due_at_seconds = time.monotonic() + self._plan.checkpoint.redundancy_interval_seconds
        state = {**checkpointable(parts), **_as_tensors(progress)}
        packed = pack(state)
        generation = CopyGeneration(self._folder / f"step-{progress.step:08d}-attempt-{attempt}")
        # All ranks have finished the last one. It is the one to fall back on until this one is there.
        for old in self._generations()[_KEPT - 1 :]:
            shutil.rmtree(old.folder, ignore_errors=True)
        self._saving = self._executor.submit(self._send, packed, generation)

    def _send(self, packed: Tensor, generation: CopyGeneration) -> None:
        keeper = self._keeper
        assert keeper is not None  # noqa: S101  the tier is on
        keeper.save(packed)
        held = keeper.held if isinstance(keeper, RingCopies) else keeper.parity
        assert held is not None  # noqa: S101  it was just saved
        generation.write(self._key, packed, held, keeper.fingerprints)

    def _generations(self) -> list[CopyGeneration]:
        """What this rank holds, the newest first."""
        if not self._folder.exists():
            return []
        found = [CopyGeneration(path) for path in self._folder.iterdir() if path.name.startswith("step-")]
        return sorted(found, key=lambda generation: generation.number, reverse=True)

    def resume(self, parts: list[StatePart], volume_step: int) -> RunProgress | None:
        """Fills `parts` from the newest state that the nodes hold between them, if it is newer than the volume's; else None.

        Every rank must call it. What cannot be rebuilt is told of and left to the volume; `parts` are then as they were. What is older
        stays until `forget`.
        """
        if not self.is_on:
            return None
        mine = {generation.number: generation for generation in self._generations() if generation.is_of(self._key)}
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
            # newer, but not whole, or older: neither must be taken for the one to fall back on
            shutil.rmtree(mine[other].folder, ignore_errors=True)
        for name, values in checkpointable(parts).items():
            values.copy_(state[name])
        copy_twins(parts)
        if self._ranks.is_first:
            where = f"ranks {lost} got theirs from their peers" if lost else "all ranks had theirs"
            logger.info("resuming step %d from memory, the volume has step %d: %s", number[0], volume_step, where)
        return _from_tensors(state)

    def _newest(self, mine: dict[tuple[int, int], CopyGeneration]) -> tuple[tuple[int, int], list[int]]:
        """The newest generation that can be rebuilt, and the ranks that lack it; the same on all ranks."""
        numbers = [*mine, *[_NONE] * _KEPT][:_KEPT]
        flat = [float(part) for number in numbers for part in number]
        width = len(flat)
        slots = [0.0] * (width * self._ranks.size)
        slots[width * self._ranks.rank : width * (self._ranks.rank + 1)] = flat
        told = [int(value) for value in self._ranks.sum(slots)]
        held = [
            {(told[at], told[at + 1]) for at in range(width * rank, width * (rank + 1), 2)}
            for rank in range(self._ranks.size)
        ]
        for number in sorted(set.union(*held) - {_NONE}, reverse=True):
            lost = [rank for rank, numbers_held in enumerate(held) if number not in numbers_held]
            if all(can_rebuild(self._kind, group, set(lost)) for group in self._groups):
                return number, lost
        return _NONE, []

    def _say(self, mine: dict[tuple[int, int], CopyGeneration], volume_step: int) -> None:
        if mine and max(mine)[0] > volume_step:
            logger.error(
                "COPIES IN MEMORY up to step %d cannot be used: too many nodes were lost; the volume has step %d",
                max(mine)[0],
                volume_step,
            )

    def _rebuild(self, generation: CopyGeneration | None, parts: list[StatePart]) -> dict[str, Tensor]:
        keeper, own = self._keeper, None
        assert keeper is not None  # noqa: S101  the tier is on
        if generation is not None:
            own, held, keeper.fingerprints = generation.read()
            if isinstance(keeper, RingCopies):
                keeper.held = held
            else:
                keeper.parity = held
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
        """Forgets states that the run does not go on from: what it trains now must not be mixed with them."""
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
