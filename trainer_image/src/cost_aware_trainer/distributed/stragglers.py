"""What a rank waits in collectives only because another rank was slower, told apart from what the sending itself takes.

A collective ends when its last rank has come. How late that one came cannot be seen from a wait; but every rank knows how long
it worked, tells the others in the step's vote, and the difference between the busiest and oneself is what one waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_aware_trainer.contract import DegreesPlan, Phase
from cost_aware_trainer.distributed.layout import Coordinates
from cost_aware_trainer.telemetry.phases import Lap, PhaseClock

_WORK = (Phase.COMPUTE, Phase.DATA, Phase.OPTIMIZER)
"""Phases in which a rank does not wait for another one."""


class WorkMeter:
    """Counts a rank's own work from one vote to the next: this step's until its vote, and what came after the last one."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._until_vote_seconds = self._after_vote_seconds = 0.0

    def seconds(self) -> float:
        """The work since the last vote; to be called once a step, just before its vote, when waits have been moved out of it."""
        self._until_vote_seconds = sum(self._clock.booked(phase) for phase in _WORK)
        return self._until_vote_seconds + self._after_vote_seconds

    def end(self, lap: Lap | None) -> None:
        """Ends a step; with None it forgets what happened since the vote."""
        lap_seconds = sum(lap.phase_seconds[phase] for phase in _WORK) if lap else self._until_vote_seconds
        self._after_vote_seconds = lap_seconds - self._until_vote_seconds


def lateness(work_seconds: Sequence[float], place: Coordinates, degrees: DegreesPlan) -> tuple[float, float]:
    """By how many seconds the busiest tensor peer, and the busiest rank of the same pipeline stage, outlast this rank.

    `work_seconds` is by rank. Ranks of other stages are left out: what they have to do differs by design.
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
    """Moves what this rank has waited for slower ones in this lap to its own phase; after the step's vote.

    For tensor peers one waits within the layers, for other replicas where gradients are summed and in the vote.
    """
    peer_seconds, stage_seconds = lateness(work_seconds, place, degrees)
    before_seconds = clock.booked(Phase.STRAGGLER_WAIT)
    clock.move(Phase.TENSOR_COMMUNICATION, Phase.STRAGGLER_WAIT, peer_seconds)
    moved_seconds = clock.booked(Phase.STRAGGLER_WAIT) - before_seconds
    clock.move(Phase.COMMUNICATION, Phase.STRAGGLER_WAIT, stage_seconds - moved_seconds)
