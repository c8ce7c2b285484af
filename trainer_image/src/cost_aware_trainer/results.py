"""The outside of a rank: where it was started from, how it is told to stop, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cost_aware_trainer.contract import ENV_ATTEMPT, ENV_CONTROL_FILE, ENV_RESULT_FILE, Control, RunResult


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file so that no reader ever sees a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


@dataclass(frozen=True)
class Surroundings:
    """What the agent set for this rank; all empty for a rank started by hand."""

    attempt: int
    control_file: Path | None
    result_file: Path | None

    @classmethod
    def from_environment(cls) -> Surroundings:
        """Reads the contract's variables."""
        control, result = os.environ.get(ENV_CONTROL_FILE), os.environ.get(ENV_RESULT_FILE)
        attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
        return cls(attempt, Path(control) if control else None, Path(result) if result else None)

    def write_result(self, result: RunResult) -> None:
        """Leaves a result for the agent, if there is one to read it."""
        if self.result_file:
            write_atomically(self.result_file, result.to_json())


class StopSignal:
    """Whether this rank was asked to stop: by the agent's control file, or by SIGTERM."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._signalled = False

    def listen(self) -> None:
        """Takes SIGTERM as a wish to stop at the next step boundary; from the main thread only."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: types.FrameType | None) -> None:
        self._signalled = True

    def is_set(self) -> bool:
        """Looks at both; an unreadable control file raises, for the agent writes it whole."""
        if self._signalled or self._surroundings.control_file is None:
            return self._signalled
        control = Control.from_json(self._surroundings.control_file.read_text())
        return control.stop and control.attempt == self._surroundings.attempt


class StepsLog:
    """One JSON line for each step, appended; on ranks without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one line. The file is opened with the first: by then its folder is known to be writable."""
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", buffering=1)
        self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()
