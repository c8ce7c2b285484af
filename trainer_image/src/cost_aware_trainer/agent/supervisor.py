"""States of the agent: the attempt that it knows, the torchrun that runs it, and the end of the pod."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from cost_aware_trainer.agent.attempt_files import PULSES, write_attempt
from cost_aware_trainer.agent.launching import ForkedTorchrun, Launcher, torchrun_command
from cost_aware_trainer.agent.processes import Torchrun
from cost_aware_trainer.agent.settings import AgentSettings
from cost_aware_trainer.agent.stalls import StallWatch
from cost_aware_trainer.contract import (
    CONTRACT_VERSION,
    ENV_JOB,
    ENV_NAMESPACE,
    EXIT_INVALID,
    EXIT_STOPPED,
    AgentPhase,
    AgentStatus,
    ContractError,
    Control,
    Launch,
    Reconfiguration,
    Reconfigured,
    Release,
    RunOrder,
    RunResult,
    rendezvous_port,
)
from cost_aware_trainer.contract.rank_environment import write_atomically

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Answer:
    """Answer of the agent to a message."""

    status: HTTPStatus
    """Status of the HTTP answer."""
    text: str
    """Reason, in words."""


def can_follow_in_process(running: RunOrder, order: RunOrder) -> bool:
    """Whether an order asks running ranks for another layout of the same run, and for nothing else.

    An order with the very same plan asks for a restart: the running attempt has lost a peer, or is to begin again.
    """
    if running.plan is None or order.plan is None or running.plan == order.plan:
        return False
    old, new = (
        dataclasses.replace(
            o,
            version=0,
            job_uid="",
            attempt=0,
            plan=None,
            drain_seconds=0.0,
            entry=tuple(p.replace(f"attempt-{o.attempt}/", "") for p in o.entry),
        )
        for o in (running, order)
    )
    return old == new and running.plan.same_run_as(order.plan)


class Supervisor:
    """Supervisor of at most one torchrun, always for the newest attempt that it was told of.

    Messages arrive on HTTP threads and only change fields under the lock; `run`, on the main thread, does the rest.
    """

    def __init__(self, settings: AgentSettings, environment: Mapping[str, str] = os.environ) -> None:
        self._settings, self._environment = settings, environment
        self._lock = threading.Lock()
        self._status = AgentStatus(
            version=CONTRACT_VERSION, pod=settings.pod, index=settings.index, attempt=0, phase=AgentPhase.WAITING
        )
        self._order: RunOrder | None = None
        self._launched: RunOrder | None = None
        self._followed: RunOrder | None = None
        self._reconfigure_deadline_seconds: float | None = None
        self._drain_deadline_seconds: float | None = None
        self._ordered_at_seconds = 0.0
        self._is_new = False
        self._is_released = False
        self._is_terminating = False
        self._torchrun: Torchrun | ForkedTorchrun | None = None
        self._watch: StallWatch | None = None
        self._launcher = Launcher(settings.run_folder, environment, is_cold=settings.is_cold)
        self._stop_deadline_seconds: float | None = None
        self._completed_at_seconds = 0.0

    def status(self) -> AgentStatus:
        """Status of the newest attempt on this pod."""
        with self._lock:
            return self._status

    def terminate(self) -> None:
        """Asks for a graceful end. Safe in a signal handler, because it only sets a flag."""
        self._is_terminating = True

    def order(self, order: RunOrder) -> Answer:
        """Takes an order: 202 for a newer attempt, 200 for the known one, 409 for an older one.

        Raises:
            ContractError: the order is not for this agent.
        """
        self._check(order)
        with self._lock:
            known = self._status.attempt
            if order.attempt < known:
                return Answer(
                    HTTPStatus.CONFLICT, f"attempt {order.attempt} is older than {known}, which this agent knows"
                )
            if order.attempt == known:
                return Answer(HTTPStatus.OK, f"attempt {known} is known")
            if self._is_terminating:
                return Answer(HTTPStatus.SERVICE_UNAVAILABLE, "this pod is terminating")
            self._order, self._is_new, self._ordered_at_seconds = order, True, time.monotonic()
            self._set(attempt=order.attempt, phase=AgentPhase.RUNNING)
        return Answer(HTTPStatus.ACCEPTED, f"attempt {order.attempt} starts")

    def _check(self, order: RunOrder) -> None:
        if not 1 <= order.version <= CONTRACT_VERSION:
            raise ContractError(f"RunOrder.version: {order.version}, this agent speaks 1 to {CONTRACT_VERSION}")
        for name, variable in (("job", ENV_JOB), ("namespace", ENV_NAMESPACE)):
            mine = self._environment.get(variable, getattr(order, name))
            if getattr(order, name) != mine:
                raise ContractError(f"RunOrder.{name}: {getattr(order, name)!r}, this pod belongs to {mine!r}")
        if not 0 <= self._settings.index < order.nodes:
            raise ContractError(
                f"RunOrder.nodes: {order.nodes}, which leaves out this pod of index {self._settings.index}"
            )
        if order.attempt < 1 or order.ranks_per_node < 1 or not order.entry:
            raise ContractError(
                "RunOrder: attempt and ranks_per_node must be at least 1, and entry must name what to run"
            )

    def release(self, release: Release) -> Answer:
        """Lets the pod go: at once if the run is complete, otherwise as SIGTERM does. 409 for an older attempt."""
        with self._lock:
            if release.attempt < self._status.attempt:
                return Answer(HTTPStatus.CONFLICT, f"attempt {release.attempt} is older than {self._status.attempt}")
            if release.complete or self._status.phase is AgentPhase.COMPLETED:
                self._is_released = True
            else:
                self._is_terminating = True
        return Answer(HTTPStatus.ACCEPTED, "released")

    def run(self) -> int:
        """Carries out orders until the pod may end; returns the agent's exit code."""
        if self._settings.preloads and not self._settings.is_cold:
            self._launcher.preload()
        while True:
            if self._is_released:
                self._kill()
                return 0
            self._start_new_order()
            self._watch_reconfiguration()
            self._watch_drain()
            self._note_end()
            self._watch_ranks()
            exit_code = self._terminated() if self._is_terminating else self._lingered()
            if exit_code is not None:
                self._kill()
                return exit_code
            time.sleep(_POLL_SECONDS)

    def _start_new_order(self) -> None:
        with self._lock:
            order, is_new, self._is_new = self._order, self._is_new, False
        if order is None or not is_new:
            return
        self._stop_deadline_seconds = None
        is_running = self._torchrun is not None and self._torchrun.exit_code() is None
        if is_running and self._followed is not None and can_follow_in_process(self._followed, order):
            self._hand_over(order)
        elif is_running and order.drain_seconds > 0:
            self._drain(order)
        else:
            self._launch(order)

    def _drain(self, order: RunOrder) -> None:
        """Asks running ranks to save at a step boundary before the new attempt begins."""
        logger.info("attempt %d: waiting up to %.0f s for the ranks to save", order.attempt, order.drain_seconds)
        self._drain_deadline_seconds = time.monotonic() + order.drain_seconds
        self._write_control(stop=True)

    def _watch_drain(self) -> None:
        """Launches the attempt that waits for the ranks before it, when they have ended or their time is up."""
        if self._drain_deadline_seconds is None or self._order is None:
            return
        is_running = self._torchrun is not None and self._torchrun.exit_code() is None
        if self._is_terminating or (is_running and time.monotonic() < self._drain_deadline_seconds):
            return
        self._launch(self._order)

    def _launch(self, order: RunOrder) -> None:
        # The old attempt's peers are gone or will be, so its further work is lost already.
        self._kill()
        launch = self._facts_of_launch()
        self._launched = self._followed = order
        self._reconfigure_deadline_seconds = self._drain_deadline_seconds = None
        memory, folder = self._settings.memory_folder, self._attempt_folder(order)
        environment = write_attempt(order, folder, memory, launch, self._environment)
        own_port = rendezvous_port(order.attempt, self._settings.first_rendezvous_port)
        port = self._settings.rendezvous_port or own_port
        logger.info("attempt %d: starting %d ranks of %d nodes", order.attempt, order.ranks_per_node, order.nodes)
        command = torchrun_command(order, self._settings.index, port)
        self._torchrun = self._launcher.start(order, command, environment)
        node, limit_seconds = self._settings.node or self._settings.pod, self._settings.stall_seconds
        self._watch = StallWatch(folder / PULSES, node, limit_seconds, is_own_program=order.plan is None)

    def _facts_of_launch(self) -> Launch:
        """Measures the seconds from the order to now, and how many of them the ranks before took to save."""
        save_seconds = 0.0
        if self._drain_deadline_seconds is not None:
            # ranks that did not get there in time have left nothing
            with contextlib.suppress(OSError, ContractError):
                left = RunResult.from_json((self._running_folder() / "result.json").read_bytes())
                save_seconds = left.save_seconds
        now_seconds = time.monotonic()
        drain_seconds = max(0.0, now_seconds - self._ordered_at_seconds - save_seconds)
        return Launch(at_seconds=now_seconds, drain_seconds=drain_seconds, save_seconds=save_seconds)

    def _hand_over(self, order: RunOrder) -> None:
        """Tells running ranks to go on under another plan. If they do not, they are started again."""
        assert order.plan is not None  # noqa: S101  otherwise it could not follow
        logger.info("attempt %d: asking the ranks to go on under another plan", order.attempt)
        self._followed = order
        self._reconfigure_deadline_seconds = time.monotonic() + self._settings.reconfigure_seconds
        self._write_control(stop=False, reconfigure=Reconfiguration(attempt=order.attempt, plan=order.plan))

    def _write_control(self, *, stop: bool, reconfigure: Reconfiguration | None = None) -> None:
        """Replaces the control file of the running ranks, in the folder of the attempt that they were started for."""
        assert self._order is not None  # noqa: S101  the ranks run for one
        control = Control(attempt=self._order.attempt, stop=stop, reconfigure=reconfigure)
        write_atomically(self._running_folder() / "control.json", control.to_json())

    def _running_folder(self) -> Path:
        assert self._launched is not None  # noqa: S101  torchrun was started
        return self._attempt_folder(self._launched)

    def _watch_reconfiguration(self) -> None:
        """Notes that the ranks went on under another plan. Starts them again if that takes too long."""
        if self._reconfigure_deadline_seconds is None or self._order is None:
            return
        path = self._running_folder() / "reconfigured.json"
        told = Reconfigured.from_json(path.read_bytes()) if path.exists() else None
        if told is not None and told.attempt == self._order.attempt:
            self._reconfigure_deadline_seconds = None
            if self._watch:
                self._watch.begin_anew()
            message = f"went on in process after {told.total_seconds:.2f} s, with step {told.step}"
            logger.info("attempt %d: %s", told.attempt, message)
            with self._lock:
                if not self._is_new:
                    self._set(attempt=told.attempt, phase=AgentPhase.RUNNING, message=message)
        elif time.monotonic() > self._reconfigure_deadline_seconds:
            logger.error(
                "attempt %d: the ranks did not go on within %.0f s: starting them anew from the last checkpoint",
                self._order.attempt,
                self._settings.reconfigure_seconds,
            )
            self._launch(self._order)

    def _watch_ranks(self) -> None:
        """Ends an attempt that has a stalled rank, unless something with a deadline of its own is under way."""
        deadlines = self._reconfigure_deadline_seconds, self._drain_deadline_seconds, self._stop_deadline_seconds
        if self._torchrun is None or self._watch is None or self._order is None or any(deadlines):
            return
        stall = self._watch.look()
        if stall is None:
            return
        logger.error("attempt %d: stalled: %s; killing the ranks", self._order.attempt, stall)
        self._kill()
        with self._lock:
            if not self._is_new:
                self._set(attempt=self._order.attempt, phase=AgentPhase.FAILED, message=f"stalled: {stall}")

    def _attempt_folder(self, order: RunOrder) -> Path:
        return self._settings.run_folder / f"attempt-{order.attempt}"

    def _note_end(self) -> None:
        """Turns the end of torchrun into a phase."""
        if self._torchrun is None or self._order is None:
            return
        code = self._torchrun.exit_code()
        if code is None:
            return
        ended, self._torchrun = self._torchrun, None
        # A torchrun that was killed from outside leaves ranks behind.
        ended.kill(self._launcher.spared)
        phase, message, result = self._verdict(code, ended)
        is_reconfiguring, self._reconfigure_deadline_seconds = self._reconfigure_deadline_seconds is not None, None
        if is_reconfiguring and phase is AgentPhase.FAILED and not self._is_terminating:
            logger.error("the ranks failed to go on under another plan: %s; starting them anew", message)
            self._launch(self._order)
            return
        logger.info("attempt %d: %s %s", self._order.attempt, phase, message)
        with self._lock:
            if not self._is_new:
                self._set(attempt=self._order.attempt, phase=phase, message=message, result=result)
        if phase is AgentPhase.COMPLETED:
            self._completed_at_seconds = time.monotonic()

    def _verdict(self, code: int, ended: Torchrun | ForkedTorchrun) -> tuple[AgentPhase, str, RunResult | None]:
        """Judges torchrun's exit code and the ranks' result, if they left one: phase, message and result."""
        assert self._order is not None  # noqa: S101  torchrun ran for one
        path = self._running_folder() / "result.json"
        try:
            result = RunResult.from_json(path.read_bytes()) if path.exists() else None
        except (ContractError, OSError) as error:
            return AgentPhase.FAILED, f"{path.name}: {error}", None
        if code == EXIT_INVALID or (result and result.outcome is AgentPhase.INVALID):
            return AgentPhase.INVALID, result.message if result else ended.last_error(), result
        if code == 0 and (result is None or result.outcome in (AgentPhase.COMPLETED, AgentPhase.CHECKPOINTED)):
            return (result.outcome, result.message, result) if result else (AgentPhase.COMPLETED, "", None)
        if result and result.outcome is AgentPhase.FAILED:
            return AgentPhase.FAILED, result.message, result
        return AgentPhase.FAILED, ended.last_error() or f"torchrun exited with {code}", None

    def _terminated(self) -> int | None:
        """Lets the ranks checkpoint after SIGTERM until the deadline. Returns the exit code once there is nothing to wait for."""
        if self._torchrun is not None and self._order is not None:
            now_seconds = time.monotonic()
            if self._stop_deadline_seconds is None:
                self._stop_deadline_seconds = now_seconds + self._settings.grace_seconds
                self._write_control(stop=True)
                if self._order.plan is None:
                    # a user's own program knows no control file, but may know what SIGTERM means
                    self._torchrun.terminate()
                logger.info("asked the ranks to checkpoint within %.0f s", self._settings.grace_seconds)
            if now_seconds < self._stop_deadline_seconds:
                return None
            logger.error("the ranks did not stop within %.0f s: killing them", self._settings.grace_seconds)
        return 0 if self.status().phase is AgentPhase.COMPLETED else EXIT_STOPPED

    def _lingered(self) -> int | None:
        """Returns 0 once a completed run was not released for so long that nobody will."""
        if self.status().phase is not AgentPhase.COMPLETED:
            return None
        waited_seconds = time.monotonic() - self._completed_at_seconds
        return 0 if waited_seconds > self._settings.linger_seconds else None

    def _kill(self) -> None:
        if self._torchrun is not None:
            self._torchrun.kill(self._launcher.spared)
            self._torchrun = None

    def _set(self, *, attempt: int, phase: AgentPhase, message: str = "", result: RunResult | None = None) -> None:
        """Replaces the status; call it under the lock."""
        self._status = AgentStatus(
            version=CONTRACT_VERSION,
            pod=self._settings.pod,
            index=self._settings.index,
            attempt=attempt,
            phase=phase,
            message=message,
            result=result,
        )
