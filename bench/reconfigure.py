"""How long a change of degrees takes, from the order to the first finished step under the new ones, by each way to do it.

python bench/reconfigure.py [--changes N] [--ways in-process,forked,relaunch,cold]

Four gloo ranks of one agent on this machine. `in-process`: the ranks go on and hand their state over. `forked`: they stop
with a checkpoint, and torchrun and its ranks are forked from a process that has PyTorch imported. `relaunch`: the agent
itself is another, as in a new pod, counted from its start, without what ranks before it take to save. `cold`: as forked, but every
process imports PyTorch for itself. Prints one JSON line for each way and stage: median, least and most seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from devtools.steps_log import steps_of

from cost_aware_trainer.contract import (
    ENV_PRELOAD,
    BatchPlan,
    CheckpointPlan,
    DegreesPlan,
    ModelPlan,
    OptimizerPlan,
    Release,
    RunOrder,
    RunPlan,
)
from cost_aware_trainer.data.token_files import prepare

RANKS = 4
DEGREES = (DegreesPlan(data=4), DegreesPlan(data=2, tensor=2), DegreesPlan(data=2, pipeline=2), DegreesPlan(tensor=4))
MODEL = ModelPlan(layers=4, hidden=128, heads=8, kv_heads=4, ffn=344, sequence_length=64, vocabulary=256)
TOKEN = "bench"  # noqa: S105  opens nothing but the agent that this program starts


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def plan_of(folder: Path, degrees: DegreesPlan) -> RunPlan:
    return RunPlan(
        steps=10**6,
        model=MODEL,
        batch=BatchPlan(global_samples=16, micro_samples=2),
        checkpoint=CheckpointPlan(folder=str(folder / "checkpoints"), interval_seconds=3600),
        data_folder=str(folder / "data"),
        degrees=degrees,
        optimizer=OptimizerPlan(learning_rate=1e-4, minimum_learning_rate=1e-5),
        evaluate_every_steps=10**6,
    )


class Pod:
    """An agent of this machine and the run that it was ordered."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self.way, self.port, self.attempt = folder, way, free_port(), 0
        (folder / "token").write_text(TOKEN)
        self.options = [f"--port={self.port}", f"--run-folder={folder / 'run'}", f"--token-file={folder / 'token'}"]
        self.options += [f"--metrics-port={free_port()}", *(["--cold"] if way == "cold" else [])]
        self.log = folder / "agent.log"
        self.start()

    def start(self) -> None:
        """As a new pod's agent, which is going to be ordered at once."""
        command = [sys.executable, "-m", "cost_aware_trainer.agent", *self.options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", ENV_PRELOAD: "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/livez", timeout=5).close()
                return
            except OSError:
                time.sleep(0.05)

    def leave(self) -> None:
        """As a pod that is let go: its ranks save."""
        self.send("/release", Release(attempt=self.attempt, complete=False))
        self.process.wait(60)

    def send(self, path: str, message: RunOrder | Release) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=message.to_json().encode())
        request.add_header("Authorization", f"Bearer {TOKEN}")
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310  this machine's agent

    def order(self, degrees: DegreesPlan) -> None:
        """Orders the next attempt. Another spelling of the log's path keeps ranks from going on in process."""
        self.attempt += 1
        dots = "/." * (self.attempt if self.way != "in-process" else 1)
        entry = ("-m", "cost_aware_trainer", "--steps-log", f"{self.folder}{dots}/steps.jsonl")
        order = RunOrder(
            version=1,
            namespace="bench",
            job="bench",
            attempt=self.attempt,
            nodes=1,
            ranks_per_node=RANKS,
            rendezvous_host="127.0.0.1",
            entry=entry,
            plan=plan_of(self.folder, degrees),
            drain_seconds=60.0,
        )
        self.send("/order", order)

    def steps(self) -> list[dict[str, object]]:
        """Steps of the newest attempt."""
        return [step for step in steps_of(self.folder / "steps.jsonl") if step["attempt"] == self.attempt]

    def wait_for_steps(self, count: int, patience_seconds: float = 180.0) -> None:
        deadline_seconds = time.monotonic() + patience_seconds
        while len(self.steps()) < count:
            if time.monotonic() > deadline_seconds or self.process.poll() is not None:
                raise SystemExit(f"no step of attempt {self.attempt}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.005)

    def close(self) -> None:
        self.send("/release", Release(attempt=self.attempt, complete=True))
        self.process.wait(30)


def change(pod: Pod, degrees: DegreesPlan) -> dict[str, float]:
    """One change of degrees; seconds in whole and by stage."""
    if pod.way == "relaunch":
        pod.leave()
    began_seconds = time.monotonic()
    if pod.way == "relaunch":
        pod.start()
    pod.order(degrees)
    pod.wait_for_steps(1)
    total_seconds = time.monotonic() - began_seconds
    stages = pod.steps()[0]["reconfiguration_seconds"]
    assert isinstance(stages, dict)
    return {"total": total_seconds, **stages}


def measure(way: str, folder: Path, changes: int) -> None:
    """Prints medians of one way."""
    (folder / "run").mkdir(parents=True)
    (folder / "data").symlink_to(folder.parent / "data")
    pod = Pod(folder, way)
    pod.order(DEGREES[0])
    pod.wait_for_steps(3)
    found = []
    for number in range(1, changes + 1):
        found.append(change(pod, DEGREES[number % len(DEGREES)]))
        pod.wait_for_steps(5)
    pod.close()
    for stage in found[0]:
        seconds = [measured[stage] for measured in found]
        figures = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps({"way": way, "stage": stage, "changes": changes, **rounded}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=5, help="of each way")
    parser.add_argument("--ways", default="in-process,forked,relaunch,cold")
    options = parser.parse_args()
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "model": dataclasses.asdict(MODEL)}
    print(json.dumps({"ranks": RANKS, **machine}), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch) / "data", Path(json.__file__).parent.parent / "asyncio")
        for way in options.ways.split(","):
            measure(way, Path(scratch) / way, options.changes)


if __name__ == "__main__":
    main()
