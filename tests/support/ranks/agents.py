"""A pod's agent as a process of this host, ordered about as the operator would."""

import contextlib
import dataclasses
import http.client
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.support.ranks.runs import free_ports

from cost_aware_trainer.agent.processes import descendants
from cost_aware_trainer.contract import AgentPhase, AgentStatus, Release, RunOrder

TOKEN = "the-job's-token"


class Agent:
    """A pod's agent as a process of this host."""

    def __init__(self, folder, *options, index=0, rendezvous_port=None, **environment):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.metrics_port = folder, free_ports(1), free_ports(8)
        self.token_file, self.rendezvous_port = folder / "token", rendezvous_port or free_ports(1)
        self.token_file.write_text(TOKEN + "\n")
        command = [sys.executable, "-m", "cost_aware_trainer.agent", f"--port={self.port}", f"--run-folder={folder}"]
        command += [f"--token-file={self.token_file}", f"--metrics-port={self.metrics_port}", *options]
        command += [f"--rendezvous-port={self.rendezvous_port}"]
        own = {"JOB_COMPLETION_INDEX": str(index), "CATJ_JOB": "job", "CATJ_NAMESPACE": "space"}
        environment = os.environ | own | environment
        self.log = (folder / "agent.log").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)
        self.wait_until(lambda: self.call("/livez")[0] == 200)

    def call(self, path, body=None, token=TOKEN, headers=()):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        for name, value in headers:
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error).encode()

    def send(self, path, message):
        return self.call(path, message.to_json().encode())[0]

    def rank_metrics(self, rank):
        """What one of the pod's ranks serves."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port + rank}/metrics", timeout=5) as answer:
            return answer.read().decode()

    @property
    def status(self):
        return AgentStatus.from_json(self.call("/status", token=None)[1])

    def wait_until(self, condition, timeout=180):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, (self.folder / "agent.log").read_text()
            time.sleep(0.02)

    def wait_for(self, phase, timeout=180):
        """Waits for a phase; one that ends the attempt otherwise fails at once, with the agent's own words."""

        def reached():
            status = self.status
            ended = status.phase in (AgentPhase.FAILED, AgentPhase.INVALID) and status.phase is not phase
            assert not ended, (status, (self.folder / "agent.log").read_text())
            return status.phase is phase

        self.wait_until(reached, timeout)
        return self.status

    def close(self):
        if self.process.poll() is None:
            self.send("/release", Release(attempt=10**6, complete=True))
            self.process.wait(20)
        self.log.close()


@pytest.fixture
def start_agent(tmp_path):
    agents = []

    def start(*options, **place):
        agents.append(Agent(tmp_path / f"pod-{len(agents)}", *options, **place))
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


def order_of(agent, attempt, entry, plan=None, **changes):
    order = RunOrder(
        version=1,
        namespace="space",
        job="job",
        attempt=attempt,
        nodes=1,
        ranks_per_node=1,
        rendezvous_host="127.0.0.1",
        entry=tuple(entry),
        plan=plan,
    )
    return dataclasses.replace(order, **changes)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def ranks_of(agent):
    """Pids of the ranks that an agent's torchrun has started, in their order, as new processes or by being forked."""
    marker, server = f"CATJ_CONTROL_FILE={agent.folder}".encode(), fork_server_of(agent)
    found = []
    for pid in descendants(agent.process.pid):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if marker in environment and b"\0LOCAL_RANK=" in environment:
                found.append(pid)
    # a copy shows what the server was started with: below the server there is torchrun, and below that are the ranks
    found += descendants(server)[1:] if server else []
    return sorted(found, key=lambda pid: (born(pid), pid))


def fork_server_of(agent):
    """Its pid, or None where there is none."""
    for pid in descendants(agent.process.pid):
        with contextlib.suppress(OSError):
            command, parent = Path(f"/proc/{pid}/cmdline").read_bytes(), int(stat_of(pid)[1])
            if b"cost_aware_trainer.training.forkserver" in command and parent == agent.process.pid:
                return pid
    return None


def stat_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def born(pid):
    """In clock ticks; 0 for a process that is gone."""
    try:
        return int(stat_of(pid)[19])
    except OSError:
        return 0
