"""Straggler wait: the part of a rank's waits in collectives that is due to a slower rank and not to the transfer itself.

A collective ends when its last rank has come. A wait does not show how late that rank was. But every rank knows how long it
worked and tells the others in the step's vote. The difference to the busiest rank is the time that one waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_aware_trainer.contract import DegreesPlan, Phase
from cost_aware_trainer.distributed.layout import Coordinates
from cost_aware_trainer.telemetry.phases import Lap

_WORK = (Phase.COMPUTE, Phase.DATA, Phase.OPTIMIZER)
"""Phases in which a rank does not wait for others."""


def work_seconds(lap: Lap) -> float:
    """Seconds of a step, or of its part until now, in which a rank did not wait for others."""
    return sum(lap.phase_seconds[phase] for phase in _WORK)


class WorkMeter:
    """Meter of a rank's own work from one vote to the next: after the last vote, and in this step until its vote.

    Where a device works behind the host, a step's work is not known at its vote, and the last known step's is told instead.
    """

    def __init__(self) -> None:
        self._until_vote_seconds = self._after_vote_seconds = 0.0

    def seconds(self, until_vote: Lap | None) -> float:
        """Seconds of work since the last vote. Call it once a step, just before its vote.

        Args:
            until_vote: the step's time until its vote, from which waits were moved out; None where it is not known.
        """
        self._until_vote_seconds = work_seconds(until_vote) if until_vote else 0.0
        return self._until_vote_seconds + self._after_vote_seconds

    def end(self, lap: Lap) -> None:
        """Ends a step."""
        self._after_vote_seconds = work_seconds(lap) - self._until_vote_seconds

    def forget(self) -> None:
        """Forgets the work since the vote: it belongs to no step."""
        self._until_vote_seconds = self._after_vote_seconds = 0.0


def lateness_seconds(seconds_of: Sequence[float], place: Coordinates, degrees: DegreesPlan) -> tuple[float, float]:
    """Seconds by which the busiest tensor peer, and the busiest rank of the same pipeline stage, worked longer than this rank.

    `seconds_of` is each rank's work, by rank. Ranks of other stages are left out, because their work differs by design.
    """
    mine = seconds_of[place.rank(degrees)]
    peers = [Coordinates(place.data, tensor, place.pipeline) for tensor in range(degrees.tensor)]
    stage = [
        Coordinates(data, tensor, place.pipeline) for data in range(degrees.data) for tensor in range(degrees.tensor)
    ]
    busiest_peer, busiest = (max(seconds_of[other.rank(degrees)] for other in among) for among in (peers, stage))
    return busiest_peer - mine, busiest - mine


def book_straggler_wait(lap: Lap, seconds_of: Sequence[float], place: Coordinates, degrees: DegreesPlan) -> None:
    """Moves a step's waits for slower ranks to a phase of their own. `seconds_of` is each rank's work, from the step's vote.

    A rank waits for tensor peers within the layers, and for other replicas in the sum of gradients and in the vote.
    """
    peer_seconds, stage_seconds = lateness_seconds(seconds_of, place, degrees)
    moved_seconds = lap.move(Phase.TENSOR_COMMUNICATION, Phase.STRAGGLER_WAIT, peer_seconds)
    lap.move(Phase.COMMUNICATION, Phase.STRAGGLER_WAIT, stage_seconds - moved_seconds)
