"""How the agent starts torchrun: as a new process, or, once it runs, by forking one that has PyTorch imported already."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_aware_trainer.contract import ENV_PULSE_FOLDER, RunOrder
from cost_aware_trainer.forkserver import ENDED_MARK
from cost_aware_trainer.processes import Tail, Torchrun, kill_descendants, reap_adopted

logger = logging.getLogger(__name__)

_RENDEZVOUS_TIMEOUT_SECONDS = 180
_OWN_PROGRAM_TIMEOUT_SECONDS = 40
"""How long torchrun gives a user's own program to end after SIGTERM; within the agent's own grace."""
_SHUTDOWN_TIMEOUT_SECONDS = 5
"""How long torchrun lets the peers of a failed rank live; they can do nothing useful in that time."""
_TORCHRUN = ("-m", "torch.distributed.run")
_BUNDLED = ("-m", "cost_aware_trainer")


def torchrun_command(order: RunOrder, index: int, port: int) -> list[str]:
    """The command that runs an order on the node of this index.

    The static rendezvous is used because it alone makes the node's rank the pod's index (c10d numbers nodes by arrival
    and address), so that rank 0 lives in pod 0, where its metrics and results are looked for.
    """
    return [
        sys.executable,
        *_TORCHRUN,
        f"--nnodes={order.nodes}",
        f"--nproc-per-node={order.ranks_per_node}",
        f"--node-rank={index}",
        "--rdzv-backend=static",
        f"--master-addr={order.rendezvous_host}",
        f"--master-port={port}",
        f"--rdzv-id={order.job}-{order.attempt}",
        f"--rdzv-conf=timeout={_RENDEZVOUS_TIMEOUT_SECONDS}",
        f"--shutdown-timeout={_SHUTDOWN_TIMEOUT_SECONDS if order.plan is not None else _OWN_PROGRAM_TIMEOUT_SECONDS}",
        "--max-restarts=0",
        *order.entry,
    ]


class ForkServer:
    """A process that imports PyTorch once and is forked for each launch; see `cost_aware_trainer.forkserver`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.is_ready = False
        self.codes: dict[int, int] = {}
        self._launches = 0
        command = [sys.executable, "-m", "cost_aware_trainer.forkserver"]
        reading, writing = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603  the agent's own program
            [*command, str(writing)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[writing],
            start_new_session=True,
            text=True,
            errors="replace",
        )
        os.close(writing)
        assert self._process.stderr is not None  # noqa: S101  it was asked for
        self.tail = Tail(self._process.stderr, ENDED_MARK)
        threading.Thread(target=self._listen, args=(reading,), name="fork-server", daemon=True).start()

    def _listen(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as answers:
            for line in answers:
                self._note(json.loads(line))

    def _note(self, answer: dict[str, Any]) -> None:
        if answer.get("ready"):
            logger.info("the fork server is ready: later launches need not import PyTorch")
            self.is_ready = True
        else:
            self.codes[answer["launch"]] = answer["code"]

    @property
    def pid(self) -> int:
        """Its process, which outlives launches."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> ForkedTorchrun:
        """Starts what `torchrun_command` says for the bundled trainer.

        Raises:
            OSError: the server is gone.
        """
        self._launches += 1
        order = {"launch": self._launches, "arguments": list(command[3:]), "environment": dict(environment)}
        self.tail.clear()
        assert self._process.stdin is not None  # noqa: S101  it was asked for
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return ForkedTorchrun(self, self._launches, command, environment)


class ForkedTorchrun:
    """A running torchrun that the fork server has started; the same to its owner as `processes.Torchrun`.

    A server that dies before any rank has begun is made up for by a new process: nothing is lost but seconds.
    """

    def __init__(self, server: ForkServer, launch: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._server, self._launch = server, launch
        self._command, self._environment = command, environment
        self._replacement: Torchrun | None = None

    def exit_code(self) -> int | None:
        """The exit code, or None while torchrun runs; that of a server lost under its ranks counts as torchrun's."""
        if self._replacement:
            return self._replacement.exit_code()
        code = self._server_code()
        if code is None and not self._server.is_alive:
            return self._replace()
        return code

    def _server_code(self) -> int | None:
        return self._server.codes.get(self._launch)

    def _replace(self) -> int | None:
        # What the server has begun goes on without it, and must not meet its own replacement.
        kill_descendants()
        if any(Path(self._environment[ENV_PULSE_FOLDER]).iterdir()):
            return 1
        logger.error("the fork server died before any rank had begun: starting torchrun as a new process")
        self._replacement = Torchrun(self._command, self._environment)
        return None

    def terminate(self) -> None:
        """Nothing: only a user's own program is told to end so, and that is never forked."""

    def kill(self, spared: int | None = None) -> None:
        """Kills every descendant of this agent but the fork server; raises as `processes.Torchrun.kill`."""
        if self._replacement:
            self._replacement.kill(spared)
            return
        kill_descendants(spared)
        reap_adopted(self._server.pid)
        deadline_seconds = time.monotonic() + 1.0
        # The server takes note of the death before it is asked for another launch.
        while spared is not None and self._server_code() is None and time.monotonic() < deadline_seconds:
            time.sleep(0.01)

    def last_error(self) -> str:
        """See `processes.Tail.last_error`; the code comes by another way than what was written, and may be here before it."""
        if self._replacement:
            return self._replacement.last_error()
        self._server.tail.settle(str(self._launch))
        return self._server.tail.last_error() or "the fork server died under its ranks"


class Launcher:
    """Starts attempts, the later ones of the bundled trainer from a fork server that is started meanwhile.

    `warm_up_after_seconds` counts from the first attempt's start, so that importing does not slow that down; a negative
    value keeps every launch a new process.
    """

    def __init__(self, warm_up_after_seconds: float) -> None:
        self._warm_up_after_seconds = warm_up_after_seconds
        self._started_at_seconds: float | None = None
        self._environment: dict[str, str] = {}
        self._server: ForkServer | None = None

    @property
    def spared(self) -> int | None:
        """The process that killing an attempt leaves alone."""
        return self._server.pid if self._server and self._server.is_alive else None

    def start(
        self, order: RunOrder, command: Sequence[str], environment: Mapping[str, str]
    ) -> Torchrun | ForkedTorchrun:
        """Runs an attempt's torchrun."""
        server = self._server
        is_bundled = order.plan is not None and order.entry[:2] == _BUNDLED
        if order.plan is None:
            logger.info(
                "attempt %d runs a program of your own: unless it uses cost_aware_trainer.TrainingSession it has no step "
                "metrics, no exactly-once samples and no checkpoints that the operator knows of",
                order.attempt,
            )
        if is_bundled and server and server.is_ready and server.is_alive:
            try:
                return server.launch(command, environment)
            except OSError as error:
                logger.error("the fork server is gone (%s): starting torchrun as a new process", error)
        if is_bundled and self._started_at_seconds is None:
            self._started_at_seconds, self._environment = time.monotonic(), dict(environment)
        return Torchrun(command, environment)

    def warm_up(self) -> None:
        """Starts the fork server when it is time."""
        is_due = self._started_at_seconds is not None and self._warm_up_after_seconds >= 0 and self._server is None
        if is_due and time.monotonic() - (self._started_at_seconds or 0.0) >= self._warm_up_after_seconds:
            self._server = ForkServer(self._environment)
