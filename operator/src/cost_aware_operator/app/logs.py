"""The operator's log: one line for each thing that happened, as text for people or as JSON for a log store."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter


class LogFormat(StrEnum):
    """How a line is written."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """`time level namespace/job: message`; lines that are about no job name their logger instead."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(subject)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        namespace, job = getattr(record, "namespace", None), getattr(record, "job", None)
        record.subject = f"{namespace}/{job}" if namespace and job else record.name
        return super().format(record)


def set_up_logs(form: LogFormat, level: str, stream: TextIO = sys.stderr) -> None:
    """Sends every line of this process to `stream`, in one form. Lines of kopf below WARNING are left out."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_json_formatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _json_formatter() -> logging.Formatter:
    """Keys `time`, `level`, `logger`, `message`, then `namespace`, `job` and the line's own figures."""
    return JsonFormatter(
        "{asctime}{levelname}{name}{message}",
        style="{",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
    )
