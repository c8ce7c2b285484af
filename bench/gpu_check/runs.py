"""Runs of the bundled trainer inside of a rank: plans, a trainer that is closed again, and what its steps log says."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bench.gpu_check.check import Setting
from bench.gpu_check.processes import on_ranks
from devtools.steps_log import steps_of

from cost_aware_trainer.contract import (
    BatchPlan,
    CheckpointPlan,
    DegreesPlan,
    ModelPlan,
    OptimizerPlan,
    RunPlan,
    StrategyPlan,
)
from cost_aware_trainer.contract.rank_environment import RankEnvironment, StepsLog
from cost_aware_trainer.data.token_files import prepare
from cost_aware_trainer.distributed.collectives import Rendezvous, disconnect
from cost_aware_trainer.state.validation import check_plan
from cost_aware_trainer.telemetry.metrics import RankMetrics, peak_memory_bytes
from cost_aware_trainer.training.trainer import Trainer

TINY = ModelPlan(layers=2, hidden=64, heads=4, kv_heads=2, ffn=172, sequence_length=64, vocabulary=256)
"""A model whose steps take milliseconds anywhere."""
MIDDLE = ModelPlan(layers=12, hidden=1024, heads=16, kv_heads=8, ffn=2816, sequence_length=1024, vocabulary=32_000)
"""A model of 0.2 billion weights, whose kernels are long enough to hide what the host does."""
NEVER_STEPS = 10**6


@dataclass(frozen=True)
class Work:
    """What a rank is to train, and how."""

    plan: RunPlan
    """The plan."""
    warm_steps: int
    """Steps before those that count."""
    steps: int
    """Steps that count."""
    tf32: bool = True
    """Whether fp32 products may be rounded to TF32 on a GPU, as the trainer's own ranks let them be."""


@dataclass(frozen=True)
class Trained:
    """What came of it, on rank 0."""

    losses: list[float]
    """Training loss of every step, nats per token."""
    step_seconds: list[float]
    """Seconds of each step that counts."""
    phase_seconds: list[dict[str, float]]
    """Seconds of each such step by phase."""
    peak_bytes: int
    """Peak memory of the process: allocated on the GPU, or resident."""


@cache
def data_of(folder: Path) -> Path:
    """A data set of a part of the standard library's sources, made once for each check."""
    data = folder / "data"
    prepare(data, Path(json.__file__).parent.parent / "asyncio")
    return data


def plan_of(
    setting: Setting,
    model: ModelPlan,
    *,
    steps: int,
    degrees: DegreesPlan | None = None,
    strategy: StrategyPlan | None = None,
    global_samples: int = 8,
    micro_samples: int = 2,
) -> RunPlan:
    """A plan that never evaluates or saves by itself, in a folder of its own.

    It is for `steps` steps and one more, behind which the others are known, and does not come to its last step, which it would save.
    """
    degrees = degrees or DegreesPlan()
    plan = RunPlan(
        steps=steps + 2,
        model=model,
        batch=BatchPlan(global_samples=global_samples, micro_samples=micro_samples),
        checkpoint=CheckpointPlan(
            folder=str(Path(tempfile.mkdtemp(dir=setting.folder)) / "checkpoints"), interval_seconds=NEVER_STEPS
        ),
        data_folder=str(data_of(setting.folder)),
        degrees=degrees,
        strategy=strategy or StrategyPlan(),
        optimizer=OptimizerPlan(warmup_steps=5),
        evaluate_every_steps=NEVER_STEPS,
        evaluation_samples=1,
        seed=7,
    )
    check_plan(plan, degrees.ranks)
    return plan


@contextmanager
def trainer_of(plan: RunPlan) -> Iterator[Trainer]:
    """The bundled trainer of this rank, as `python -m cost_aware_trainer` builds it, but without an agent."""
    ranks = Rendezvous.from_environment().join("first")
    log = StepsLog(log_of(plan) if ranks.is_first else None)
    trainer = Trainer(plan, ranks, RankEnvironment(0, None, None), RankMetrics(ranks.rank), log, lambda: False)
    yield trainer
    # not after an error: ranks that are still there would be waited for
    trainer.close()
    trainer.rank_model.close()
    log.close()
    disconnect()


def log_of(plan: RunPlan) -> Path:
    """File of the plan's steps log."""
    return Path(plan.checkpoint.folder).with_name("steps.jsonl")


def train(work: Work) -> dict[str, Any]:
    """Trains in this rank; the fields of `Trained`."""
    torch.set_float32_matmul_precision("high" if work.tf32 else "highest")
    with trainer_of(work.plan) as trainer:
        # one step more: on a GPU a step is in the log when the next has been started
        for _ in range(work.warm_steps + work.steps + 1):
            trainer.step()
        peak_bytes = peak_memory_bytes(trainer.rank_model.mesh.ranks.device)
    entries = steps_of(log_of(work.plan))[: work.warm_steps + work.steps]
    counted = entries[work.warm_steps :]
    return {
        "losses": [entry["loss"] for entry in entries],
        "step_seconds": [entry["step_seconds"] for entry in counted],
        "phase_seconds": [entry["seconds"] for entry in counted],
        "peak_bytes": peak_bytes,
    }


def trained(setting: Setting, work: Work, device: str | None = None) -> Trained:
    """Trains on as many ranks as the plan has."""
    first, *_ = on_ranks(setting, work.plan.degrees.ranks, train, work, device=device)
    return Trained(**first)
