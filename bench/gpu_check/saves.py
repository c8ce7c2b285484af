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
KINDS = ("none", "background", "waiting")
"""Kinds of a save, in the order in which they are tried again and again."""
SMALL = ModelPlan(layers=4, hidden=192, heads=6, kv_heads=2, ffn=512, sequence_length=128, vocabulary=256)
"""The model of bench/overhead.py, whose state takes a while to write even to a fast disk."""
MOST = 0.5
"""Share of a waiting save's stall that a background save's may take: it copies the state, and hashes and writes it behind."""


def stall(setting: Setting) -> Found:
    """Median seconds that the loop loses, for both kinds of save.

    On a GPU the copy is made beside the next step, whose update waits for it: what that step takes longer counts. On a CPU it does
    not, as there the writing takes cores from the step.
    """
    world = setting.ranks
    plan = plan_of(
        setting,
        SMALL if setting.small else MIDDLE,
        steps=2 * len(KINDS) * (REPEATS + 1),
        degrees=DegreesPlan(data=world),
        global_samples=2 * world,
    )
    first, *_ = on_ranks(setting, world, stalls, plan)
    figures: dict[str, Any] = {"ranks": world, "saves_of_each_kind": REPEATS, "state_bytes": first["state_bytes"]}
    call_seconds, with_step_seconds = ({k: median(s) for k, s in first[n].items()} for n in ("call", "with_step"))
    figures["ordinary_step_seconds"] = with_step_seconds["none"]
    stall_seconds = {}
    for kind in ("background", "waiting"):
        longer_seconds = with_step_seconds[kind] - with_step_seconds["none"]
        stall_seconds[kind] = longer_seconds if setting.on_cuda else call_seconds[kind]
        figures |= {
            f"{kind}_call_seconds": call_seconds[kind],
            f"{kind}_with_next_step_seconds": with_step_seconds[kind],
        }
        figures[f"{kind}_stall_seconds"] = stall_seconds[kind]
    figures["stall_ratio"] = stall_seconds["background"] / stall_seconds["waiting"]
    slow = (
        f"a background save holds the loop up for {stall_seconds['background']:.3g} s, more than {MOST:.0%} of the "
        f"{stall_seconds['waiting']:.3g} s of one that is waited for"
    )
    return Found(figures, [slow] if stall_seconds["background"] > MOST * stall_seconds["waiting"] else [])


def stalls(plan: RunPlan) -> dict[str, Any]:
    """Saves in turns on this rank, each between two steps; the first of each kind does not count."""
    call: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with_step: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with trainer_of(plan) as trainer:
        for repeat in range(REPEATS + 1):
            for kind in KINDS:
                call_seconds, with_step_seconds = seconds_of(trainer, kind)
                if repeat:
                    call[kind].append(call_seconds)
                    with_step[kind].append(with_step_seconds)
        state_bytes = sum(part.values.nbytes for part in trainer.rank_model.parts())
    return {"call": call, "with_step": with_step, "state_bytes": state_bytes}


def seconds_of(trainer: Trainer, kind: str) -> tuple[float, float]:
    """Seconds of one save, and of it and a step after it, with nothing under way on any rank or device before.

    On a GPU the state is that of a step after the one by which it is named: nobody loads it.
    """
    ranks = trainer.rank_model.mesh.ranks
    trainer.step()
    trainer.saves.settle()
    ranks.synchronise()
    if dist.is_initialized():
        dist.barrier()
    began_seconds = time.perf_counter()
    if kind != "none":
        trainer.save(wait=kind == "waiting")
    call_seconds = time.perf_counter() - began_seconds
    trainer.step()
    ranks.synchronise()
    with_step_seconds = time.perf_counter() - began_seconds
    trainer.saves.settle()
    return call_seconds, with_step_seconds
