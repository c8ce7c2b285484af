"""A user's own model, in real ranks: the example of docs/trainer.md, stopped, and gone on with under another degree."""

import os
import re
import signal
import time

import pytest
from devtools.steps_log import steps_of
from tests.support import ROOT
from tests.support.ranks import process as rank_process
from tests.support.ranks.runs import free_ports

from cost_aware_trainer.contract import AgentPhase, RunResult
from cost_aware_trainer.data.samples import checksum_text, expected_checksum

EXAMPLE = ROOT / "examples/digits/train.py"
SAMPLES, STEPS = 1437, 300


class Script:
    """Ranks of a script, started as torchrun would."""

    def __init__(self, context, folder, path, world, arguments):
        folder.mkdir()
        self.folder = folder
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(4)),
            "WORLD_SIZE": str(world),
            "CATJ_METRICS_PORT": str(free_ports(4)),
            "CATJ_RESULT_FILE": str(folder / "result.json"),
        }
        self.ranks = []
        for rank in range(world):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            whole = (environment, str(path), arguments, str(folder / "output"))
            self.ranks.append(context.Process(target=rank_process.run_script, args=whole))
            self.ranks[-1].start()

    def wait(self, timeout=180):
        for process in self.ranks:
            process.join(timeout)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        return [process.exitcode for process in self.ranks]

    @property
    def output(self):
        return (self.folder / "output").read_text()

    @property
    def result(self):
        return RunResult.from_json((self.folder / "result.json").read_text())

    @property
    def accuracy(self):
        return float(re.search(r"accuracy (\S+)", self.output)[1])


@pytest.fixture
def start_script(forkserver, tmp_path):
    scripts = []

    def start(path, world, *arguments):
        scripts.append(Script(forkserver, tmp_path / f"script-{len(scripts)}", path, world, arguments))
        return scripts[-1]

    yield start
    for script in scripts:
        script.wait(timeout=0)


def test_digits_are_learnt_and_a_run_stopped_and_resumed_under_another_degree_is_the_same_run(start_script, tmp_path):
    whole = start_script(EXAMPLE, 2, "--folder", str(tmp_path / "whole"))
    assert whole.wait() == [0, 0], whole.output
    assert whole.accuracy > 0.95
    assert whole.result.outcome is AgentPhase.COMPLETED
    assert whole.result.samples_checksum == checksum_text(expected_checksum(SAMPLES, 0, 64, STEPS))

    folder = tmp_path / "parts"
    first = start_script(EXAMPLE, 2, "--folder", str(folder))
    deadline = time.monotonic() + 120
    while len(steps_of(folder / "steps.jsonl")) < 10:
        assert time.monotonic() < deadline, first.output
        time.sleep(0.01)
    # One rank alone is told: the other must learn of it.
    os.kill(first.ranks[1].pid, signal.SIGTERM)
    assert first.wait() == [0, 0], first.output
    assert first.result.outcome is AgentPhase.CHECKPOINTED
    assert 0 < first.result.step < STEPS
    second = start_script(EXAMPLE, 1, "--folder", str(folder))
    assert second.wait() == [0], second.output
    assert second.result.outcome is AgentPhase.COMPLETED
    assert second.result.samples_checksum == whole.result.samples_checksum
    assert second.accuracy > 0.95
    losses = [[step["loss"] for step in steps_of(run / "steps.jsonl")] for run in (folder, tmp_path / "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    start, step = (steps_of(tmp_path / "whole" / "steps.jsonl")[number] for number in (0, 50))
    assert list(start["reconfiguration_seconds"]) == ["rendezvous", "rebuild", "load", "first_step"]
    assert "reconfiguration_seconds" not in step
    assert sum(step["seconds"].values()) == pytest.approx(step["step_seconds"], rel=0.02)
    # where the other rank was late, all that was waited may be its doing
    assert step["seconds"]["communication"] + step["seconds"]["straggler_wait"] > 0
    assert step["bytes"]["data"] > 0


OWN = """
import torch
from cost_aware_trainer import TrainingSession
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
with TrainingSession(model, optimizer, folder={folder!r}, samples=10, global_samples={batch}, steps=3) as session:
    for x in session.batches(lambda indices: torch.randn(len(indices), 3)):
        session.step(model(x).sum() * {factor})
"""


@pytest.mark.parametrize(
    ("changes", "code", "outcome", "says"),
    [
        ({"batch": 3}, 64, AgentPhase.INVALID, "global_samples: 3 is no multiple of 2 ranks"),
        ({"optimizer": "LBFGS"}, 64, AgentPhase.INVALID, "optimizer: LBFGS"),
        ({"factor": "float('nan')"}, 1, AgentPhase.FAILED, "step 1: loss nan"),
    ],
)
def test_what_can_never_work_is_said_in_words(start_script, tmp_path, changes, code, outcome, says):
    values = {"folder": str(tmp_path / "own"), "batch": 4, "factor": 1, "optimizer": "SGD"} | changes
    path = tmp_path / "own.py"
    path.write_text(OWN.format(**values))
    run = start_script(path, 2)
    assert set(run.wait()) == {code}, run.output
    assert says in run.result.message
    assert run.result.outcome is outcome
