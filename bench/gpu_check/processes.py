"""Processes of the checks: each check runs in a fork with a time limit, and its ranks in forks of that.

Nothing touches a device before a rank does, in this process or in a check's: a fork could not use it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from bench.gpu_check.check import Check, Outcome, Setting, SkippedError, Verdict
from bench.overhead import free_port

from cost_aware_trainer.agent.processes import descendants
from cost_aware_trainer.contract import ENV_METRICS_PORT

FORK = multiprocessing.get_context("fork")
TAIL_CHARACTERS = 2000


class RankError(RuntimeError):
    """A rank that ended badly; the text has the end of what it wrote."""


def run_limited(check: Check, setting: Setting) -> Outcome:
    """Does a check in a process of its own. Whatever becomes of it, it has an outcome, and leaves no process behind.

    To that end all other children of this process are ended too: it is to have none, and to adopt orphans.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{check.name}-", dir=setting.folder))
    answer, log = folder / "answer.json", folder / "log"
    process = FORK.Process(target=_answered, args=(check, setting, answer, log))
    process.start()
    try:
        process.join(check.limit_seconds)
        is_late = process.is_alive()
    finally:
        end_descendants(os.getpid())
        process.join()
    if is_late:
        return Outcome(
            Verdict.FAILED, f"did not end within {check.limit_seconds:.0f} s and was ended; last lines: {tail(log)}"
        )
    if not answer.exists():
        return Outcome(
            Verdict.FAILED, f"its process ended with code {process.exitcode}; last lines: {tail(log) or 'none'}"
        )
    told = json.loads(answer.read_text())
    return Outcome(Verdict(told.pop("verdict")), **told)


def _answered(check: Check, setting: Setting, answer: Path, log: Path) -> None:
    """Writes the outcome of a check, which runs in this process."""
    write_to(log)
    try:
        outcome = Outcome.of(check.run(setting))
    except SkippedError as skipped:
        outcome = Outcome(Verdict.SKIPPED, skipped.reason, skipped.figures)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(Verdict.FAILED, f"{type(error).__name__}: {error}")
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome)))
    partial.replace(answer)


def on_ranks(
    setting: Setting, world: int, work: Callable[..., Any], *arguments: Any, device: str | None = None
) -> list[Any]:
    """Does `work(*arguments)` on `world` ranks beside each other, with torchrun's variables set.

    Args:
        setting: what the check was told.
        world: number of ranks.
        work: function of this program; its answer is of JSON values.
        arguments: for the function.
        device: `cpu` for ranks that must not see a GPU; as the setting says if left out.

    Returns:
        the answers, by rank.

    Raises:
        RankError: a rank ended badly; the others were ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=setting.folder))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), ENV_METRICS_PORT: str(free_port())}
    variables |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    if (device or setting.device) == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    processes = [
        FORK.Process(target=_rank, args=(rank, variables, folder, work, arguments), daemon=False)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        waiting: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
        while waiting:
            for sentinel in wait(list(waiting)):
                rank = waiting.pop(sentinel)
                processes[rank].join()
                if processes[rank].exitcode:
                    code, said = processes[rank].exitcode, tail(folder / f"log-{rank}")
                    raise RankError(f"rank {rank} of {world} ended with code {code}: {said}")
    finally:
        for process in processes:
            if process.is_alive() and process.pid:
                end_descendants(process.pid)
                process.kill()
            process.join()
    return [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(world)]


def _rank(
    rank: int, variables: dict[str, str], folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    write_to(folder / f"log-{rank}")
    os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    answer = work(*arguments)
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


def write_to(path: Path) -> None:
    """Sends all that this process and its children write to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # a rank's process does so after its check's: the object that is replaced must not close the descriptor
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.close(descriptor)


def end_descendants(pid: int) -> None:
    """Ends all descendants of a process, children before their parents, whatever sessions they moved to."""
    for one in reversed(descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def tail(path: Path) -> str:
    """The end of a log."""
    return path.read_text(errors="replace")[-TAIL_CHARACTERS:].strip() if path.exists() else ""
