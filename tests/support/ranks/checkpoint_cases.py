"""What ranks do with checkpoints of a small state, whose values say of which step they are."""

import time

import torch

from cost_aware_trainer.contract import CheckpointPlan, OnAllDamaged
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.layout import Box
from cost_aware_trainer.distributed.mesh import data_mesh
from cost_aware_trainer.state.checkpoint import Checkpointer
from cost_aware_trainer.state.claims import FolderClaim
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.state import MOMENTS, Checksums, StatePart

FACTS = RunFacts(model={"layers": 1}, seed=0, global_samples=8, data_sha256="d")


class Throttle:
    """A store of so many bytes a second, as each rank sees it."""

    def __init__(self, bytes_per_second):
        self.bytes_per_second, self.bytes = bytes_per_second, 0

    def __call__(self, count):
        self.bytes += count
        time.sleep(count / self.bytes_per_second)


def parts_of(ranks, rows, columns=16):
    """This rank's rows of a state that is sharded over the ranks."""
    mine = rows // ranks.size
    box = Box((mine * ranks.rank, 0), (mine, columns))
    names = ["model.w", *(f"optimizer.state.w.{moment}" for moment in MOMENTS)]
    parts = [StatePart(name, torch.zeros(mine, columns), box, (rows, columns), "w", False) for name in names]
    return [*parts, StatePart("optimizer.state.w.step", torch.zeros(()), Box((), ()), (), "w", False)]


class Run:
    """A run that trains nothing: its state is the number of its step."""

    def __init__(self, ranks: Ranks, folder, *, rows=8, keep=5, claim=None, policy="stop"):
        plan = CheckpointPlan(folder=str(folder), keep=keep, on_all_damaged=OnAllDamaged(policy))
        self.checkpointer = Checkpointer(plan, ranks, FACTS, FolderClaim(folder, *claim) if claim else None)
        self.attempt = claim[1] if claim else 0
        self.parts = parts_of(ranks, rows)
        self.checksums = Checksums(data_mesh(ranks), {"w": (rows, 16)}, is_sharded=True)
        self.shapes = {"w": (rows, 16)}

    def save(self, step):
        for part in self.parts:
            part.values.fill_(step)
        progress = RunProgress(step, step, 1.0 / step)
        self.checkpointer.start_save(progress, self.attempt, self.parts, self.checksums)
        self.checkpointer.wait()

    def resume(self):
        self.checkpointer.check_folder()
        found = self.checkpointer.resume(self.parts, self.checksums, self.shapes)
        if found is None:
            self.checkpointer.begin_anew()
            return 0
        assert all(bool((part.values == found.step).all()) for part in self.parts)
        assert int(found.samples_checksum, 16) == found.step
        return found.step


def alone(folder, **options):
    """A run of one rank, in this process."""
    return Run(Ranks(0, 1, 0, torch.device("cpu"), None), folder, **options)


def save_steps(place, folder, steps, keep=5, rows=8):
    run = Run(place.join("first"), folder, keep=keep, rows=rows)
    run.checkpointer.check_folder()
    for step in steps:
        run.save(step)
    run.checkpointer.close()


def resumed_step(place, folder, policy="stop"):
    """The step that a run goes on from, with the state of that step; or what it says instead."""
    run = Run(place.join("first"), folder, policy=policy)
    try:
        return run.resume()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.checkpointer.close()


def save_and_resume_slowly(place, folder, rows, bytes_per_second):
    """Saves and resumes with a slow store; seconds of both, and the bytes that this rank has read and written."""
    ranks = place.join("first")
    ranks.meetings.pace = throttle = Throttle(bytes_per_second)
    run = Run(ranks, folder, rows=rows)
    run.checkpointer.check_folder()
    began = time.monotonic()
    run.save(3)
    saved, written = time.monotonic() - began, throttle.bytes
    run.checkpointer.close()
    again, throttle.bytes = Run(ranks, folder, rows=rows), 0
    began = time.monotonic()
    assert again.resume() == 3
    resumed, read = time.monotonic() - began, throttle.bytes
    again.checkpointer.close()
    return saved, resumed, written, read
