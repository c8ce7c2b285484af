"""Fork server: one process imports PyTorch once and is forked for every torchrun and its ranks.

The agent, of id PID, runs `python -m cost_aware_trainer.training.forkserver FD PID` and writes one JSON line for each launch to its
standard input: torchrun's arguments and the environment. Answers, one JSON line each, go to the descriptor FD:
`{"ready": true, "seconds": S}` once, and `{"launch": N, "code": C}` when launch N has ended. One launch runs at a time. The server
touches no device before the fork and has one thread only, so that its forks start clean.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

from cost_aware_trainer.contract import ENDED_MARK
from cost_aware_trainer.contract.parents import end_with_parent

PRELOADED = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "cost_aware_trainer.training.rank",
)


def run_rank(arguments: list[str]) -> int:
    """Runs a rank in a process that torchrun has forked and given its environment. Exits with the trainer's code if it is not 0."""
    from cost_aware_trainer.training.rank import main

    sys.argv = ["cost_aware_trainer", *arguments]
    code: int | None = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        raise SystemExit(code)
    return 0


def run_torchrun(arguments: list[str]) -> int:
    """Does what `python -m torch.distributed.run ARGUMENTS` does for the bundled trainer; returns its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    options = parse_args(arguments)  # type: ignore[no-untyped-call]
    config, _, _ = config_from_args(options)
    config.start_method = "fork"
    try:
        elastic_launch(config=config, entrypoint=run_rank)(list(options.training_script_args))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def launch(order: dict[str, Any]) -> int:
    """Runs one order in a fork of this process and waits for it. Returns its exit code, negative for a signal."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.setsid()
        # torchrun ends its ranks in order, whether the agent has died or this server
        end_with_parent(server, signal.SIGTERM)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(order["environment"])
        # a temporary folder that was looked up during the import is this server's own
        tempfile.tempdir = None
        code = run_torchrun(order["arguments"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The fork must never go on with its parent's loop.
        os._exit(code)


def main() -> int:
    """Serves launches until its standard input ends, or the process whose id is its second argument."""
    if len(sys.argv) > 2:
        end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        # Forks must not hold the agent's descriptors: a rank that lives on would keep them open.
        os.set_inheritable(answers.fileno(), False)
        began_seconds = time.monotonic()
        for name in PRELOADED:
            importlib.import_module(name)
        if importlib.import_module("torch.cuda").is_initialized():
            print("importing PyTorch has touched a device: copies could not use it", file=sys.stderr)
            return 1
        gc.collect()
        gc.freeze()
        print(json.dumps({"ready": True, "seconds": time.monotonic() - began_seconds}), file=answers)
        for line in sys.stdin:
            order = json.loads(line)
            code = launch(order)
            print(f"{ENDED_MARK}{order['launch']}", file=sys.stderr, flush=True)
            print(json.dumps({"launch": order["launch"], "code": code}), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
