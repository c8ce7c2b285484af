"""Attempts forked from a process that imports PyTorch once: as if undisturbed, never late, and no GPU touched before the fork."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from devtools.steps_log import steps_of
from tests.support.ranks.agents import fork_server_of, order_of, ranks_of

from cost_aware_trainer.contract import (
    ENV_COLD,
    ENV_PRELOAD,
    AgentPhase,
    LaunchStage,
)

LOOKED_AT = """
import importlib, torch
from cost_aware_trainer.training.forkserver import PRELOADED

asked = []

def noted(module, name):
    def instead(*_, **__):
        asked.append(name)
        raise RuntimeError(name)
    assert hasattr(module, name), name
    setattr(module, name, instead)

for name in ("_cuda_getDeviceCount", "_cuda_init"):
    # a PyTorch without CUDA has neither
    if torch.version.cuda:
        noted(torch._C, name)
noted(torch.cuda, "_lazy_init")
for name in PRELOADED:
    importlib.import_module(name)
{also}
print(asked)
"""


def asked(also=""):
    program = LOOKED_AT.format(also=also)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    return done.stdout.strip(), done.stderr


def test_no_module_that_is_imported_before_the_fork_asks_for_a_device():
    said, errors = asked()
    assert said == "[]", errors


def test_a_module_that_asked_for_a_device_would_be_noticed():
    said, _ = asked(also="try: torch.zeros(1, device='cuda')\nexcept RuntimeError: pass")
    assert "_lazy_init" in said or "_cuda_init" in said


def ready(start_agent):
    """An agent that has PyTorch imported and waits for an order."""
    agent = start_agent(**{ENV_PRELOAD: "1"})
    agent.wait_until(lambda: "the fork server is ready" in (agent.folder / "agent.log").read_text(), timeout=240)
    assert agent.status.phase is AgentPhase.WAITING
    return agent


@pytest.mark.alone
def test_attempts_are_forked_from_a_server_that_has_pytorch_and_end_as_if_undisturbed(
    start_agent, make_plan, finish, final_weights, tmp_path
):
    undisturbed = finish(make_plan("undisturbed", data=2, steps=600, interval_seconds=0.3))
    plan, log = make_plan("disturbed", data=2, steps=600, interval_seconds=0.3), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    agent = start_agent()
    agent.send("/order", order_of(agent, 1, entry, plan, ranks_per_node=2, drain_seconds=30))
    agent.wait_until(lambda: len(steps_of(log)) >= 5, timeout=240)
    server = fork_server_of(agent)
    ordered = time.monotonic()
    agent.send("/order", order_of(agent, 2, entry, plan, ranks_per_node=2, drain_seconds=30))
    agent.wait_until(lambda: any(step["attempt"] == 2 for step in steps_of(log)))
    took = time.monotonic() - ordered
    # where that time went, from the order to the first step's end
    stages = next(step for step in steps_of(log) if step["attempt"] == 2)["reconfiguration_seconds"]
    assert list(stages) == [stage.value for stage in LaunchStage]
    assert all(seconds > 0 for seconds in stages.values()), stages
    assert 0.8 * took < sum(stages.values()) < took + 0.1, (took, stages)
    served = agent.rank_metrics(0)
    for stage, seconds in stages.items():
        shown = re.search(rf'catj_rank_reconfiguration_seconds{{[^}}]*stage="{stage}"[^}}]*}} (\S+)', served)
        assert float(shown[1]) == pytest.approx(seconds)
    assert fork_server_of(agent) == server
    assert stages["relaunch"] < 2, "PyTorch is not imported again"
    ranks = ranks_of(agent)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    assert "exited with -9" in agent.wait_for(AgentPhase.FAILED).message
    # The server is lost as well: what follows is forked from another.
    os.kill(server, signal.SIGKILL)
    server_file = Path(f"/proc/{server}/cmdline")
    agent.wait_until(lambda: not server_file.exists() or not server_file.read_bytes())
    # An exiting process shows no command line a little before its parent can learn of its end.
    time.sleep(2)
    assert agent.send("/order", order_of(agent, 3, entry, plan, ranks_per_node=2)) == 202
    status = agent.wait_for(AgentPhase.COMPLETED, timeout=240)
    assert status.result == undisturbed.result
    assert final_weights(plan) == final_weights(make_plan("undisturbed"))


def test_a_fork_server_that_dies_before_the_ranks_begin_costs_seconds_and_no_attempt(start_agent, make_plan, tmp_path):
    plan, log = make_plan("forked", data=2, steps=40), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    agent = ready(start_agent)
    server = fork_server_of(agent)
    # A server that stands still takes the launch in but does not see to it; then it dies.
    os.kill(server, signal.SIGSTOP)
    agent.send("/order", order_of(agent, 1, entry, plan, ranks_per_node=2))
    agent.wait_until(lambda: "attempt 1: starting" in (agent.folder / "agent.log").read_text())
    time.sleep(0.5)
    os.kill(server, signal.SIGKILL)
    assert agent.wait_for(AgentPhase.COMPLETED, timeout=240).attempt == 1
    assert "died before any rank had begun" in (agent.folder / "agent.log").read_text()


def test_a_fork_server_that_stands_still_is_not_waited_for_by_the_next_attempt(start_agent, make_plan, tmp_path):
    plan, log = make_plan("forked", data=2, steps=40), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    agent = ready(start_agent)
    os.kill(fork_server_of(agent), signal.SIGSTOP)
    for attempt in (1, 2):
        agent.send("/order", order_of(agent, attempt, entry, plan, ranks_per_node=2))
        agent.wait_until(lambda a=attempt: f"attempt {a}: starting" in (agent.folder / "agent.log").read_text())
    assert agent.wait_for(AgentPhase.COMPLETED, timeout=240).attempt == 2
    assert {step["attempt"] for step in steps_of(log)} == {2}


def test_an_attempt_that_is_overtaken_while_pytorch_is_imported_never_begins(start_agent, make_plan, tmp_path):
    plan, log = make_plan("overtaken", data=2, steps=20), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    agent = start_agent()
    agent.send("/order", order_of(agent, 1, entry, plan, ranks_per_node=2))
    agent.wait_until(lambda: "attempt 1: starting" in (agent.folder / "agent.log").read_text())
    agent.send("/order", order_of(agent, 2, entry, plan, ranks_per_node=2))
    assert agent.wait_for(AgentPhase.COMPLETED, timeout=240).attempt == 2
    assert {step["attempt"] for step in steps_of(log)} == {2}
    assert "the fork server died" not in (agent.folder / "agent.log").read_text()


def test_pytorch_is_imported_before_the_first_order_only_where_that_is_going_to_need_it(start_agent):
    assert fork_server_of(ready(start_agent)) is not None
    others = start_agent(), start_agent(**{ENV_PRELOAD: "1", ENV_COLD: "1"})
    time.sleep(3)
    assert [fork_server_of(other) for other in others] == [None, None]


def test_where_ranks_must_not_be_forked_they_are_new_processes(start_agent, make_plan):
    agent = start_agent(**{ENV_PRELOAD: "1", ENV_COLD: "1"})
    agent.send("/order", order_of(agent, 1, ["-m", "cost_aware_trainer"], make_plan(steps=20)))
    assert agent.wait_for(AgentPhase.COMPLETED).result.step == 20
    assert fork_server_of(agent) is None
