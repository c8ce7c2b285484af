"""Does all checks of a machine with GPUs, one after the other, and writes one JSON document of what they found.

python -m bench.gpu_check [--out FILE] [--small] [--device cuda|cpu] [--only NAME,...]

Exit code: 0 if every check passed or was skipped, 1 if one failed, 2 if there is no GPU to check.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_check.check import Check, Outcome, Setting, document_of, exit_code_of
from bench.gpu_check.collectives import collectives
from bench.gpu_check.forks import forks
from bench.gpu_check.losses import bf16_follows_fp32, compiled, follows_cpu
from bench.gpu_check.machine import facts, outer_facts
from bench.gpu_check.memory import memory
from bench.gpu_check.processes import RankError, on_ranks, run_limited
from bench.gpu_check.saves import stall
from bench.gpu_check.speed import mfu
from bench.gpu_check.timing import host_waits, timing

from cost_aware_trainer.agent.processes import adopt_orphans

CHECKS = (
    Check("collectives", "sums, sizes and speed of NCCL's collectives with one rank and with all", collectives),
    Check("follows_cpu", "a GPU trains what a CPU trains, under every layout that the GPUs allow", follows_cpu),
    Check("bf16", "bf16 is used where a plan says so, and learns as fp32 does", bf16_follows_fp32),
    Check("compile", "compiled layers train the same, and what compiling gains", compiled),
    Check("timing", "the seconds of phases, by which dollars are booked, are those that a profiler sees", timing),
    Check(
        "host_waits",
        "the host empties the GPU's queue at most once a step, so that the GPU has work at all times",
        host_waits,
    ),
    Check("mfu", "the share of the GPU's peak that training reaches, beside what others publish", mfu, 1800.0),
    Check("checkpoint_stall", "a background save hardly holds up the steps", stall),
    Check("forks", "ranks may be forked from a process that has PyTorch imported, and use a GPU", forks),
    Check("memory", "plans that are said to fit do fit, and none is refused that would", memory),
)
NO_GPU = (
    "gpu-check: torch sees no GPU here{why}. Run it on a machine with one, with a torch that has CUDA; "
    "`python -m bench.gpu_check --device cpu --small` rehearses it without, and says nothing of GPUs"
)
EXIT_NO_GPU = 2


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Does what the command line asks for; returns the exit code."""
    options = _options(arguments, checks)
    chosen = [check for check in checks if not options.only or check.name in options.only]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        setting = Setting(options.device, options.small, ranks=2, folder=Path(scratch))
        try:
            (seen,) = on_ranks(setting, 1, facts)
        except RankError as error:
            if setting.on_cuda:
                print(NO_GPU.format(why=f" ({error})"), file=sys.stderr)
                return EXIT_NO_GPU
            raise
        if setting.on_cuda:
            if not seen["gpu_count"]:
                print(NO_GPU.format(why=""), file=sys.stderr)
                return EXIT_NO_GPU
            setting = dataclasses.replace(setting, ranks=seen["gpu_count"])
        machine = seen | outer_facts()
        setting = dataclasses.replace(setting, machine=machine)
        ended = [_done(check, setting, f"{number}/{len(chosen)}") for number, check in enumerate(chosen, start=1)]
    _write(document_of(machine, setting, ended), options.out)
    return exit_code_of([outcome for _, outcome, _ in ended])


def _options(arguments: Sequence[str] | None, checks: Sequence[Check]) -> argparse.Namespace:
    names = [check.name for check in checks]
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the document; standard output if left out")
    parser.add_argument("--small", action="store_true", help="tiny models: it ends soon, and its speeds mean nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses the code over gloo")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some checks, of {','.join(names)}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"--only: there is no check {', '.join(unknown)}; write some of {','.join(names)}")
    return options


def _done(check: Check, setting: Setting, number: str) -> tuple[Check, Outcome, float]:
    """Does one check and says so."""
    began_seconds = time.monotonic()
    outcome = run_limited(check, setting)
    seconds = time.monotonic() - began_seconds
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"{number} {check.name}: {outcome.verdict.value} in {seconds:.1f} s{reason}", file=sys.stderr, flush=True)
    return check, outcome, seconds


def _write(document: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(document, indent=2) + "\n"
    if path is None:
        print(text, end="")
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
