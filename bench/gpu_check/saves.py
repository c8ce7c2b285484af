"""Saves: how long the step loop stands for one in the background, beside one that is waited for."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch.distributed as dist
from bench.gpu_check.check import Found, Setting
from bench.gpu_check.processes import on_ranks
from bench.gpu_check.runs import MIDDLE, plan_of, trainer_of

from cost_aware_trainer.contract import DegreesPlan, ModelPlan, RunPlan
from cost_aware_trainer.training.trainer import Trainer

REPEATS = 5
SMALL = ModelPlan(layers=4, hidden=192, heads=6, kv_heads=2, ffn=512, sequence_length=128, vocabulary=256)
"""The model of bench/overhead.py, whose state takes a while to write even to a fast disk."""
MOST = 0.5
"""Share of a waiting save's stall that a background save's may take: it copies the state, and hashes and writes it behind."""


def stall(setting: Setting) -> Found:
    """Median seconds that the loop stands, for both kinds of save."""
    world = setting.ranks
    plan = plan_of(
        setting,
        SMALL if setting.small else MIDDLE,
        steps=4 * REPEATS + 2,
        degrees=DegreesPlan(data=world),
        global_samples=2 * world,
    )
    first, *_ = on_ranks(setting, world, stalls, plan)
    background, waiting = median(first["background_seconds"]), median(first["waiting_seconds"])
    figures: dict[str, Any] = {"ranks": world, "saves_of_each_kind": REPEATS, "state_bytes": first["state_bytes"]}
    figures |= {"background_stall_seconds": background, "waiting_stall_seconds": waiting}
    figures["stall_ratio"] = background / waiting
    slow = (
        f"a background save holds the loop up for {background:.3g} s, more than {MOST:.0%} of the {waiting:.3g} s of one "
        "that is waited for"
    )
    return Found(figures, [slow] if background > MOST * waiting else [])


def stalls(plan: RunPlan) -> dict[str, Any]:
    """Saves in turns on this rank, each after a step; the first pair does not count."""
    seconds: dict[str, list[float]] = {"background_seconds": [], "waiting_seconds": []}
    with trainer_of(plan) as trainer:
        for repeat in range(REPEATS + 1):
            for kind, found in seconds.items():
                took_seconds = seconds_of(trainer, waits=kind == "waiting_seconds")
                if repeat:
                    found.append(took_seconds)
        state_bytes = sum(part.values.nbytes for part in trainer.rank_model.parts())
    return {**seconds, "state_bytes": state_bytes}


def seconds_of(trainer: Trainer, *, waits: bool) -> float:
    """Seconds of one save after a step, with nothing under way on any rank or device before it.

    On a GPU the state is that of a step after the one by which it is named: nobody loads it.
    """
    trainer.step()
    trainer.saves.settle()
    trainer.rank_model.mesh.ranks.synchronise()
    if dist.is_initialized():
        dist.barrier()
    began_seconds = time.perf_counter()
    trainer.save(wait=waits)
    took_seconds = time.perf_counter() - began_seconds
    trainer.saves.settle()
    return took_seconds
