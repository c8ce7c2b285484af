"""Environment of a rank: the variables it was started with, the request to stop, and the files that it leaves."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cost_aware_trainer.contract import (
    ENV_ATTEMPT,
    ENV_CONTROL_FILE,
    ENV_LAUNCH,
    ENV_RECONFIGURED_FILE,
    ENV_RESULT_FILE,
    Control,
    Launch,
    Reconfiguration,
    Reconfigured,
    RunResult,
)

logger = logging.getLogger(__name__)

_LONGEST_LINE_BYTES = 2**20
"""More bytes than any line of the steps log has."""


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file so that no reader ever sees a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


@dataclass(frozen=True)
class RankEnvironment:
    """Variables that the agent set for this rank; empty for a rank started by hand."""

    attempt: int
    """Attempt that the rank was started for; 0 for a rank started by hand."""
    control_file: Path | None
    """File of the agent's `Control`."""
    result_file: Path | None
    """File for the rank's `RunResult`."""
    reconfigured_file: Path | None = None
    """File for the rank's `Reconfigured`."""
    launch: Launch | None = None
    """Times that the agent measured before the rank ran."""

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Reads the contract's variables."""
        names = (ENV_CONTROL_FILE, ENV_RESULT_FILE, ENV_RECONFIGURED_FILE)
        control, result, reconfigured = (Path(os.environ[name]) if os.environ.get(name) else None for name in names)
        launch = Launch.from_json(os.environ[ENV_LAUNCH]) if os.environ.get(ENV_LAUNCH) else None
        return cls(int(os.environ.get(ENV_ATTEMPT, "0")), control, result, reconfigured, launch)

    def write_result(self, result: RunResult) -> None:
        """Writes a result for the agent, if there is an agent."""
        if self.result_file:
            write_atomically(self.result_file, result.to_json())

    def write_reconfigured(self, reconfigured: Reconfigured) -> None:
        """Tells the agent, if there is one, that the ranks go on under a new plan. Only local rank 0 writes."""
        if self.reconfigured_file and os.environ.get("LOCAL_RANK", "0") == "0":
            write_atomically(self.reconfigured_file, reconfigured.to_json())


class StopSignal:
    """Request to stop, by the agent's control file or by SIGTERM."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._environment = environment
        self._signalled = False
        self._version = (0, 0)
        self._known: Control | None = None

    def listen(self) -> None:
        """Takes SIGTERM as a request to stop at the next step boundary. Call it from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: types.FrameType | None) -> None:
        self._signalled = True

    def is_set(self) -> bool:
        """Whether this rank was asked to stop. An unreadable control file raises, because the agent writes it whole."""
        control = self._control()
        # A run that was reconfigured has a later attempt than the one that it was started for.
        is_told = control is not None and control.stop and control.attempt >= self._environment.attempt
        return self._signalled or is_told

    def reconfiguration(self) -> Reconfiguration | None:
        """Newest other plan that the agent has written, if any."""
        control = self._control()
        return control.reconfigure if control else None

    def written_seconds_ago(self) -> float:
        """Seconds since the control file was written, by the clock of the node."""
        path = self._environment.control_file
        return max(0.0, time.time() - path.stat().st_mtime) if path else 0.0

    def _control(self) -> Control | None:
        """Content of the control file, read again only if the agent has replaced it."""
        path = self._environment.control_file
        if path is None:
            return None
        version = path.stat().st_mtime_ns, path.stat().st_ino
        if version != self._version:
            self._version, self._known = version, Control.from_json(path.read_text())
        return self._known


class StepsLog:
    """Log of one JSON line for each step. Without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._has_lost = False

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one line. The first call opens the file, when its folder is known to be writable."""
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _drop_half_line(self._path)
                self._file = self._path.open("a", buffering=1)
            self._file.write(json.dumps(entry) + "\n")
        except OSError as error:
            self._lose_line(error)

    def _lose_line(self, error: OSError) -> None:
        """Goes on without a line that could not be written, on a full volume for example: training is worth more than its log."""
        if not self._has_lost:
            logger.error(
                "STEPS LOG NOT WRITTEN: %s: %s; training goes on, and lines are missing", self._path, error.strerror
            )
        self._has_lost = True
        # opened again for the next line, which must not follow half of this one
        self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file:
            # what is still buffered cannot be written either where the volume is full
            with contextlib.suppress(OSError):
                file.close()


def _drop_half_line(path: Path) -> None:
    """Cuts off a last line that a killed process did not finish, because the next line would be appended to it."""
    if not path.is_file():
        return
    with path.open("r+b") as log:
        end = log.seek(0, os.SEEK_END)
        begin = log.seek(max(0, end - _LONGEST_LINE_BYTES))
        tail = log.read()
        if tail and not tail.endswith(b"\n"):
            log.truncate(begin + tail.rfind(b"\n") + 1)
