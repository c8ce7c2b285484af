"""Runs whose ranks are forked from a process that has imported torch already, started by hand as torchrun would."""

import json
import multiprocessing
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
from devtools.steps_log import steps_of
from tests.support.ranks import process as rank_process
from tests.support.ranks.pool import RankPool

from cost_aware_trainer.contract import RunResult

os.environ.setdefault("OMP_NUM_THREADS", "1")


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
    # what is imported once and not by each rank: the trainer, and what tests ask of ranks
    own = ["tests.support.ranks.process", "tests.support.ranks.cases"]
    context.set_forkserver_preload(["cost_aware_trainer.training.trainer", "torch._dynamo", *own])
    return context


@pytest.fixture(scope="session")
def pool(forkserver):
    """Ranks that import torch once and run many cases."""
    pool = RankPool(forkserver, 8)
    yield pool
    pool.close()


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
