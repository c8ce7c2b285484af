"""Pipeline schedules: how long the pipeline takes, how much of it is bubble, how many micro-batches are alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """Orders in which a stage takes forward and backward passes."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


@dataclass(frozen=True)
class StageSeconds:
    """One stage's forward and backward of one micro-batch; `weight` is the part of backward that only makes weight gradients."""

    forward: float
    backward: float
    weight: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class PipelineSeconds:
    """A step's pipeline: the whole, and the part in which the busiest stage waits."""

    total: float
    bubble: float

    @property
    def fraction(self) -> float:
        """Bubble as a share of the whole."""
        return self.bubble / self.total if self.total > 0 else 0.0


class PipelineParallelCostAnalyzer:
    """Bubble, live micro-batches."""

    def step(
        self, stages: Sequence[StageSeconds], micro_batches: int, schedule: Schedule, interleave: int = 1
    ) -> PipelineSeconds:
        """Seconds of a step through `stages`.

        The busiest stage works micro_batches times its pass; before its first and after its last, one micro-batch runs through
        every other stage: the sum of the others. With equal stages that is (p-1)(F+B), the fraction (p-1)/(m+p-1) of GPipe
        (Huang et al. 2019) and 1F1B (Narayanan et al. 2019). Interleaving divides it by the v chunks a stage (Narayanan et al.
        2021, section 2.2). ZB-H1 fills it with weight gradients, leaving (p-1)(F+B-2W) with B the whole backward (Qi et al.
        2023, table 1, whose B excludes W).

        Raises:
            ValueError: no stage, or a count below 1.
        """
        if not stages or micro_batches < 1 or interleave < 1:
            raise ValueError(
                "a pipeline needs 1 stage, 1 micro-batch and 1 chunk or more, "
                f"got {len(stages)}, {micro_batches}, {interleave}"
            )
        busiest = max(range(len(stages)), key=lambda i: stages[i].total)
        others = [stage for i, stage in enumerate(stages) if i != busiest]
        bubble = sum(stage.total for stage in others)
        if schedule is Schedule.INTERLEAVED:
            bubble /= interleave
        elif schedule is Schedule.ZERO_BUBBLE:
            bubble = sum(max(0.0, stage.total - 2 * stage.weight) for stage in others)
        return PipelineSeconds(micro_batches * stages[busiest].total + bubble, bubble)

    def live_micro_batches(
        self, stage: int, stages: int, micro_batches: int, schedule: Schedule, interleave: int = 1
    ) -> float:
        """Micro-batches whose activations a stage holds at its peak, in units of the whole stage's activations.

        GPipe holds all; 1F1B and ZB-H1 hold p - i at stage i; interleaving holds (1 + (p-1)/(p v)) p at the first stage
        (Korthikanti et al. 2022, section 4.2.3), p - i + (p-1)/v in general.
        """
        if schedule is Schedule.GPIPE:
            return float(micro_batches)
        live = float(stages - stage)
        if schedule is Schedule.INTERLEAVED and interleave > 1:
            live += (stages - 1) / interleave - stage / interleave
        return min(live, float(micro_batches))
