"""Steps that have been started. A device may still work on them while the host starts the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cost_aware_trainer.contract import LaunchStage
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.votes import Agreed, Ballot, vote_bytes
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.telemetry.metrics import peak_memory_bytes
from cost_aware_trainer.telemetry.phases import Lap, LapMarks
from cost_aware_trainer.telemetry.traffic import Axis, Waits
from cost_aware_trainer.training.step_report import StepReport


@dataclass
class StepUnderWay:
    """Step that the host has started, and what becomes known of it, in this order."""

    number: int
    """Number of the step, from 1."""
    rate: float
    """Learning rate with which it is applied."""
    ballot: Ballot
    """Vote that was cast in it."""
    waits: Waits
    """Waits of its passes."""
    agreed: Agreed | None = None
    """What the ranks agreed on; None until the vote is read."""
    progress: RunProgress | None = None
    """Progress of the run after it; None until the vote is read."""
    heldout_loss: float | None = None
    """Held-out loss after it, if it was evaluated."""
    sent_bytes: Mapping[Axis, float] = field(default_factory=dict)
    """Bytes that this rank sent in it."""
    marks: LapMarks | None = None
    """Marks of its phases; None until the host has ended it."""

    def report(
        self,
        ranks: Ranks,
        lap: Lap,
        *,
        attempt: int,
        global_samples: int,
        samples: float,
        stage_seconds: Mapping[LaunchStage, float],
        tokens: float | None = None,
        model_flops: float | None = None,
    ) -> StepReport:
        """Makes the report of the step, whose vote is read; the arguments are the report's."""
        assert self.agreed is not None  # noqa: S101  see above
        assert self.progress is not None  # noqa: S101  see above
        return StepReport(
            attempt=attempt,
            progress=self.progress,
            lap=lap,
            global_samples=global_samples,
            samples=samples,
            tokens=tokens,
            model_flops=model_flops,
            gradient_norm=self.agreed.gradient_norm,
            learning_rate=self.rate,
            heldout_loss=self.heldout_loss,
            memory_bytes=peak_memory_bytes(ranks.device),
            sent_bytes={**self.sent_bytes, Axis.DATA: self.sent_bytes[Axis.DATA] + vote_bytes(ranks)},
            overlapped_seconds=self.waits.overlap.seconds(),
            stage_seconds={**stage_seconds, LaunchStage.FIRST_STEP: lap.step_seconds} if stage_seconds else {},
        )


def take_ended(steps: list[StepUnderWay], ranks: Ranks) -> Iterator[tuple[StepUnderWay, Agreed, Lap]]:
    """Takes out, in order, the steps that have ended on the host and whose votes are read, and waits for their ends on the device."""
    while steps and (agreed := steps[0].agreed) and (marks := steps[0].marks):
        with ranks.heartbeat.waiting():
            marks.wait()
        yield steps.pop(0), agreed, marks.lap()
