"""Straggler wait: the part of a rank's waits in collectives that is due to a slower rank and not to the transfer itself.

A collective ends when its last rank has come. A wait does not show how late that rank was. But every rank knows how long it
worked and tells the others in the step's vote. The difference to the busiest rank is the time that one waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_aware_trainer.contract import DegreesPlan, Phase
from cost_aware_trainer.distributed.layout import Coordinates
from cost_aware_trainer.telemetry.phases import Lap, PhaseClock

_WORK = (Phase.COMPUTE, Phase.DATA, Phase.OPTIMIZER)
"""Phases in which a rank does not wait for others."""


class WorkMeter:
    """Meter of a rank's own work from one vote to the next: after the last vote, and in this step until its vote."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._until_vote_seconds = self._after_vote_seconds = 0.0

    def seconds(self) -> float:
        """Seconds of work since the last vote. Call it once a step, just before its vote, after waits were moved out of it."""
        self._until_vote_seconds = sum(self._clock.booked_seconds(phase) for phase in _WORK)
        return self._until_vote_seconds + self._after_vote_seconds

    def end(self, lap: Lap | None) -> None:
        """Ends a step. With None it forgets the work since the vote."""
        lap_seconds = sum(lap.phase_seconds[phase] for phase in _WORK) if lap else self._until_vote_seconds
        self._after_vote_seconds = lap_seconds - self._until_vote_seconds


def lateness_seconds(work_seconds: Sequence[float], place: Coordinates, degrees: DegreesPlan) -> tuple[float, float]:
    """Seconds by which the busiest tensor peer, and the busiest rank of the same pipeline stage, worked longer than this rank.

    `work_seconds` is by rank. Ranks of other stages are left out, because their work differs by design.
    """
    mine = work_seconds[place.rank(degrees)]
    peers = [Coordinates(place.data, tensor, place.pipeline) for tensor in range(degrees.tensor)]
    stage = [
        Coordinates(data, tensor, place.pipeline) for data in range(degrees.data) for tensor in range(degrees.tensor)
    ]
    busiest_peer, busiest = (max(work_seconds[other.rank(degrees)] for other in among) for among in (peers, stage))
    return busiest_peer - mine, busiest - mine


def book_straggler_wait(
    clock: PhaseClock, work_seconds: Sequence[float], place: Coordinates, degrees: DegreesPlan
) -> None:
    """Moves this lap's waits for slower ranks to a phase of their own. Call it after the step's vote.

    A rank waits for tensor peers within the layers, and for other replicas in the sum of gradients and in the vote.
    """
    peer_seconds, stage_seconds = lateness_seconds(work_seconds, place, degrees)
    before_seconds = clock.booked_seconds(Phase.STRAGGLER_WAIT)
    clock.move(Phase.TENSOR_COMMUNICATION, Phase.STRAGGLER_WAIT, peer_seconds)
    moved_seconds = clock.booked_seconds(Phase.STRAGGLER_WAIT) - before_seconds
    clock.move(Phase.COMMUNICATION, Phase.STRAGGLER_WAIT, stage_seconds - moved_seconds)
