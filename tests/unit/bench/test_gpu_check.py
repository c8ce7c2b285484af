"""What the checks of a GPU conclude from what they measured: no GPU is needed to get that right."""

from pathlib import Path

import pytest
from bench.gpu_check.check import (
    Check,
    Found,
    Outcome,
    Setting,
    SkippedError,
    Verdict,
    check_judged,
    document_of,
    exit_code_of,
)
from bench.gpu_check.command import CHECKS
from bench.gpu_check.losses import largest_difference
from bench.gpu_check.machine import row_of
from bench.gpu_check.memory import layout_of, predicted
from bench.gpu_check.runs import MIDDLE
from bench.gpu_check.speed import first_that_fits, plans, published_figures
from bench.gpu_check.timeline import OPTIMIZER_MARK, STEP_MARK, Busy, busy_of, union_seconds
from bench.gpu_check.timing import disagreements, reported_of, too_many

from cost_aware_operator.costs.models.layout import StateSharding
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration, accelerator
from cost_aware_trainer.contract import BatchPlan, CheckpointPlan, DegreesPlan, RunPlan, Sharding, StrategyPlan

MILLION = 1e6


def setting(tmp_path: Path, **changes) -> Setting:
    return Setting(**{"device": "cuda", "small": False, "ranks": 1, "folder": tmp_path} | changes)


def event(name, begin, seconds, kind, **arguments):
    return {"ph": "X", "name": name, "cat": kind, "ts": begin * MILLION, "dur": seconds * MILLION, "args": arguments}


def kernel(name, launched, begin, seconds, number):
    """A kernel with the call that started it."""
    return [
        event("cudaLaunchKernel", launched, 0.001, "cuda_runtime", correlation=number),
        event(name, begin, seconds, "kernel", correlation=number),
    ]


TRACE = [
    event(STEP_MARK, 1.0, 1.0, "user_annotation"),
    event(OPTIMIZER_MARK, 1.8, 0.1, "user_annotation"),
    # the profiler shows marks on the GPU's line too, where they cover other kernels
    event(OPTIMIZER_MARK, 0.0, 90.0, "gpu_user_annotation"),
    {"ph": "M", "name": "process_name"},
    *kernel("warm_up", 0.5, 0.6, 9.0, 1),
    *kernel("gemm", 1.1, 10.0, 4.0, 2),
    *kernel("gemm", 1.2, 14.0, 2.0, 3),
    # one second beside the gemm before it, two on its own
    *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1.3, 15.0, 3.0, 4),
    *kernel("fused_adamw", 1.85, 18.0, 0.5, 5),
    *kernel("next_step", 2.5, 20.0, 9.0, 6),
]


def test_kernels_are_booked_on_the_block_that_started_them_whenever_they_ran():
    busy = busy_of(TRACE, on_cuda=True)
    assert (busy.compute, busy.communication, busy.optimizer) == pytest.approx((6.0, 2.0, 0.5))
    assert busy.total == pytest.approx(8.5)


def test_a_trace_without_a_kernel_of_a_marked_step_is_an_error_and_not_zero_seconds():
    with pytest.raises(ValueError, match="holds no kernel"):
        busy_of([one for one in TRACE if one["name"] != STEP_MARK], on_cuda=True)
    with pytest.raises(ValueError, match="holds no kernel"):
        busy_of([], on_cuda=False)


def test_seconds_that_several_spans_cover_count_once():
    assert union_seconds([(0, 2e6), (1e6, 3e6), (1.5e6, 2e6), (5e6, 6e6)]) == pytest.approx(4.0)
    assert union_seconds([]) == 0.0


def test_a_phase_that_is_off_by_more_than_a_twentieth_of_all_is_found_and_so_is_the_sum():
    measured = Busy(compute=8.0, communication=1.0, optimizer=1.0)
    assert disagreements(Busy(8.3, 1.1, 1.0), measured) == []
    (shifted,) = disagreements(Busy(7.0, 1.9, 1.0), measured)[:1]
    assert shifted.startswith("compute: the trainer reports 7 s and the profiler 8 s")
    assert [said.partition(":")[0] for said in disagreements(Busy(8.4, 1.4, 1.4), measured)] == ["total"]


def test_a_wait_for_a_slower_rank_is_communication_that_lasts_longer():
    seconds = {"compute": 3.0, "communication": 1.0, "straggler_wait": 0.5, "optimizer": 0.25, "data": 9.0}
    assert reported_of([{"seconds": seconds}, {"seconds": seconds}]) == Busy(6.0, 3.0, 0.5)


def counts(**changes):
    none = {"reads": 0, "emptying_calls": 0, "waits_for_a_mark": 0, "idle_ends": 0, "places": []}
    return none | changes


def test_one_read_a_step_is_allowed_and_a_second_is_named_with_its_place():
    assert too_many(counts(reads=5, waits_for_a_mark=10), is_judged_idle=True) == []
    (said,) = too_many(counts(reads=5, emptying_calls=5, places=["votes.py:90"]), is_judged_idle=True)
    assert said == "a step empties the GPU's queue 2.0 times, not at most once: votes.py:90"


def test_a_gpu_that_had_nothing_left_to_do_is_found_unless_steps_are_tiny():
    assert "nothing left to do after 2 of 5 steps" in too_many(counts(idle_ends=2), is_judged_idle=True)[0]
    assert too_many(counts(idle_ends=5), is_judged_idle=False) == []


