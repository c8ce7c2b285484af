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

        A stage works micro_batches times its pass and waits: for the first micro-batch to reach it and the last to return
        from it to the front (the stages before it), and for what it sent on to come back (the stages behind it). Under 1F1B
        the stage fills those two waits, at the start and at the end, with forwards and backwards of as many micro-batches as
        there are stages behind it. The stage that is done last decides. With equal stages the bubble is (p-1)(F+B), the
        fraction (p-1)/(m+p-1) of GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019); a simulation in the tests agrees.
        Interleaving divides it by the v chunks a stage (Narayanan et al. 2021, section 2.2). ZB-H1 fills it with weight
        gradients, leaving (p-1)(F+B-2W) with B the whole backward (Qi et al. 2023, table 1, whose B excludes W).

        Raises:
            ValueError: no stage, or a count below 1.
        """
        if not stages or micro_batches < 1 or interleave < 1:
            raise ValueError(
                "a pipeline needs 1 stage, 1 micro-batch and 1 chunk or more, "
                f"got {len(stages)}, {micro_batches}, {interleave}"
            )
        divided = interleave if schedule is Schedule.INTERLEAVED else 1
        whole = sum((stage.total for stage in stages), 0.0)
        best = PipelineSeconds(0.0, 0.0)
        before = 0.0
        for index, stage in enumerate(stages):
            behind = whole - before - stage.total
            if schedule is Schedule.ZERO_BUBBLE:
                others = (other for i, other in enumerate(stages) if i != index)
                bubble = sum((max(0.0, other.total - 2 * other.weight) for other in others), 0.0)
            elif schedule is Schedule.GPIPE:
                bubble = before + behind
            else:
                bubble = (before + _wait(stage, behind, len(stages) - 1 - index, micro_batches)) / divided
            total = micro_batches * stage.total + bubble
            if total > best.total:
                best = PipelineSeconds(total, bubble)
            before += stage.total
        return best

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


def _wait(stage: StageSeconds, behind: float, stages_behind: int, micro_batches: int) -> float:
    """What a stage waits for the stages behind it under 1F1B, beyond what it fills with other micro-batches."""
    if micro_batches <= stages_behind:
        return max(0.0, behind - (micro_batches - 1) * min(stage.forward, stage.backward))
    return max(0.0, behind - stages_behind * stage.forward) + max(0.0, behind - stages_behind * stage.backward)
