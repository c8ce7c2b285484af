"""What the ranks of a pool can be asked to do. Arguments and answers are pickled."""

import dataclasses
import gc
import os
import time
from pathlib import Path

import torch
from tests.support.observing.fake_run import step_of
from tests.support.observing.host_reads import check_that_reads_are_seen, reads_of_steps

from cost_aware_trainer.contract import CheckpointPlan, Reconfiguration, RunPlan, Sharding
from cost_aware_trainer.contract.rank_environment import RankEnvironment
from cost_aware_trainer.distributed.collectives import disconnect
from cost_aware_trainer.distributed.layout import Box, box_of
from cost_aware_trainer.models.decoder import parameter_shapes
from cost_aware_trainer.state.checkpoint import Checkpointer
from cost_aware_trainer.state.manifests import RunFacts
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.state.reconfigure import Succession
from cost_aware_trainer.state.saves import NotFiniteError, PeriodicSaves
from cost_aware_trainer.state.state import StatePart, checkpointable
from cost_aware_trainer.state.validation import check_plan
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.training.trainer import Trainer


class MemoryLog:
    """A steps log that keeps its lines."""

    def __init__(self):
        self.entries = []

    def write(self, entry):
        self.entries.append(entry)


def train(place, plan, stop_after=None):
    """Runs a plan from where its checkpoint folder stands to its end, or for `stop_after` steps."""
    plan = RunPlan.from_json(plan)
    check_plan(plan, place.size)
    ranks, log = place.join("first"), MemoryLog()
    environment, metrics = RankEnvironment(0, None, None), RankMetrics(place.rank)
    trainer = Trainer(plan, ranks, environment, metrics, log, lambda: len(log.entries) + 1 == stop_after)
    loaded = checksums_of(trainer)
    result = trainer.run()
    checksums = checksums_of(trainer)
    trainer.rank_model.close()
    return {
        "steps": log.entries,
        "result": dataclasses.asdict(result),
        "loaded": loaded,
        "checksums": checksums,
    }


def straggle(place, plan, slow_rank, seconds):
    """Runs a plan while one rank takes so much longer to read each micro-batch; every rank's own steps."""
    plan = RunPlan.from_json(plan)
    ranks, log = place.join("first"), MemoryLog()
    trainer = Trainer(plan, ranks, RankEnvironment(0, None, None), RankMetrics(place.rank), log, lambda: False)
    read = trainer.rank_model.tokens

    def slow(*arguments):
        time.sleep(seconds)
        return read(*arguments)

    if place.rank == slow_rank:
        trainer.rank_model.tokens = slow
    trainer.run()
    trainer.rank_model.close()
    return log.entries


