"""Pipelines against a simulation of their schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.models.pipeline import (
    PipelineParallelCostAnalyzer,
    PipelineSchedule,
    StageRuns,
    StageSeconds,
)

ANALYZER = PipelineParallelCostAnalyzer()


def orders(stages: int, micro_batches: int, schedule: PipelineSchedule) -> list[list[tuple[str, int]]]:
    """What each stage computes, in order."""
    found = []
    for stage in range(stages):
        ahead = micro_batches if schedule is PipelineSchedule.GPIPE else min(stages - stage, micro_batches)
        order = [("F", i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(("B", i))
            if ahead + i < micro_batches:
                order.append(("F", ahead + i))
        found.append(order)
    return found


def simulate(seconds: list[StageSeconds], micro_batches: int, schedule: PipelineSchedule) -> tuple[float, list[int]]:
    """End of the step and the most micro-batches alive on each stage, by running every stage's order under its dependencies."""
    stages = len(seconds)
    done: dict[tuple[str, int, int], float] = {}
    queues = orders(stages, micro_batches, schedule)
    clock, alive, most = [0.0] * stages, [0] * stages, [0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, i = queue[0]
                before = ("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i)
                ready = 0.0 if not 0 <= before[1] < stages else done.get(before)
                if ready is None:
                    break
                work = seconds[stage].forward if kind == "F" else seconds[stage].backward
                clock[stage] = max(clock[stage], ready) + work
                done[kind, stage, i] = clock[stage]
                alive[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], alive[stage])
                queue.pop(0)
    return max(clock), most


@pytest.mark.parametrize("schedule", [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B])
@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 24))
def test_equal_stages_take_what_the_simulated_schedule_takes(
    schedule: PipelineSchedule, stages: int, micro_batches: int
) -> None:
    each = [StageSeconds(1.0, 2.0)] * stages
    end, alive = simulate(each, micro_batches, schedule)
    found = ANALYZER.step(each, micro_batches, schedule)
    assert found.total == pytest.approx(end)
    assert found.fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    for stage in range(stages):
        assert ANALYZER.live_micro_batches(stage, stages, micro_batches, schedule) == alive[stage]


@given(work=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), micro_batches=st.integers(1, 24))
def test_uneven_stages_come_close_to_the_simulated_schedule_from_below(work: list[float], micro_batches: int) -> None:
    each = [StageSeconds(w, 2 * w) for w in work]
    end, _ = simulate(each, micro_batches, PipelineSchedule.ONE_F_ONE_B)
    found = ANALYZER.step(each, micro_batches, PipelineSchedule.ONE_F_ONE_B).total
    assert found <= end * (1 + 1e-9)
    assert end <= 1.25 * found


def test_interleaving_divides_the_bubble_and_costs_memory() -> None:
    each = [StageSeconds(1.0, 2.0)] * 8
    plain = ANALYZER.step(each, 16, PipelineSchedule.ONE_F_ONE_B)
    interleaved = ANALYZER.step(each, 16, PipelineSchedule.INTERLEAVED, 4)
    assert interleaved.bubble == pytest.approx(plain.bubble / 4)
    # Korthikanti et al. 2022, section 4.2.3: (1 + (p-1)/(p v)) L layers on the first stage
    assert ANALYZER.live_micro_batches(0, 8, 64, PipelineSchedule.INTERLEAVED, 4) == pytest.approx(
        8 * (1 + 7 / (8 * 4))
    )


def test_zero_bubble_fills_the_bubble_with_weight_gradients() -> None:
    each = [StageSeconds(1.0, 2.0, weight=1.0)] * 4
    assert ANALYZER.step(each, 8, PipelineSchedule.ZERO_BUBBLE).bubble == pytest.approx(3 * (1.0 + 1.0 - 1.0))


@pytest.mark.parametrize(("stages", "micro_batches", "interleave"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_pipeline_is_refused(stages: int, micro_batches: int, interleave: int) -> None:
    with pytest.raises(ValueError, match="a pipeline needs"):
        ANALYZER.step([StageSeconds(1, 1)] * stages, micro_batches, PipelineSchedule.GPIPE, interleave)


@given(
    counts=st.tuples(st.integers(1, 9), st.integers(0, 8)),
    high=st.integers(1, 4),
    head=st.floats(0, 5),
    micro_batches=st.integers(1, 30),
    schedule=st.sampled_from(PipelineSchedule),
    chunks=st.integers(1, 4),
)
def test_stages_in_runs_take_what_the_same_stages_take_one_by_one(
    counts: tuple[int, int], high: int, head: float, micro_batches: int, schedule: PipelineSchedule, chunks: int
) -> None:
    stages, highs = counts[0], min(counts[1], counts[0] - 1)
    layers = [high + 1.0] * highs + [float(high)] * (stages - 1 - highs) + [high + head]
    each = [StageSeconds(0.3 * n, 0.7 * n, 0.25 * n) for n in layers]
    expected = ANALYZER.step(each, micro_batches, schedule, chunks)
    runs = StageRuns(stages, highs, high + 1.0, float(high), high + head, 0.3, 0.25)
    total, bubble = ANALYZER.step_of_runs(runs, micro_batches, schedule, chunks)
    assert total == pytest.approx(expected.total)
    # where two stages are done last at the same time, either's wait is the bubble
    assert any(bubble == pytest.approx(total - micro_batches * stage.total, abs=1e-9) for stage in each)
