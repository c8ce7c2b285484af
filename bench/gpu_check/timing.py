"""Timing: the seconds that the trainer reports are those that a profiler sees, and a step hardly ever waits for the GPU."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench.gpu_check.check import Found, Setting, SkippedError, check_judged
from bench.gpu_check.processes import on_ranks
from bench.gpu_check.runs import MIDDLE, TINY, log_of, plan_of, trainer_of
from bench.gpu_check.timeline import OPTIMIZER_MARK, STEP_MARK, Busy, busy_of
from devtools.steps_log import steps_of
from torch.profiler import ProfilerActivity, profile, record_function

from cost_aware_trainer.contract import DegreesPlan, Precision, RunPlan, StrategyPlan
from cost_aware_trainer.training.trainer import Trainer

WARM_STEPS, STEPS = 5, 5
AGREEMENT = 0.05
"""Share of all profiled seconds by which a phase, or the sum, may differ."""
MOST_WAITS = 1
"""Times that the host may wait in a step until the device has done all that was started."""
ONE_MARK = ("torch.cuda.Event.synchronize",)
"""Calls that wait for one mark in the device's queue, which may have more work behind it."""
COUNTED = ("reads", "emptying_calls", "waits_for_a_mark", "idle_ends")
"""What is counted in steps."""
SYNCHRONISING = "called a synchronizing CUDA operation"
"""Words of torch's warning in its debug mode."""


def timing(setting: Setting) -> Found:
    """Compute, communication and optimizer as the steps log has them, beside the busy time of the GPU in the same steps."""
    figures: dict[str, Any] = {"steps": STEPS}
    problems: list[str] = []
    for world in setting.worlds:
        plan = _plan(setting, world)
        first, *_ = on_ranks(setting, world, profiled, plan)
        reported, measured = Busy(**first["reported"]), Busy(**first["measured"])
        for name, busy in (("reported", reported), ("profiled", measured)):
            figures |= {f"ranks_{world}_{name}_{phase}_seconds": value for phase, value in asdict(busy).items()}
        problems += [f"{world} ranks: {problem}" for problem in disagreements(reported, measured)]
    check_judged(
        setting,
        "there is no GPU whose kernels a profiler could time; the code was tried on the host's operations",
        "tiny models leave a GPU idle between kernels, which the trainer counts and the profiler does not",
        figures,
    )
    return Found(figures, problems, setting.left_out_worlds)


def disagreements(reported: Busy, measured: Busy) -> list[str]:
    """What differs by more than the agreed share of all profiled seconds: a phase, or the sum."""
    found = []
    for name in ("compute", "communication", "optimizer", "total"):
        mine, other = getattr(reported, name), getattr(measured, name)
        if abs(mine - other) > AGREEMENT * measured.total:
            found.append(
                f"{name}: the trainer reports {mine:.4g} s and the profiler {other:.4g} s, further apart than "
                f"{AGREEMENT:.0%} of all {measured.total:.4g} s"
            )
    return found


def profiled(plan: RunPlan) -> dict[str, Any]:
    """Trains this rank's steps under the profiler: seconds as its steps log and as the profiler have them."""
    on_cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with trainer_of(plan) as trainer:
        mark_optimizer(trainer)
        for _ in range(WARM_STEPS):
            trainer.step()
        with profile(activities=activities) as profiler:
            # the first one has to wait for the profiler
            trainer.step()
            for _ in range(STEPS):
                with record_function(STEP_MARK):
                    trainer.step()
            trainer.rank_model.mesh.ranks.synchronise()
        # one step more: on a GPU a step is in the log when the next has been started
        trainer.step()
        is_first = trainer.rank_model.mesh.ranks.is_first
    if not is_first:
        return {}
    trace = Path(plan.checkpoint.folder).with_name("trace.json")
    profiler.export_chrome_trace(str(trace))
    measured = busy_of(json.loads(trace.read_text())["traceEvents"], on_cuda=on_cuda)
    counted = steps_of(log_of(plan))[WARM_STEPS + 1 :][:STEPS]
    return {"reported": asdict(reported_of(counted)), "measured": asdict(measured)}


def mark_optimizer(trainer: Trainer) -> None:
    """Marks the optimizer's block for the profiler."""
    update = trainer.rank_model.update

    def marked(*arguments: Any) -> None:
        with record_function(OPTIMIZER_MARK):
            update(*arguments)

    trainer.rank_model.update = marked  # type: ignore[method-assign]


