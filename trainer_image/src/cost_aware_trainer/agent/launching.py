"""Start of torchrun: a fork of a process that has imported PyTorch or, for a user's own program, a new process."""

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

from cost_aware_trainer.agent.attempt_files import DEFAULT_ENVIRONMENT
from cost_aware_trainer.agent.processes import Tail, Torchrun, kill_descendants, reap_adopted
from cost_aware_trainer.contract import ENDED_MARK, ENV_PULSE_FOLDER, RunOrder

logger = logging.getLogger(__name__)

_RENDEZVOUS_TIMEOUT_SECONDS = 180
_OWN_PROGRAM_TIMEOUT_SECONDS = 40
"""Seconds that torchrun gives a user's own program to end after SIGTERM; less than the agent's own grace."""
_SHUTDOWN_TIMEOUT_SECONDS = 5
"""Seconds that torchrun lets the peers of a failed rank live. They can do nothing useful in that time."""
_NOTE_SECONDS = 3.0
"""Seconds in which the fork server has to report a death, before it is asked for another launch."""
SERVER_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables that only the fork server needs. Its forks could not use a GPU if it looked for one otherwise than through NVML."""
_TORCHRUN = ("-m", "torch.distributed.run")
_BUNDLED = ("-m", "cost_aware_trainer")


def torchrun_command(order: RunOrder, index: int, port: int) -> list[str]:
    """Builds the command that runs an order on the node of this index.

    It uses the static rendezvous, which alone makes the node's rank the pod's index (c10d numbers nodes by arrival and
    address). So rank 0 lives in pod 0, where its metrics and results are looked for.
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
    """Process that imports PyTorch once and is forked for each launch; see `cost_aware_trainer.training.forkserver`.

    It takes launches at once: one that comes during the import waits for its end.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.is_ready = False
        self.codes: dict[int, int] = {}
        self._launches = 0
        command = [sys.executable, "-m", "cost_aware_trainer.training.forkserver"]
        reading, writing = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603  the agent's own program
            [*command, str(writing), str(os.getpid())],
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
            self.is_ready = True
            logger.info("the fork server is ready after %.1f s: no launch need import PyTorch", answer["seconds"])
        else:
            self.codes[answer["launch"]] = answer["code"]

    @property
    def pid(self) -> int:
        """Process id of the server, which outlives launches."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the server still takes launches."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the server, and with it every launch that it has not begun."""
        self._process.kill()
        self._process.wait()

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> ForkedTorchrun:
        """Starts the bundled trainer by the command of `torchrun_command`.

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
    """Running torchrun that the fork server has started, with the methods of `processes.Torchrun`.

    If the server dies before any rank has begun, a new process takes its place, and nothing but seconds is lost.
    """

    def __init__(self, server: ForkServer, launch: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._server, self._launch = server, launch
        self._command, self._environment = command, environment
        self._replacement: Torchrun | None = None

    def exit_code(self) -> int | None:
        """Exit code, or None while torchrun runs. A server that is lost while its ranks run counts as a failed torchrun."""
        if self._replacement:
            return self._replacement.exit_code()
        code = self._server_code()
        if code is None and not self._server.is_alive:
            return self._replace()
        return code

    def _server_code(self) -> int | None:
        return self._server.codes.get(self._launch)

    def _replace(self) -> int | None:
        # A launch that the server has begun goes on without it, and must not meet its own replacement.
        kill_descendants()
        if any(Path(self._environment[ENV_PULSE_FOLDER]).iterdir()):
            return 1
        logger.error("the fork server died before any rank had begun: starting torchrun as a new process")
        self._replacement = Torchrun(self._command, self._environment)
        return None

    def terminate(self) -> None:
        """Does nothing: only a user's own program is told to end this way, and that is never forked."""

    def kill(self, spared: int | None = None) -> None:
        """Kills every descendant of this agent except the fork server; raises what `processes.Torchrun.kill` raises.

        A server that still imports, or does not report the death, would begin the launch later: it is killed as well.
        """
        if self._replacement:
            self._replacement.kill(spared)
            return
        kill_descendants(spared)
        deadline_seconds = time.monotonic() + (_NOTE_SECONDS if self._server.is_ready else 0.0)
        while self._server.is_alive and self._server_code() is None:
            if time.monotonic() >= deadline_seconds:
                self._server.kill()
                kill_descendants()
            time.sleep(0.01)
        # by now torchrun is gone for good, and its ranks are this process's to reap
        reap_adopted(self._server.pid)

    def last_error(self) -> str:
        """See `processes.Tail.last_error`. Exit codes and error text come by two ways, so this waits for the text first."""
        if self._replacement:
            return self._replacement.last_error()
        self._server.tail.settle(str(self._launch))
        return self._server.tail.last_error() or "the fork server died under its ranks"


class Launcher:
    """Starts attempts: the bundled trainer from a fork server, other programs as new processes.

    Args:
        folder: a writable folder.
        environment: the fork server's environment.
        is_cold: whether every launch is a new process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], *, is_cold: bool) -> None:
        self._folder, self._environment, self._is_cold = folder, environment, is_cold
        self._server: ForkServer | None = None

    @property
    def spared(self) -> int | None:
        """Process that killing an attempt leaves alone."""
        return self._server.pid if self._server and self._server.is_alive else None

    def preload(self) -> None:
        """Begins to import PyTorch before there is an order."""
        try:
            self._living_server()
        except OSError as error:
            logger.error("there is no fork server (%s): every start imports PyTorch", error)

    def _living_server(self) -> ForkServer:
        if self._server is None or not self._server.is_alive:
            temporary = self._folder / "fork-server"
            temporary.mkdir(parents=True, exist_ok=True)
            environment = {**DEFAULT_ENVIRONMENT, **self._environment, **SERVER_ENVIRONMENT, "TMPDIR": str(temporary)}
            self._server = ForkServer(environment)
        return self._server

    def start(
        self, order: RunOrder, command: Sequence[str], environment: Mapping[str, str]
    ) -> Torchrun | ForkedTorchrun:
        """Starts torchrun for an attempt."""
        if order.plan is None:
            logger.info(
                "attempt %d runs a program of your own: unless it uses cost_aware_trainer.TrainingSession it has no step "
                "metrics, no exactly-once samples and no checkpoints that the operator knows of",
                order.attempt,
            )
        if order.plan is not None and order.entry[:2] == _BUNDLED and not self._is_cold:
            try:
                return self._living_server().launch(command, environment)
            except OSError as error:
                logger.error("there is no fork server (%s): starting torchrun as a new process", error)
        return Torchrun(command, environment)
