"""Time from an order to the end of the first step under it, stage by stage, in a new process and in one that goes on."""

from __future__ import annotations

import time
from typing import Self

from cost_aware_trainer.contract import Launch, LaunchStage


class Stopwatch:
    """Stopwatch of stages that follow each other; the first began `ordered_seconds_ago`."""

    def __init__(self, ordered_seconds_ago: float = 0.0) -> None:
        self._since_seconds = time.monotonic() - ordered_seconds_ago
        self.stage_seconds: dict[LaunchStage, float] = {}

    @classmethod
    def of_start(cls, launch: Launch | None) -> Self:
        """Makes the stopwatch of a process whose imports are done. Its agent, if there is one, has measured the time before them."""
        watch = cls()
        if launch:
            watch.stage_seconds = {
                LaunchStage.DRAIN: launch.drain_seconds,
                LaunchStage.SAVE: launch.save_seconds,
                LaunchStage.RELAUNCH: max(0.0, time.monotonic() - launch.at_seconds),
            }
        return watch

    def end(self, stage: LaunchStage) -> None:
        """Ends a stage and begins the next."""
        now_seconds = time.monotonic()
        self.stage_seconds[stage] = now_seconds - self._since_seconds
        self._since_seconds = now_seconds