def reported_of(entries: list[dict[str, Any]]) -> Busy:
    """Seconds of steps by the log's phases. A wait for a slower rank is a collective that lasts longer."""

    def seconds(*phases: str) -> float:
        return float(sum(entry["seconds"].get(phase, 0.0) for entry in entries for phase in phases))

    return Busy(
        compute=seconds("compute"),
        communication=seconds("communication", "straggler_wait"),
        optimizer=seconds("optimizer"),
    )


def host_waits(setting: Setting) -> Found:
    """How often the host waits in a step, after the first ones, until the GPU has nothing left to do."""
    figures: dict[str, Any] = {"steps": STEPS}
    problems = []
    for world in setting.worlds:
        answers = on_ranks(setting, world, count_waits, _plan(setting, world))
        for rank, answer in enumerate(answers):
            problems += [
                f"rank {rank} of {world}: {said}" for said in too_many(answer, is_judged_idle=not setting.small)
            ]
        worst = max(answers, key=lambda answer: answer["reads"] + answer["emptying_calls"])
        figures |= {f"ranks_{world}_{name}_per_step": worst[name] / STEPS for name in COUNTED}
    if not setting.on_cuda:
        raise SkippedError("there is no GPU that the host could wait for", figures)
    return Found(figures, problems, setting.left_out_worlds)


def too_many(answer: dict[str, Any], *, is_judged_idle: bool) -> list[str]:
    """What is wrong with one rank's counts."""
    found = []
    waits = (answer["reads"] + answer["emptying_calls"]) / STEPS
    if waits > MOST_WAITS:
        found.append(
            f"a step empties the GPU's queue {waits:.1f} times, not at most once: {'; '.join(answer['places'])}"
        )
    if is_judged_idle and answer["idle_ends"]:
        found.append(f"the GPU had nothing left to do after {answer['idle_ends']} of {STEPS} steps")
    return found


def count_waits(plan: RunPlan) -> dict[str, Any]:
    """Counts waits of this rank's steps: reads that torch warns of, calls that say what they do, and ends with an idle GPU."""
    on_cuda, idle_ends = torch.cuda.is_available(), 0
    with trainer_of(plan) as trainer:
        check_that_reads_are_seen()
        for _ in range(WARM_STEPS):
            trainer.step()
        with counted_calls() as calls, warned_reads() as reads:
            for _ in range(STEPS):
                trainer.step()
                if on_cuda:
                    end = torch.cuda.Event()
                    end.record()
                    idle_ends += end.query()
    emptying = [call for call in calls if call not in ONE_MARK]
    counts = {"reads": len(reads), "emptying_calls": len(emptying), "waits_for_a_mark": len(calls) - len(emptying)}
    return {**counts, "idle_ends": idle_ends, "places": sorted({*reads, *emptying})[:8]}


@contextlib.contextmanager
def warned_reads() -> Iterator[list[str]]:
    """Collects the places of operations that make the host wait, as torch's debug mode sees them; none without CUDA."""
    places: list[str] = []
    if not torch.cuda.is_available():
        yield places
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if SYNCHRONISING in str(w.message)]


def check_that_reads_are_seen() -> None:
    """Raises where a read on purpose is not noticed: then none of the trainer's would be."""
    if torch.cuda.is_available():
        with warned_reads() as reads:
            torch.ones(1, device="cuda").item()
        if not reads:
            raise RuntimeError("torch's debug mode does not warn of a read; its warning may have other words now")


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Collects the calls that wait for the device by name, of which the debug mode says nothing."""
    calls: list[str] = []

    def counting(call: Any, name: str) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return call(*arguments, **options)

        return counted

    places = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            original = getattr(owner, name)
            label = f"torch.cuda.{'' if owner is torch.cuda else owner.__name__ + '.'}{name}"
            setattr(owner, name, counting(original, label))
            stack.callback(setattr, owner, name, original)
        yield calls


def _plan(setting: Setting, world: int) -> RunPlan:
    """A data-parallel plan whose kernels are long, so that the host is never what a GPU waits for."""
    strategy = StrategyPlan(precision=Precision.FP32 if setting.small else Precision.BF16)
    return plan_of(
        setting,
        TINY if setting.small else MIDDLE,
        steps=WARM_STEPS + 1 + STEPS,
        degrees=DegreesPlan(data=world),
        strategy=strategy,
        global_samples=16 * world,
        micro_samples=8,
    )
