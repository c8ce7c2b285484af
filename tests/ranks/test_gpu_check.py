"""The checks of a GPU, rehearsed without one: somebody with a GPU must not be the first to run them."""

import json
import subprocess
import sys

import pytest
from bench.gpu_check.command import CHECKS
from tests.support import ROOT

SMALL = ["--device", "cpu", "--small"]
JUDGED_ON_A_CPU = {"collectives", "follows_cpu", "bf16", "checkpoint_stall", "forks"}

INJECTED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from bench.gpu_check.check import Check, Found, SkippedError
from bench.gpu_check.command import main
from bench.gpu_check.processes import on_ranks

def skips(setting):
    raise SkippedError("not today", {{"seen": 1}})

def with_child():
    # in a session of its own, as torchrun's ranks are
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path({folder!r}, str(child.pid)).touch()

def raises(setting):
    raise ValueError("a wrong turn")

def dies(setting):
    with_child()
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(setting):
    with_child()
    print("last words", flush=True)
    time.sleep(300)

def rank_of_two():
    if os.environ["RANK"] == "0":
        time.sleep(300)  # as one that waits in NCCL for a peer that is gone
    raise RuntimeError("lost its GPU")

def rank_fails(setting):
    return Found({{"never": on_ranks(setting, 2, rank_of_two)}})

functions = {{
    "good": lambda setting: Found({{"figure_seconds": 0.5}}),
    "bad": lambda setting: Found({{"ratio": 2.0}}, ["twice as much as allowed"]),
    "skips": skips, "raises": raises, "dies": dies, "hangs": hangs, "rank_fails": rank_fails,
}}
checks = [Check(name, f"nothing, it {{name}}", run, 5.0 if name == "hangs" else 60.0) for name, run in functions.items()]
sys.exit(main(sys.argv[1:], checks))
"""


def gpu_check(*options, program=None, timeout=500):
    command = [sys.executable, *(["-c", program] if program else ["-m", "bench.gpu_check"]), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def injected(tmp_path):
    folder = tmp_path / "children"
    folder.mkdir()

    def run(*options):
        return gpu_check(*SMALL, *options, program=INJECTED.format(folder=str(folder)))

    run.folder = folder
    return run


@pytest.mark.exhaustive
@pytest.mark.alone
def test_every_check_runs_over_gloo_and_says_what_only_a_gpu_can_show(tmp_path):
    out = tmp_path / "new" / "gpu-check.json"
    done = gpu_check(*SMALL, "--out", str(out))
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert [check["name"] for check in document["checks"]] == [check.name for check in CHECKS]
    assert {check["name"] for check in document["checks"] if check["result"] == "passed"} == JUDGED_ON_A_CPU
    for check in document["checks"]:
        assert set(check) == {"name", "protects", "result", "reason", "seconds", "figures", "left_out"}
        assert bool(check["reason"]) == (check["result"] == "skipped")
        # compiling is the one check that is not tried without a GPU
        assert bool(check["figures"]) == (check["name"] != "compile")
    assert {
        "gpu_count",
        "gpu_name",
        "driver_version",
        "cuda_version",
        "nccl_version",
        "torch_version",
        "commit",
    } <= set(document["machine"])
    progress = [line for line in done.stderr.splitlines() if line.startswith(tuple(f"{n}/10 " for n in range(1, 11)))]
    assert len(progress) == len(CHECKS), done.stderr


def test_checks_that_fail_crash_or_hang_leave_the_others_their_results_and_no_process_behind(injected):
    done = injected()
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name: check["result"] for name, check in checks.items()} == {
        "good": "passed", "bad": "failed", "skips": "skipped", "raises": "failed", "dies": "failed", "hangs": "failed",
        "rank_fails": "failed",
    }  # fmt: skip
    assert checks["good"]["figures"] == {"figure_seconds": 0.5}
    assert (checks["bad"]["reason"], checks["bad"]["figures"]) == ("twice as much as allowed", {"ratio": 2.0})
    assert (checks["skips"]["reason"], checks["skips"]["figures"]) == ("not today", {"seen": 1})
    assert checks["raises"]["reason"] == "ValueError: a wrong turn"
    assert checks["dies"]["reason"].startswith("its process ended with code -9")
    assert checks["hangs"]["reason"].startswith("did not end within 5 s and was ended")
    assert "last words" in checks["hangs"]["reason"]
    assert "rank 1 of 2 ended with code 1" in checks["rank_fails"]["reason"]
    assert "lost its GPU" in checks["rank_fails"]["reason"]
    assert checks["rank_fails"]["seconds"] < 60
    assert [child.name for child in injected.folder.iterdir() if lives(child.name)] == []


def lives(pid):
    """Whether a `sleep` of this number runs; its number may have gone to another process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except FileNotFoundError:
        return False
    return name == "sleep" and rest.split()[0] != "Z"


def test_checks_that_pass_or_are_skipped_end_with_0_and_those_that_are_not_asked_for_are_left_out(injected):
    done = injected("--only", "skips,good")
    assert done.returncode == 0, done.stderr
    assert [check["name"] for check in json.loads(done.stdout)["checks"]] == ["good", "skips"]
    assert "there is no check better" in injected("--only", "better").stderr


def test_a_machine_without_a_gpu_is_told_what_to_do_instead():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = gpu_check()
    assert done.returncode == 2
    assert "--device cpu --small" in done.stderr
    assert done.stdout == ""
