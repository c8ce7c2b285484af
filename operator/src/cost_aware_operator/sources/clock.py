"""Time, passed in wherever it matters."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

SLEW_SECONDS = 2.0
"""How far the machine's clock may move against its monotonic one between two looks and still be followed: time services do that."""
AGREED_SECONDS = 3.0
"""How near the API server's time and the machine's must be to agree: the server tells whole seconds."""
TOLERATED_SECONDS = 30.0
"""How far a clock may be off before it is told."""


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


class SteadyClock:
    """The machine's clock, but a jump of it is followed only where the API server's time says the same.

    Pods are paid by the second: a day's jump would book a day of each. Of three clocks (the machine's date, its monotonic seconds
    since it was last right, and the API server's), two that agree are right. The first time that the server tells counts by itself, as
    nothing is known of the machine's before.
    """

    def __init__(self, system: Clock) -> None:
        self._system = system
        self._anchor, self._anchored_at = system.now(), system.monotonic()
        self._is_confirmed = False
        self._server_off_seconds = 0.0

    def now(self) -> datetime:
        """UTC, without jumps."""
        wall, steady = self._system.now(), self._steady()
        if abs((wall - steady).total_seconds()) > SLEW_SECONDS:
            return steady
        self._set(wall)
        return wall

    def monotonic(self) -> float:
        """Seconds since the machine started."""
        return self._system.monotonic()

    def heard(self, server: datetime) -> None:
        """The API server has told its time."""
        wall, steady = self._system.now(), self._steady()
        self._server_off_seconds = off = (server - steady).total_seconds()
        if abs((server - wall).total_seconds()) <= AGREED_SECONDS:
            self._set(wall)
            self._is_confirmed, self._server_off_seconds = True, 0.0
        elif abs(off) <= TOLERATED_SECONDS:
            self._is_confirmed = True
        elif not self._is_confirmed:
            self._set(server)
            self._is_confirmed, self._server_off_seconds = True, 0.0

    def problem(self) -> str:
        """What is wrong with a clock, for a person; empty while nothing is."""
        off = (self._system.now() - self._steady()).total_seconds()
        if abs(off) > TOLERATED_SECONDS:
            return (
                f"the operator's clock is {off:+,.0f} s off what its monotonic clock and the API server say, and is not followed: "
                "check the time service of its node"
            )
        if abs(self._server_off_seconds) > TOLERATED_SECONDS:
            return (
                f"the API server's clock is {self._server_off_seconds:+,.0f} s off the operator's, and is not followed: check the "
                "time service of the control plane's nodes"
            )
        return ""

    def _steady(self) -> datetime:
        return self._anchor + timedelta(seconds=self._system.monotonic() - self._anchored_at)

    def _set(self, now: datetime) -> None:
        self._anchor, self._anchored_at = now, self._system.monotonic()
