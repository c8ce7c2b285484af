"""Process of one rank, from its command line to its exit code."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from cost_aware_trainer.contract import (
    ENV_PLAN_FILE,
    EXIT_INVALID,
    AgentPhase,
    ContractError,
    LaunchStage,
    Metric,
    RunPlan,
    RunResult,
)
from cost_aware_trainer.contract.rank_environment import RankEnvironment, StepsLog, StopSignal
from cost_aware_trainer.data.parts import DataError
from cost_aware_trainer.distributed.collectives import Ranks, Rendezvous, disconnect
from cost_aware_trainer.distributed.meetings import StorageError
from cost_aware_trainer.distributed.probe import probe_links
from cost_aware_trainer.state.checkpoint import CheckpointError
from cost_aware_trainer.state.reconfigure import Succession
from cost_aware_trainer.state.validation import InvalidRunError, check_plan
from cost_aware_trainer.telemetry.launch_stages import Stopwatch
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.training.trainer import DivergedError, Trainer

logger = logging.getLogger("cost_aware_trainer")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line. `--plan` defaults to the agent's file."""
    parser = argparse.ArgumentParser(prog="python -m cost_aware_trainer", description="One rank of a training run.")
    parser.add_argument("--plan", type=Path, default=os.environ.get(ENV_PLAN_FILE), help="the run plan, JSON")
    parser.add_argument("--steps-log", type=Path, help="append one JSON line a step to this file (rank 0)")
    options = parser.parse_args(arguments)
    if options.plan is None:
        parser.error(f"--plan: no plan; name a file, or set {ENV_PLAN_FILE}")
    return options


def read_plan(path: Path, world_size: int) -> RunPlan:
    """Reads and checks the plan.

    Raises:
        InvalidRunError: it cannot be read, does not follow the contract, or can never work.
    """
    try:
        plan = RunPlan.from_json(path.read_bytes())
    except (OSError, ContractError) as error:
        raise InvalidRunError(f"{path}: {error}") from None
    check_plan(plan, world_size)
    return plan


def run_rank(options: argparse.Namespace, environment: RankEnvironment) -> RunResult:
    """Runs this rank from plan to result.

    Raises:
        InvalidRunError: the run can never work.
    """
    start = Stopwatch.of_start(environment.launch)
    plan = read_plan(Path(options.plan), int(os.environ.get("WORLD_SIZE", "1")))
    stop_signal = StopSignal(environment)
    stop_signal.listen()
    rendezvous = Rendezvous.from_environment()
    ranks = rendezvous.join("first")
    start.end(LaunchStage.RENDEZVOUS)
    succession = Succession(stop_signal.reconfiguration, stop_signal.written_seconds_ago, rendezvous.join)
    metrics = RankMetrics(ranks.rank)
    metrics.set(Metric.TOTAL_STEPS, plan.steps)
    metrics.serve(ranks.local_rank)
    metrics.set_links(probe_links(ranks))
    steps_log = StepsLog(options.steps_log if ranks.is_first else None)
    try:
        result = train(plan, ranks, environment, metrics, steps_log, stop_signal, succession, start)
    finally:
        steps_log.close()
    ranks.heartbeat.close()
    return result


def train(
    plan: RunPlan,
    ranks: Ranks,
    environment: RankEnvironment,
    metrics: RankMetrics,
    steps_log: StepsLog,
    stop_signal: StopSignal,
    succession: Succession,
    start: Stopwatch,
) -> RunResult:
    """Trains. A failure that all ranks share becomes a FAILED result instead of a traceback."""
    try:
        trainer = Trainer(plan, ranks, environment, metrics, steps_log, stop_signal.is_set, succession, start)
    except (CheckpointError, StorageError) as error:
        return RunResult(outcome=AgentPhase.FAILED, total_steps=plan.steps, message=str(error))
    try:
        return trainer.run()
    except (DivergedError, CheckpointError, StorageError) as error:
        return trainer.result(AgentPhase.FAILED, str(error))
    except DataError as error:
        # This rank alone knows, and its peers only see it go.
        result = trainer.result(AgentPhase.FAILED, f"data_folder, rank {ranks.rank}: {error}")
        environment.write_result(result)
        return result


@record
def main(arguments: list[str] | None = None) -> int:
    """Runs a rank. Returns 0 for a run that completed or stopped as asked, EXIT_INVALID for an impossible one, 1 for a failure."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    # Modules stay for good, so garbage collections, as after each change of the layout, need not look at them.
    gc.freeze()
    options = parse_arguments(arguments)
    environment = RankEnvironment.from_environment()
    try:
        result = run_rank(options, environment)
    except InvalidRunError as error:
        # Every rank says it: torchrun ends the others as soon as the first one exits.
        environment.write_result(RunResult(outcome=AgentPhase.INVALID, message=str(error)))
        print(f"invalid run: {error}", file=sys.stderr, flush=True)
        return EXIT_INVALID
    if os.environ.get("LOCAL_RANK", "0") == "0":
        environment.write_result(result)
    if result.outcome is AgentPhase.FAILED:
        print(f"failed: {result.message}", file=sys.stderr, flush=True)
        return 1
    disconnect()
    return 0
