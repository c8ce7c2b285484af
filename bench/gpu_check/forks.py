"""Forks: nothing that is imported before a fork touches a GPU, and what is forked can use it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench.gpu_check.check import Found, Setting
from bench.gpu_check.processes import on_ranks, tail
from bench.gpu_check.runs import TINY, plan_of
from bench.overhead import free_port

from cost_aware_trainer.contract import ENV_METRICS_PORT, ENV_RESULT_FILE, AgentPhase, RunResult
from cost_aware_trainer.training.forkserver import PRELOADED

STEPS = 3
LOOK = "import importlib, torch\nfor name in {names!r}:\n    importlib.import_module(name)\nprint(torch.cuda.is_initialized())"


def forks(setting: Setting) -> Found:
    """A new process with the fork server's imports, ranks forked from this one, and a run of the fork server itself."""
    look = [sys.executable, "-c", LOOK.format(names=PRELOADED)]
    said = subprocess.run(look, capture_output=True, text=True, timeout=240, check=False)
    figures: dict[str, Any] = {"imports_touch_a_device": said.stdout.strip() != "False"}
    problems = []
    if said.stdout.strip() != "False":
        problems.append(f"importing what the fork server imports touches a device: {said.stdout} {said.stderr[-500:]}")
    for name in PRELOADED:
        importlib.import_module(name)
    if torch.cuda.is_initialized():
        problems.append("a device was touched in this process, which only forks")
    figures["threads_before_the_fork"] = len(list(Path("/proc/self/task").iterdir()))
    (used,) = on_ranks(setting, 1, compute, setting.device)
    figures["forked_rank_device"] = used["device"]
    if used["sum"] != used["expected_sum"]:
        problems.append(f"a forked rank computes {used['sum']} on {used['device']}, not {used['expected_sum']}")
    result, ready_seconds = serve(setting)
    figures |= {"fork_server_ready_seconds": ready_seconds, "fork_server_run_steps": result.step}
    if result.outcome is not AgentPhase.COMPLETED:
        problems.append(f"the run that the fork server forked ended as {result.outcome.value}: {result.message}")
    return Found(figures, problems)


def compute(device: str) -> dict[str, Any]:
    """A matrix product of ones on this forked rank's device."""
    side = 64
    product = torch.ones(side, side, device=device) @ torch.ones(side, side, device=device)
    return {"device": str(product.device), "sum": float(product.sum()), "expected_sum": float(side**3)}


def serve(setting: Setting) -> tuple[RunResult, float]:
    """Has the project's own fork server launch torchrun for a short run, as an agent does; its result, and seconds until ready."""
    plan = plan_of(setting, TINY, steps=STEPS)
    folder = Path(plan.checkpoint.folder).parent
    (folder / "plan.json").write_text(plan.to_json())
    torchrun = ["--nnodes=1", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d"]
    arguments = [*torchrun, "-m", "cost_aware_trainer", "--plan", str(folder / "plan.json")]
    environment = dict(os.environ) | {
        ENV_RESULT_FILE: str(folder / "result.json"),
        ENV_METRICS_PORT: str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    if not setting.on_cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    reading, writing = os.pipe()
    with (folder / "server.log").open("w") as log:
        command = [sys.executable, "-m", "cost_aware_trainer.training.forkserver", str(writing)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing], text=True)
    os.close(writing)
    assert server.stdin is not None
    with os.fdopen(reading) as answers, server.stdin as orders:
        ready = answers.readline()
        if ready:
            print(
                json.dumps({"launch": 1, "arguments": arguments, "environment": environment}), file=orders, flush=True
            )
        ended = answers.readline() if ready else ""
    server.wait(60)
    if not ended or json.loads(ended)["code"]:
        raise RuntimeError(
            f"the fork server's launch failed ({ended.strip() or 'no answer'}): {tail(folder / 'server.log')}"
        )
    return RunResult.from_json((folder / "result.json").read_text()), float(json.loads(ready)["seconds"])
