"""Pipeline schedules: seconds of a step, seconds of bubble in it, micro-batches whose activations are alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cost_aware_operator.costs.elementwise import Numbers, least, most, where


class PipelineSchedule(StrEnum):
    """Orders in which a stage takes forward and backward passes."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


@dataclass(frozen=True)
class StageSeconds:
    """One stage's pass of one micro-batch, in seconds."""

    forward: float
    """Seconds of forward."""
    backward: float
    """Seconds of backward."""
    weight: float = 0.0
    """Seconds of backward that only make weight gradients."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class PipelineSeconds:
    """One step of a pipeline, in seconds."""

    total: float
    """Seconds of the whole step."""
    bubble: float
    """Seconds in which the busiest stage waits."""

    @property
    def fraction(self) -> float:
        """Bubble as a share of the whole."""
        return self.bubble / self.total if self.total > 0 else 0.0


@dataclass(frozen=True)
class StageRuns:
    """Stages of three kinds: the first `highs` alike, then alike up to the last, then the last. Numbers or arrays."""

    stages: Numbers
    """Stages of the pipeline."""
    highs: Numbers
    """Stages at the front that hold one layer more."""
    high_seconds: Numbers
    """Seconds of one micro-batch's forward and backward on each of the first `highs` stages."""
    low_seconds: Numbers
    """Seconds of one micro-batch's forward and backward on each stage between those and the last."""
    last_seconds: Numbers
    """Seconds of one micro-batch's forward and backward on the last stage."""
    forward_share: Numbers
    """Forward's share of these seconds."""
    weight_share: Numbers = 0.0
    """Share of these seconds that only makes weight gradients."""

    def seconds(self, index: Numbers) -> Numbers:
        """Seconds of one micro-batch on the stage at an index."""
        return where(
            index >= self.stages - 1, self.last_seconds, where(index < self.highs, self.high_seconds, self.low_seconds)
        )

    def seconds_before(self, index: Numbers) -> Numbers:
        """Seconds of one micro-batch on all stages in front of an index."""
        return least(index, self.highs) * self.high_seconds + most(0, index - self.highs) * self.low_seconds

    @property
    def total_seconds(self) -> Numbers:
        """Seconds of one micro-batch on all stages."""
        return self.seconds_before(self.stages - 1) + self.last_seconds


class PipelineParallelCostAnalyzer:
    """Seconds and bubble of a pipeline, and its live micro-batches."""

    def step(
        self, stages: Sequence[StageSeconds], micro_batches: int, schedule: PipelineSchedule, interleave: int = 1
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
        divided = interleave if schedule is PipelineSchedule.INTERLEAVED else 1
        whole = sum((stage.total for stage in stages), 0.0)
        best = PipelineSeconds(0.0, 0.0)
        before = 0.0
        for index, stage in enumerate(stages):
            behind = whole - before - stage.total
            if schedule is PipelineSchedule.ZERO_BUBBLE:
                others = (other for i, other in enumerate(stages) if i != index)
                bubble = sum((max(0.0, other.total - 2 * other.weight) for other in others), 0.0)
            elif schedule is PipelineSchedule.GPIPE:
                bubble = before + behind
            else:
                wait = _wait(stage.forward, stage.backward, behind, len(stages) - 1 - index, micro_batches)
                bubble = (before + float(wait)) / divided
            total = micro_batches * stage.total + bubble
            if total > best.total:
                best = PipelineSeconds(total, bubble)
            before += stage.total
        return best

    def step_of_runs(
        self, runs: StageRuns, micro_batches: Numbers, schedule: PipelineSchedule, interleave: Numbers = 1
    ) -> tuple[Numbers, Numbers]:
        """Seconds of the step and of the bubble in it, as `step`, for stages of three kinds, without a loop over them.

        Inside a run of equal stages, and on either side of the stage behind which there are as many stages as micro-batches,
        the wait is convex in the stage's index, so the stage that is done last is at an end of such a stretch.
        """
        final = runs.stages - 1
        divided = interleave if schedule is PipelineSchedule.INTERLEAVED else 1
        free = most(0.0, 1 - 2 * runs.weight_share)
        best: Numbers = 0.0
        least_own: Numbers = 0.0
        ends: tuple[Numbers, ...] = (
            0,
            runs.highs - 1,
            runs.highs,
            final - micro_batches,
            final - micro_batches + 1,
            final - 1,
            final,
        )
        if isinstance(final, int):
            # for one layout, most of them are the same stage
            ends = tuple(sorted({max(0, min(int(at), final)) for at in ends}))
        for at in ends:
            index = most(0, least(at, final))
            own, before = runs.seconds(index), runs.seconds_before(index)
            behind = runs.total_seconds - before - own
            if schedule is PipelineSchedule.ZERO_BUBBLE:
                bubble = free * (before + behind)
            elif schedule is PipelineSchedule.GPIPE:
                bubble = before + behind
            else:
                forward = runs.forward_share * own
                bubble = (before + _wait(forward, own - forward, behind, final - index, micro_batches)) / divided
            total = micro_batches * own + bubble
            least_own = where(total > best, own, least_own)
            best = most(best, total)
        return best, best - micro_batches * least_own

    def live_micro_batches(
        self,
        stage: Numbers,
        stages: Numbers,
        micro_batches: Numbers,
        schedule: PipelineSchedule,
        interleave: Numbers = 1,
    ) -> Any:
        """Micro-batches whose activations a stage holds at its peak, in units of the whole stage's activations.

        GPipe holds all; 1F1B and ZB-H1 hold p - i at stage i; interleaving holds (1 + (p-1)/(p v)) p at the first stage
        (Korthikanti et al. 2022, section 4.2.3), p + (p - 1 - 2 i)/v in general: 2 (p - 1 - i) + (v - 1) p passes of 1/v of a
        stage before the first backward pass, and one more (Narayanan et al. 2021, as Megatron-LM and torch have it).
        """
        if schedule is PipelineSchedule.GPIPE:
            return micro_batches
        live = stages - stage
        if schedule is PipelineSchedule.INTERLEAVED:
            live = where(interleave > 1, stages + (stages - 1 - 2 * stage) / interleave, live)
        return least(live, micro_batches)


def _wait(
    forward: Numbers, backward: Numbers, behind: Numbers, stages_behind: Numbers, micro_batches: Numbers
) -> Numbers:
    """Seconds that a stage waits for the stages behind it under 1F1B, beyond those that other micro-batches fill."""
    few = most(0.0, behind - (micro_batches - 1) * least(forward, backward))
    many = most(0.0, behind - stages_behind * forward) + most(0.0, behind - stages_behind * backward)
    return where(micro_batches <= stages_behind, few, many)
