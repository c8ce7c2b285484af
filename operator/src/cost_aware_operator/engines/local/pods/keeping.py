"""A pod's process as the kubelet sees it, whether this kubelet started it or one before. Calls take milliseconds, and may block."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cost_aware_operator.engines.local.pods.launch import (
    EXIT_UNKNOWN,
    REASON_UNKNOWN,
    PodFolder,
    PodLaunch,
    ProcessEnd,
)
from cost_aware_operator.engines.local.pods.proc import kill_pod, pids_of_pod, signal_process
from cost_aware_trainer.contract import ContractError, PodEnd

KEEPER = (sys.executable, "-P", "-m", "cost_aware_operator.engines.local.pods.keeper")


class PodProcess:
    """One pod's process."""

    def __init__(self, folder: PodFolder, launch: PodLaunch) -> None:
        self.folder, self.launch = folder, launch
        self._keeper: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._grace_seconds: float | None = None
        self._lost_deadline_seconds: float | None = None

    @classmethod
    def started(cls, folder: PodFolder, launch: PodLaunch) -> PodProcess:
        """Starts a pod that was never started. What is started with is written down first.

        Raises:
            OSError: no process could be started.
        """
        folder.write_launch(launch)
        made = cls(folder, launch)
        reading, writing = os.pipe()
        try:
            made._keeper = subprocess.Popen(  # noqa: S603  this package's own program
                [*KEEPER, str(folder.path), str(reading)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[reading],
                start_new_session=True,
            )
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        made._lifeline = writing
        return made

    def ask_to_end(self, grace_seconds: float) -> None:
        """Has the pod end within so many seconds. A pod of an earlier kubelet ends already: that one's lifeline has closed."""
        if self._grace_seconds is not None and self._grace_seconds <= grace_seconds:
            return
        self._grace_seconds = grace_seconds
        if self._lifeline is not None:
            # a keeper that is gone hears nothing, and `look` sees to what it left
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, f"end {grace_seconds}\n".encode())

    def look(self) -> ProcessEnd | None:
        """How the pod ended; None while any process of it is left."""
        if self._keeper is not None and self._keeper.poll() is None:
            return None
        end = self.folder.end()
        if end is None:
            # a keeper that begins only now, as its kubelet was killed in between, finds the lock taken or an end
            with self.folder.locked() as is_mine:
                end = self.folder.end() or (self._lost() if is_mine else None)
        if end is not None:
            self.let_go()
        return end

    def let_go(self) -> None:
        """Closes the lifeline: a pod that still runs ends within its grace."""
        descriptor, self._lifeline = self._lifeline, None
        if descriptor is not None:
            os.close(descriptor)

    def _lost(self) -> ProcessEnd | None:
        """Ends what a keeper left that did not write down an end; what agents have left of their grace is theirs."""
        record, path = self.folder.keeper(), self.folder.path
        if pids_of_pod(path):
            now_seconds = time.monotonic()
            if self._lost_deadline_seconds is None:
                self._lost_deadline_seconds = now_seconds + self.launch.grace_seconds
                if record is not None:
                    signal_process(record.agent, signal.SIGTERM)
            is_over = now_seconds >= self._lost_deadline_seconds
            # without an agent nobody is left who could save
            if record is not None and record.agent.is_alive and not is_over:
                return None
            if kill_pod(path):
                return None
        shutil.rmtree(self.launch.temporary_folder, ignore_errors=True)
        end = ProcessEnd(
            EXIT_UNKNOWN,
            record.started_at if record is not None else None,
            self._word() or self.folder.last_seen_seconds(),
            REASON_UNKNOWN,
            "The process that kept the pod is gone, and with it the pod's exit code",
        )
        self.folder.write_end(end)
        return end

    def _word(self) -> float | None:
        """The end that the pod's agent left word of; None where it left none."""
        if not self.launch.ends_folder:
            return None
        try:
            file = Path(self.launch.ends_folder) / f"{self.launch.uid}.json"
            return PodEnd.from_json(file.read_bytes()).ended_at
        except (OSError, ContractError):
            return None
