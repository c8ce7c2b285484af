"""Benches reach into the trainer: one that no longer runs would be noticed only when somebody wants its figures."""

import json
import subprocess
import sys

import pytest
from tests.support import ROOT


@pytest.mark.parametrize(
    ("bench", "options", "figures"),
    [
        ("overhead", ["--pairs=1", "--steps=2"], {"step", "save"}),
        ("session", ["--pairs=1", "--steps=2"], {"session"}),
        (
            "reconfigure",
            ["--changes=1", "--ways=in-process"],
            {"total", "drain", "save", "rebuild", "load", "first_step"},
        ),
    ],
)
def test_a_bench_of_the_trainer_runs_and_prints_its_figures(bench, options, figures):
    command = [sys.executable, "-m", f"bench.{bench}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line.get("what") or line.get("stage") for line in lines} - {None} == figures
