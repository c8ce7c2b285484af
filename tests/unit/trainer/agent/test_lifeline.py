"""What ties an agent to whoever started it, and its children to it; and where it listens. No torch is imported."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from cost_aware_trainer.agent.processes import tethered
from cost_aware_trainer.contract import ENV_ADDRESS, EXIT_STOPPED, rendezvous_port


def wait_until(condition, patience_seconds=20):
    deadline = time.monotonic() + patience_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    agents = []

    def start_agent(port, *options, descriptors=(), **environment):
        command = [sys.executable, "-m", "cost_aware_trainer.agent", f"--port={port}", f"--run-folder={tmp_path}"]
        environment = os.environ | environment
        agent = subprocess.Popen([*command, *options], env=environment, pass_fds=descriptors)
        agents.append(agent)
        return agent

    yield start_agent
    for agent in agents:
        agent.kill()
        agent.wait()


def free_port(address="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def answers(address, port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://{address}:{port}/livez", timeout=5).status == 200
    return False


def test_an_agent_ends_when_its_lifeline_does_though_its_parent_was_killed(start):
    reading, writing = os.pipe()
    agent = start(port := free_port(), f"--lifeline-fd={reading}", descriptors=[reading])
    os.close(reading)
    wait_until(lambda: answers("127.0.0.1", port))
    os.write(writing, b"what is said says nothing")
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(0.3)
    os.close(writing)
    assert agent.wait(10) == EXIT_STOPPED


def test_an_agent_with_an_address_listens_there_only_and_one_without_everywhere(start):
    port = free_port("127.9.8.7")
    start(port, **{ENV_ADDRESS: "127.9.8.7"})
    wait_until(lambda: answers("127.9.8.7", port))
    assert not answers("127.0.0.1", port)
    start(port, **{ENV_ADDRESS: "127.9.8.8"})
    wait_until(lambda: answers("127.9.8.8", port))
    start(other := free_port())
    wait_until(lambda: answers("127.0.0.1", other))
    assert answers("127.9.8.7", other)


def test_jobs_of_one_host_meet_at_ports_of_their_own():
    assert rendezvous_port(1) == 29401
    assert rendezvous_port(203, first=28000) == 28003


def test_a_tethered_child_gets_sigterm_when_its_parent_is_killed(tmp_path):
    told = tmp_path / "told"
    child = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(told)!r}).write_text('told'), sys.exit()))\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text('ready')\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", child]
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys\n"
            "from cost_aware_trainer.agent.processes import tethered\n"
            f"subprocess.Popen(tethered({command!r}), start_new_session=True).wait()",
        ]
    )
    wait_until(lambda: (tmp_path / "pid").exists())
    parent.kill()
    parent.wait()
    wait_until(told.exists)


def test_a_child_whose_parent_died_before_it_began_does_not_begin(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = tethered([sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"])
    command[command.index(str(os.getpid()))] = str(gone.pid)
    assert subprocess.run(command, check=False).returncode == -signal.SIGTERM
    assert not Path(tmp_path / "begun").exists()