def test_losses_of_runs_of_other_lengths_are_never_called_equal():
    assert largest_difference([1.0, 2.0], [1.0, 2.5]) == 0.5
    with pytest.raises(ValueError, match="0 losses cannot be compared with 2"):
        largest_difference([], [1.0, 2.0])
    with pytest.raises(ValueError, match="1 losses"):
        largest_difference([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("gpu_name", "memory_gib", "row"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-SXM-80GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM2-16GB"),
        ("NVIDIA H200", 139.8, "H200-SXM-141GB"),
        ("NVIDIA A10G", 22.1, "A10G-24GB"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090-24GB"),
        ("NVIDIA L40S", 44.5, "L40S-48GB"),
        ("NVIDIA H100 PCIe", 79.2, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA A10", 22.1, None),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_a_gpu_is_judged_by_its_own_peak_or_by_none(gpu_name, memory_gib, row):
    found = row_of(gpu_name, memory_gib)
    assert (found.name if found else None) == row


def test_the_document_has_all_checks_in_order_and_short_numbers(tmp_path):
    checks = [Check(name, f"protects {name}", lambda _: Found({})) for name in ("a", "b", "c")]
    outcomes = [
        Outcome.of(Found({"step_seconds": 0.123456789, "list": [{"x": 1 / 3}]}, left_out=["part: why"])),
        Outcome.of(Found({}, problems=["too slow", "too large"])),
        Outcome(Verdict.SKIPPED, "no GPU"),
    ]
    document = document_of(
        {"gpu_count": 1}, setting(tmp_path), list(zip(checks, outcomes, [1.0, 2.0, 3.0], strict=True))
    )
    assert [(one["name"], one["result"]) for one in document["checks"]] == [
        ("a", "passed"), ("b", "failed"), ("c", "skipped"),
    ]  # fmt: skip
    assert document["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert document["checks"][0]["figures"] == {"step_seconds": 0.123457, "list": [{"x": 0.333333}]}
    assert document["checks"][1]["reason"] == "too slow; too large"
    assert exit_code_of(outcomes) == 1
    assert exit_code_of([outcomes[0], outcomes[2]]) == 0


def test_figures_of_tiny_models_or_of_a_cpu_are_shown_and_not_judged(tmp_path):
    said = {"without_gpu": "no GPU", "with_tiny_models": "too small", "figures": {"x": 1}}
    check_judged(setting(tmp_path), **said)
    for changes, reason in (({"device": "cpu"}, "no GPU"), ({"small": True}, "--small: too small")):
        with pytest.raises(SkippedError) as skipped:
            check_judged(setting(tmp_path, **changes), **said)
        assert (skipped.value.reason, skipped.value.figures) == (reason, {"x": 1})


def test_one_gpu_is_not_taken_for_several(tmp_path):
    assert setting(tmp_path).worlds == (1,)
    assert setting(tmp_path).left_out_worlds == ["several ranks: the machine has one GPU"]
    assert (setting(tmp_path, ranks=8).worlds, setting(tmp_path, ranks=8).left_out_worlds) == ((1, 8), [])


def test_every_check_says_what_it_protects_under_a_name_of_its_own():
    assert len({check.name for check in CHECKS}) == len(CHECKS) == 10
    assert all(len(check.protects.split()) > 5 for check in CHECKS)


@pytest.mark.parametrize(
    ("name", "model_1b", "slice_of_8b"),
    [
        ("H100-SXM-80GB", (22, 8, 2048), (7, 1, 8192)),
        ("A100-SXM-40GB", (22, 4, 2048), (2, 1, 4096)),
        ("L4-24GB", None, None),
    ],
)
def test_models_are_as_large_as_the_planner_says_that_they_fit(tmp_path, name, model_1b, slice_of_8b):
    row = accelerator(name)
    found = plans(setting(tmp_path), row)
    chosen = {n: p and (p.model.layers, p.batch.micro_samples, p.model.sequence_length) for n, p in found.items()}
    assert chosen == {"model_1b": model_1b, "slice_of_8b": slice_of_8b}
    for plan in filter(None, found.values()):
        assert predicted(plan, row.generation).total <= 0.9 * row.memory_gib
    assert first_that_fits([], row) is None


def test_published_figures_name_their_pages_and_are_computed_as_ours_are():
    figures = {(one["model"], one["precision"], one["gpu"][:9]): one for one in published_figures()}
    assert all("README.md" in one["source"] or "benchmarks/" in one["source"] for one in figures.values())
    # llm-foundry's own page says 59.86 %
    assert figures["MPT-1b", "amp_bf16", "A100-80GB"]["mfu_ratio"] == pytest.approx(0.5986, abs=0.005)
    assert figures["Llama3.1-8B", "bf16 compile", "H100-96GB"]["tokens_per_s_per_gpu"] == pytest.approx(6667, abs=2)


def test_a_plan_is_asked_of_the_planner_in_its_own_words():
    plan = RunPlan(
        steps=1,
        model=MIDDLE,
        batch=BatchPlan(global_samples=8, micro_samples=2),
        checkpoint=CheckpointPlan(folder="unused"),
        data_folder="unused",
        degrees=DegreesPlan(data=2, tensor=2),
        strategy=StrategyPlan(sharding=Sharding.ZERO3),
    )
    layout = layout_of(plan)
    assert (layout.data, layout.tensor, layout.ranks, layout.micro_batches) == (2, 2, 4, plan.micro_batches)
    assert layout.sharding is StateSharding.ZERO3
    assert predicted(plan, AcceleratorGeneration.HOPPER).optimizer > 0
