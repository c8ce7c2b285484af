"""The agent's HTTP server, with a supervisor that takes its time."""

import threading
import time
import urllib.request

import pytest

from cost_aware_trainer.agent.server import Server
from cost_aware_trainer.contract import AgentPhase, AgentStatus


class SlowSupervisor:
    """Takes part of a second for its status, as a host whose processors are all busy does."""

    def __init__(self):
        self.asked = threading.Event()

    def status(self):
        self.asked.set()
        time.sleep(0.3)
        return AgentStatus(version=1, pod="pod", index=0, attempt=0, phase=AgentPhase.WAITING)


@pytest.fixture
def server(tmp_path):
    server = Server(0, SlowSupervisor(), tmp_path / "token", None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_pod_that_ends_waits_until_open_requests_have_their_whole_answers(server):
    answers = []

    def ask():
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/status", timeout=5) as answer:
            answers.append(AgentStatus.from_json(answer.read()))

    asking = threading.Thread(target=ask)
    asking.start()
    assert server.supervisor.asked.wait(5)
    server.settle(timeout_seconds=5)
    asking.join(0.2)
    assert [answer.phase for answer in answers] == [AgentPhase.WAITING]


def test_a_pod_that_ends_does_not_wait_longer_than_it_may(server):
    asking = threading.Thread(
        target=lambda: urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/status", timeout=5).close(),
    )
    asking.start()
    assert server.supervisor.asked.wait(5)
    began = time.monotonic()
    server.settle(timeout_seconds=0.01)
    assert time.monotonic() - began < 0.25
    asking.join(5)
