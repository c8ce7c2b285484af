import dataclasses
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from tests.support.steps import steps_of

from cost_aware_trainer.contract import (
    BatchPlan,
    CheckpointPlan,
    DegreesPlan,
    ModelPlan,
    OptimizerPlan,
    RunPlan,
    RunResult,
)
from cost_aware_trainer.data.token_files import prepare

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import rank_process  # noqa: E402

MODEL = ModelPlan(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence_length=16, vocabulary=256)


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    chooser = random.Random(0)
    for index in range(150):
        lines = [f"def f{chooser.randrange(50)}(x):\n    return x + {chooser.randrange(99)}\n" for _ in range(20)]
        (folder / f"module_{index}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory, source_folder):
    folder = tmp_path_factory.mktemp("data")
    assert prepare(folder, source_folder)
    return folder


@pytest.fixture
def make_plan(data_folder, tmp_path):
    def make(name="checkpoints", *, data=1, steps=12, interval_seconds=3600.0, keep=2, model=MODEL, micro=2, **changes):
        return RunPlan(
            steps=steps,
            model=model,
            batch=BatchPlan(global_samples=8, micro_samples=micro),
            checkpoint=CheckpointPlan(folder=str(tmp_path / name), interval_seconds=interval_seconds, keep=keep),
            data_folder=str(data_folder),
            degrees=DegreesPlan(data=data),
            optimizer=changes.pop("optimizer", OptimizerPlan(warmup_steps=3)),
            evaluate_every_steps=5,
            evaluation_samples=10,
            seed=7,
            **changes,
        )

    return make


def free_ports(count):
    """The first of so many free ports in a row, below those that the kernel gives to connections: the ranks' own would take them."""
    while True:
        first = random.randrange(20_000, 32_000 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@pytest.fixture(scope="session")
def forkserver():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cost_aware_trainer.training.trainer", "torch._dynamo", "rank_process"])
    return context


class Run:
    """A run whose ranks are started by hand, as torchrun would."""

    def __init__(self, context, folder, plan, world, environment):
        folder.mkdir(parents=True)
        self.folder, self.port = folder, free_ports(1)
        self.metrics_port = free_ports(world)
        (folder / "plan.json").write_text(plan.to_json())
        arguments = ["--plan", str(folder / "plan.json"), "--steps-log", str(folder / "steps.jsonl")]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(world),
            "CATJ_METRICS_PORT": str(self.metrics_port),
            "CATJ_RESULT_FILE": str(folder / "result.json"),
            "CATJ_JOB": "job",
            "CATJ_NAMESPACE": "space",
            **environment,
        }
        self.ranks = []
        for rank in range(world):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=rank_process.run, args=(shared | place, arguments, str(folder / "output")))
            process.start()
            self.ranks.append(process)

    def wait(self, timeout=240):
        for process in self.ranks:
            process.join(timeout)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        return [process.exitcode for process in self.ranks]

    @property
    def result(self):
        return RunResult.from_json((self.folder / "result.json").read_text())

    @property
    def output(self):
        return (self.folder / "output").read_text()

    @property
    def steps(self):
        return steps_of(self.folder / "steps.jsonl")

    def wait_for_step(self, step, timeout=180):
        deadline = time.monotonic() + timeout
        while not self.steps or self.steps[-1]["step"] < step:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)


@pytest.fixture
def start_run(forkserver, tmp_path):
    runs = []

    def start(plan, world=None, **environment):
        run = Run(forkserver, tmp_path / f"run-{len(runs)}", plan, world or plan.degrees.ranks, environment)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.wait(timeout=0)


@pytest.fixture
def finish(start_run):
    """Runs to the end and expects success."""

    def finish_run(plan, **environment):
        run = start_run(plan, **environment)
        assert set(run.wait()) == {0}, run.output
        return run

    return finish_run


def weights_of(plan):
    """Checksums of all tensors of the newest checkpoint."""
    newest = max(Path(plan.checkpoint.folder).glob("step-*/manifest.json"))
    return {name: facts["checksum"] for name, facts in json.loads(newest.read_text())["tensors"].items()}


@pytest.fixture
def final_weights():
    return weights_of


@pytest.fixture
def changed():
    return dataclasses.replace
