"""Time, passed in wherever it matters."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """The present, as a date and as seconds that only grow."""

    def now(self) -> datetime:
        """The date and time, with its zone."""

    def monotonic(self) -> float:
        """Seconds since some moment."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()
