"""Benches reach into the operator: one that no longer runs would be noticed only when somebody wants its figures."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT


def test_the_bench_of_the_control_loop_runs_and_prints_a_line_for_each_number_of_pods() -> None:
    command = [sys.executable, str(ROOT / "bench/control_loop.py"), "--largest", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["2", "16"]