def reconfigure(place, plan, successors, memory=None):
    """Runs a plan to its end, going on under another after each of the given steps: {step: plan}.

    With `memory` each rank is a node of its own, and keeps copies there.
    """
    os.environ |= {"CATJ_MEMORY_FOLDER": memory, "LOCAL_WORLD_SIZE": "1"} if memory else {}
    try:
        return _reconfigure(place, plan, successors)
    finally:
        for name in ("CATJ_MEMORY_FOLDER", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def _reconfigure(place, plan, successors):
    plan = RunPlan.from_json(plan)
    check_plan(plan, place.size)
    ranks, log = place.join("first"), MemoryLog()
    orders = [
        (step, Reconfiguration(attempt=number, plan=RunPlan.from_json(text)))
        for number, (step, text) in enumerate(sorted(successors.items()), start=1)
    ]

    def newest():
        seen = [order for step, order in orders if step <= len(log.entries) + 1]
        return seen[-1] if seen else None

    succession = Succession(newest, lambda: 0.0, place.join)
    environment, metrics = RankEnvironment(0, None, None), RankMetrics(place.rank)
    trainer = Trainer(plan, ranks, environment, metrics, log, lambda: False, succession)
    result = trainer.run()
    trainer.rank_model.close()
    threads = len(list(Path("/proc/self/task").iterdir()))
    return {"steps": log.entries, "result": dataclasses.asdict(result), "threads": threads}


def hand_residuals_over(place, plan, successor, steps, by_checkpoint):
    """Trains a few compressed steps and then goes on under another plan, in process or from a checkpoint.

    Returns the residuals of this rank alone, {(parameter, box): values}, and those it carries under the new plan.
    """
    plan = RunPlan.from_json(plan)
    log, order = MemoryLog(), Reconfiguration(attempt=1, plan=RunPlan.from_json(successor))
    succession = Succession(lambda: order if len(log.entries) + 1 >= steps else None, lambda: 0.0, place.join)
    environment, metrics = RankEnvironment(0, None, None), RankMetrics(place.rank)
    trainer = Trainer(plan, place.join("first"), environment, metrics, log, lambda: False, succession)

    def boxed(rank_model, values):
        held = {name: h for h in rank_model.part.parameters for name in (h.name, h.key)}
        return {
            (name, held[name].box.offsets, held[name].box.sizes): value.view_as(held[name].value).clone()
            for name, value in values.items()
        }

    for _ in range(steps):
        trainer.step()
    # without a name for it: a reference would keep the old groups alive, and with them their names
    part, shapes = trainer.rank_model.part, parameter_shapes(plan.model)
    before = sharded_residuals(part, plan, shapes)
    if part.data_sum is not None:
        before = boxed(trainer.rank_model, part.data_sum.compressed.residuals())
    del part
    if by_checkpoint:
        trainer.save(wait=True, stops=True)
        leave(trainer)
        del trainer
        disconnect()
        gc.collect()
        trainer = Trainer(order.plan, place.join("second"), environment, metrics, log, lambda: False)
    else:
        trainer.reconfigure()
    after = boxed(trainer.rank_model, trainer.rank_model.part.residuals)
    trainer.step()
    assert not trainer.rank_model.part.residuals
    leave(trainer)
    return before, after


def sharded_residuals(part, plan, shapes):
    """Residuals of this rank's compressed reduce-scatters, {(parameter, box): values}, from fully_shard's flat gradients."""
    found, ranks, place = {}, plan.degrees.data, part.mesh.place
    for (scatter, _), owned in zip(part.scatters, part.scattered_parameters, strict=True):
        rows, start = scatter.residual(), 0
        for held in owned:
            shape = held.parameter.shape
            width = -(-shape[0] // ranks) * shape[1:].numel()
            values = rows[:, start : start + width].flatten()[: shape.numel()].view(shape)
            box = box_of(held.name, shapes[held.name], place, plan.degrees, Sharding.NONE)
            found[held.key, box.offsets, box.sizes] = values.clone()
            start += width
        assert start == rows.shape[1]
    return found


def leave(trainer):
    trainer.rank_model.close()
    trainer.close()


def replicate(place, kind, lost, flip=None):
    """Saves a state of another size on each rank to its peers; ranks in `lost` then forget all they held.

    Returns whether this rank has its state again, and how many bytes its peers' cost it; or the error's text.
    """
    import torch

    from cost_aware_trainer.state.memory import copies as replicas

    ranks = place.join("first")
    generator = torch.Generator().manual_seed(place.rank)
    state = {
        "model.weight": torch.randn(40 + 7 * place.rank, 3, generator=generator),
        "model.empty": torch.empty(0, 3),
        "optimizer.half": torch.randn(5, generator=generator).bfloat16(),
        "optimizer.step": torch.tensor(7.0),
    }
    keeper = getattr(replicas, kind)(ranks.background)
    packed = replicas.pack(state)
    keeper.save(packed)
    held = keeper.peer_state if kind == "RingCopies" else keeper.parity
    held_bytes = held.numel()
    if place.rank == flip:
        held[held.numel() // 2] ^= 1
    if place.rank in lost:
        # A replaced rank: nothing of what its process knew is there.
        keeper, packed = getattr(replicas, kind)(ranks.background), None
    try:
        again = replicas.unpack(keeper.rebuild(packed))
    except replicas.ReplicaError as error:
        return str(error)
    same = all(again[name].dtype == value.dtype and torch.equal(again[name], value) for name, value in state.items())
    return same and again.keys() == state.keys(), held_bytes, replicas.pack(state).numel()


def checksums_of(trainer):
    """Checksums of the run's state as it is in memory, from all ranks' parts."""
    rank_model = trainer.rank_model
    parts = rank_model.parts()
    facts = rank_model.checksums.facts(checkpointable(parts), parts)
    return {name: fact.checksum for name, fact in facts.items()}


def check_finite(place, bad_rank, value):
    """What the ranks say of a state that is not finite on one of them."""
    ranks = place.join("finite")
    values = torch.zeros(5)
    if place.rank == bad_rank:
        values[3] = value
    parts = [
        StatePart(name, tensor, Box((0,), (5,)), (5,), name, is_copy=False)
        for name, tensor in (
            ("model.a", torch.ones(5)),
            ("model.b", values),
            ("model.mask", torch.full((5,), -torch.inf)),
        )
    ]
    checkpointer = Checkpointer(
        CheckpointPlan(folder="/nowhere"), ranks, RunFacts(model={}, seed=0, global_samples=1, data_sha256="")
    )
    saves = PeriodicSaves(checkpointer, ranks, RankMetrics(ranks.rank), 60.0)
    saves.tolerate(["model.mask"])
    try:
        saves.check_finite(RunProgress(step=7), parts)
    except NotFiniteError as error:
        return str(error)
    return ""


def host_reads(place, plan, steps):
    """Who reads tensors' values in each step of a plan, after the first."""
    check_that_reads_are_seen()
    plan = RunPlan.from_json(plan)
    ranks = place.join("first")
    trainer = Trainer(plan, ranks, RankEnvironment(0, None, None), RankMetrics(place.rank), MemoryLog(), lambda: False)
    trainer.step()
    found = reads_of_steps(trainer.step, steps)
    trainer.close()
    trainer.rank_model.close()
    return found


def fake_step(place, plan, rank):
    """A step of one rank of a plan for many, in this process."""
    return step_of(plan, rank)
