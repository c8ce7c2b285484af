"""The agent as the operator sees it: over HTTP, with a real torchrun."""

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest
from devtools.steps_log import steps_of
from tests.support.ranks.agents import TOKEN, born, order_of, ranks_of

from cost_aware_trainer.agent.processes import descendants
from cost_aware_trainer.contract import (
    ENV_ENDS_FOLDER,
    ENV_POD_UID,
    EXIT_STOPPED,
    MAX_MESSAGE_BYTES,
    AgentPhase,
    DegreesPlan,
    PodEnds,
    Redundancy,
    Release,
    RunResult,
)


def test_only_the_bearer_of_the_current_token_can_order_and_bodies_are_bounded(start_agent):
    agent = start_agent()
    body = order_of(agent, 1, ["x.py"]).to_json().encode()
    assert agent.call("/order", body, token=None)[0] == 401
    assert agent.call("/order", body, token="wrong")[0] == 401
    assert agent.call("/release", b"{}", token="")[0] == 401
    assert agent.call("/order", body, token=None, headers=[("Authorization", f"Basic {TOKEN}")])[0] == 401
    assert agent.call("/order", b"x" * (MAX_MESSAGE_BYTES + 1))[0] in (0, 413)
    assert agent.call("/order", b"", headers=[("Content-Length", str(MAX_MESSAGE_BYTES + 1))])[0] == 413
    assert agent.call("/order", b"{")[0] == 400
    assert agent.call("/nothing", b"{}")[0] == 404
    for wrong in ({"version": 99}, {"job": "other"}, {"attempt": 0}, {"nodes": 0}):
        assert agent.send("/order", order_of(agent, **({"attempt": 1, "entry": ["x.py"]} | wrong))) == 400
    assert agent.status.phase is AgentPhase.WAITING
    agent.token_file.write_text("rotated")
    assert agent.call("/release", b"{}")[0] == 401
    assert agent.call("/release", b"{}", token="rotated")[0] == 400
    agent.token_file.unlink()
    assert agent.call("/release", b"{}", token="")[0] == 401
    agent.token_file.write_text(TOKEN)


def test_a_pod_that_ends_leaves_word_of_it_for_those_that_live(start_agent, tmp_path):
    folder = {ENV_ENDS_FOLDER: str(tmp_path / "run/pods")}
    living, going = start_agent(**folder, **{ENV_POD_UID: "a"}), start_agent(**folder, **{ENV_POD_UID: "b"})
    assert PodEnds.from_json(living.call("/ends", token=None)[1]) == PodEnds()
    going.process.send_signal(signal.SIGTERM)
    going.process.wait(20)
    ended = time.time()
    (word,) = PodEnds.from_json(living.call("/ends", token=None)[1]).ends
    assert word.pod_uid == "b"
    assert ended - 1 < word.ended_at <= ended


def test_a_newer_attempt_replaces_a_running_one_and_its_ranks_at_once(start_agent, script, tmp_path):
    agent = start_agent()
    sleeper = script("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n")
    assert agent.send("/order", order_of(agent, 1, [sleeper], ranks_per_node=2)) == 202
    assert agent.send("/order", order_of(agent, 1, [sleeper])) == 200
    agent.wait_until(lambda: len(ranks_of(agent)) == 2)
    old = ranks_of(agent)
    done = tmp_path / "done.py"
    done.write_text("import os; print('attempt', os.environ['CATJ_ATTEMPT'], flush=True)")
    ordered = time.monotonic()
    assert agent.send("/order", order_of(agent, 3, [str(done)])) == 202
    agent.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old))
    assert time.monotonic() - ordered < 3
    assert agent.send("/order", order_of(agent, 2, [sleeper])) == 409
    assert agent.wait_for(AgentPhase.COMPLETED).attempt == 3
    assert "attempt 3" in (agent.folder / "agent.log").read_text()
    assert agent.send("/release", Release(attempt=2, complete=True)) == 409
    assert agent.send("/release", Release(attempt=3, complete=False)) == 202
    assert agent.process.wait(5) == 0


def test_a_failing_script_ends_with_its_own_words(start_agent, script):
    agent = start_agent()
    agent.send("/order", order_of(agent, 1, [script("raise ValueError('no such tokenizer')")]))
    status = agent.wait_for(AgentPhase.FAILED)
    assert "ValueError: no such tokenizer" in status.message
    assert "exited with 1" in status.message
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(5) == EXIT_STOPPED


def test_ranks_that_ignore_the_stop_are_killed_at_the_deadline(start_agent, script):
    agent = start_agent("--grace-seconds=1")
    agent.send("/order", order_of(agent, 1, [script("import time; time.sleep(600)")]))
    agent.wait_until(lambda: ranks_of(agent))
    (rank,) = ranks_of(agent)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(10) == EXIT_STOPPED
    assert not Path(f"/proc/{rank}").exists()


def test_a_user_s_own_program_is_told_by_sigterm_and_never_counts_as_complete(start_agent, script, tmp_path):
    saved = tmp_path / "saved"
    agent = start_agent("--grace-seconds=30")
    program = f"""
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path({str(saved)!r}).write_text("checkpoint")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(saved)!r}).write_text("running")
time.sleep(600)
"""
    agent.send("/order", order_of(agent, 1, [script(program)]))
    agent.wait_until(lambda: saved.exists() and saved.read_text() == "running")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(30) == EXIT_STOPPED
    assert saved.read_text() == "checkpoint"


@pytest.mark.parametrize("own", [True, False])
def test_an_agent_that_is_killed_takes_its_ranks_with_it(start_agent, script, make_plan, tmp_path, own):
    agent, log = start_agent(), tmp_path / "steps.jsonl"
    if own:
        agent.send("/order", order_of(agent, 1, [script("import time; time.sleep(600)")], ranks_per_node=2))
    else:
        entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
        agent.send("/order", order_of(agent, 1, entry, make_plan(data=2, steps=10_000), ranks_per_node=2))
        agent.wait_until(lambda: len(steps_of(log)) >= 3)
    agent.wait_until(lambda: len(ranks_of(agent)) == 2)
    began = [(pid, born(pid)) for pid in descendants(agent.process.pid)]
    agent.process.kill()
    agent.process.wait()
    agent.wait_until(lambda: not any(born(pid) == since for pid, since in began), timeout=20)


def test_an_agent_without_a_release_leaves_after_lingering(start_agent, script):
    agent = start_agent("--linger-seconds=0.5")
    agent.send("/order", order_of(agent, 1, [script("pass")]))
    assert agent.process.wait(60) == 0


def test_what_a_complete_run_came_to_is_left_for_the_kubelet(start_agent, make_plan, tmp_path):
    file = tmp_path / "termination-log"
    file.touch()
    agent = start_agent(f"--termination-file={file}", "--linger-seconds=2")
    agent.send("/order", order_of(agent, 1, ["-m", "cost_aware_trainer"], make_plan()))
    status = agent.wait_for(AgentPhase.COMPLETED)
    assert status.result.samples_checksum
    assert agent.process.wait(60) == 0
    assert RunResult.from_json(file.read_text()) == status.result


def test_an_invalid_plan_is_reported_and_the_agent_stays_for_the_reader(start_agent, make_plan):
    agent = start_agent()
    agent.send("/order", order_of(agent, 1, ["-m", "cost_aware_trainer"], make_plan(data=3)))
    status = agent.wait_for(AgentPhase.INVALID)
    assert "3 ranks, but 1 were started" in status.message
    assert agent.process.poll() is None


def test_terminated_then_killed_then_resumed_ends_as_if_undisturbed(
    start_agent, make_plan, finish, final_weights, tmp_path
):
    undisturbed = finish(make_plan("undisturbed", data=2, steps=150, interval_seconds=0.3))
    plan, log = make_plan("disturbed", data=2, steps=150, interval_seconds=0.3), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    first = start_agent()
    first.send("/order", order_of(first, 1, entry, plan, ranks_per_node=2))
    first.wait_until(lambda: len(steps_of(log)) >= 10)
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(30) == EXIT_STOPPED
    stopped = RunResult.from_json((first.folder / "attempt-1" / "result.json").read_text())
    assert stopped.outcome is AgentPhase.CHECKPOINTED
    # A replaced pod, whose rank is then killed by the kernel, say for memory.
    second = start_agent()
    second.send("/order", order_of(second, 2, entry, plan, ranks_per_node=2))
    second.wait_until(lambda: len(steps_of(log)) >= stopped.step + 20)
    os.kill(ranks_of(second)[0], signal.SIGKILL)
    assert "exited with -9" in second.wait_for(AgentPhase.FAILED).message
    # The same pod, the same port, at once.
    assert second.send("/order", order_of(second, 3, entry, plan, ranks_per_node=2)) == 202
    status = second.wait_for(AgentPhase.COMPLETED)
    assert status.result == undisturbed.result
    assert final_weights(plan) == final_weights(make_plan("undisturbed"))
    steps = [step["step"] for step in steps_of(log) if step["attempt"] == 2]
    assert steps[0] == stopped.step + 1


def test_a_rank_that_hangs_is_named_within_seconds_and_a_new_attempt_goes_on(start_agent, make_plan, tmp_path):
    plan, log = make_plan("hung", data=2, steps=60, interval_seconds=0.2), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    agent = start_agent("--stall-seconds=4")
    agent.send("/order", order_of(agent, 1, entry, plan, ranks_per_node=2))
    agent.wait_until(lambda: len(steps_of(log)) >= 15, timeout=240)
    ranks = ranks_of(agent)
    os.kill(ranks[1], signal.SIGSTOP)
    stopped = time.monotonic()
    message = agent.wait_for(AgentPhase.FAILED).message
    assert time.monotonic() - stopped < 30
    assert re.fullmatch(rf"stalled: rank 1 on {agent.status.pod}, step \d+, \w+: has not got on for \d+ s", message)
    # the kernel takes a moment to let go of what was killed, and more where it is busy
    agent.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), timeout=20)
    agent.send("/order", order_of(agent, 2, entry, plan, ranks_per_node=2))
    assert agent.wait_for(AgentPhase.COMPLETED, timeout=240).result.step == 60


def test_a_user_s_own_rank_that_hangs_between_steps_is_named(start_agent, script, tmp_path):
    agent = start_agent("--stall-seconds=0.4")
    program = f"""
import time, torch
from cost_aware_trainer import TrainingSession
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with TrainingSession(model, optimizer, folder={str(tmp_path / "run")!r}, samples=64, global_samples=4, steps=300) as session:
    for x in session.batches(lambda indices: torch.ones(len(indices), 2)):
        session.step(model(x).sum())
        if session.step_number == 30:
            time.sleep(3 if session.ranks.rank == 0 else 600)
"""
    agent.send("/order", order_of(agent, 1, [script(program)], ranks_per_node=2))
    message = agent.wait_for(AgentPhase.FAILED, timeout=240).message
    assert message.startswith(f"stalled: rank 1 on {agent.status.pod}, step 31, compute: has not got on for")


def test_two_pods_train_one_run_and_survive_the_loss_of_one(start_agent, make_plan, finish, final_weights, tmp_path):
    undisturbed = finish(make_plan("undisturbed", data=2, steps=120, interval_seconds=0.2))
    plan, log = make_plan("disturbed", data=2, steps=120, interval_seconds=0.2), tmp_path / "steps.jsonl"
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    host = start_agent()
    peer = start_agent(index=1, rendezvous_port=host.rendezvous_port)

    def order(attempt):
        # The pod of index 1 is told first: rank 0 must live in pod 0 all the same.
        for agent in (peer, host):
            assert agent.send("/order", order_of(agent, attempt, entry, plan, nodes=2)) == 202

    order(1)
    host.wait_until(lambda: len(steps_of(log)) >= 20)
    # The node of index 1 is lost without a word.
    (rank,) = ranks_of(peer)
    peer.process.kill()
    os.kill(rank, signal.SIGKILL)
    lost = time.monotonic()
    assert host.wait_for(AgentPhase.FAILED).message
    assert time.monotonic() - lost < 15
    peer = start_agent(index=1, rendezvous_port=host.rendezvous_port)
    order(2)
    host.wait_until(lambda: any(step["attempt"] == 2 for step in steps_of(log)))
    peer.process.send_signal(signal.SIGTERM)
    assert peer.process.wait(30) == EXIT_STOPPED
    assert host.wait_for(AgentPhase.CHECKPOINTED).result.step < 120
    peer = start_agent(index=1, rendezvous_port=host.rendezvous_port)
    order(3)
    for agent in (host, peer):
        assert agent.wait_for(AgentPhase.COMPLETED).result == undisturbed.result
        assert agent.send("/release", Release(attempt=3, complete=True)) == 202
        assert agent.process.wait(5) == 0
    assert final_weights(plan) == final_weights(make_plan("undisturbed"))


def test_a_replaced_pod_gets_its_state_from_its_peer_s_memory(start_agent, make_plan, changed, finish, tmp_path):
    undisturbed = finish(make_plan("undisturbed", data=2, steps=120))
    plan, log = make_plan("disturbed", data=2, steps=120), tmp_path / "steps.jsonl"
    copied = changed(plan.checkpoint, redundancy=Redundancy.REPLICA, redundancy_interval_seconds=0.05)
    plan = changed(plan, checkpoint=copied)
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    host = start_agent(f"--memory-folder={tmp_path}/memory-0")
    peer = start_agent(f"--memory-folder={tmp_path}/memory-1", index=1, rendezvous_port=host.rendezvous_port)
    for agent in (peer, host):
        assert agent.send("/order", order_of(agent, 1, entry, plan, nodes=2)) == 202
    host.wait_until(lambda: len(steps_of(log)) >= 20, timeout=240)
    (rank,) = ranks_of(peer)
    peer.process.kill()
    os.kill(rank, signal.SIGKILL)
    host.wait_for(AgentPhase.FAILED)
    peer = start_agent(f"--memory-folder={tmp_path}/memory-2", index=1, rendezvous_port=host.rendezvous_port)
    for agent in (peer, host):
        assert agent.send("/order", order_of(agent, 2, entry, plan, nodes=2)) == 202
    for agent in (host, peer):
        assert agent.wait_for(AgentPhase.COMPLETED, timeout=240).result == undisturbed.result
    assert next(step["step"] for step in steps_of(log) if step["attempt"] == 2) > 1
    assert "from memory, the volume has step 0: ranks [1] got theirs" in (host.folder / "agent.log").read_text()


def with_strategy(plan, degrees, **changes):
    return dataclasses.replace(plan, degrees=degrees, **changes)


def test_an_order_for_another_layout_goes_on_in_the_same_processes(start_agent, make_plan, finish, tmp_path):
    undisturbed = finish(make_plan("undisturbed", data=2, steps=300))
    plan, log = make_plan("changed", data=2, steps=300), tmp_path / "steps.jsonl"
    agent = start_agent()

    def order(attempt, plan):
        entry = ["-m", "cost_aware_trainer", "--plan", f"{agent.folder}/attempt-1/plan.json", "--steps-log", str(log)]
        entry[3] = entry[3].replace("attempt-1/", f"attempt-{attempt}/")
        return order_of(agent, attempt, entry, plan, ranks_per_node=2)

    agent.send("/order", order(1, plan))
    agent.wait_until(lambda: len(steps_of(log)) >= 10)
    ranks = ranks_of(agent)
    layouts = [DegreesPlan(tensor=2), DegreesPlan(pipeline=2)]
    for attempt, degrees in enumerate(layouts, start=2):
        assert agent.send("/order", order(attempt, with_strategy(plan, degrees))) == 202
        agent.wait_until(
            lambda: "went on in process" in agent.status.message or agent.status.phase is not AgentPhase.RUNNING
        )
        assert agent.status.attempt == attempt
        assert sorted(ranks_of(agent)) == sorted(ranks)
    result = agent.wait_for(AgentPhase.COMPLETED).result
    assert result.samples_checksum == undisturbed.result.samples_checksum
    assert result.loss == pytest.approx(undisturbed.result.loss, abs=1e-3)
    steps = steps_of(log)
    assert [step["step"] for step in steps] == list(range(1, 301))
    assert {step["attempt"] for step in steps} == {1, 2, 3}


def test_ranks_that_cannot_go_on_in_process_are_started_anew(start_agent, make_plan, tmp_path):
    plan, log = make_plan("stuck", data=2, steps=40, interval_seconds=0.2), tmp_path / "steps.jsonl"
    agent = start_agent("--reconfigure-seconds=1")
    entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
    agent.send("/order", order_of(agent, 1, entry, plan, ranks_per_node=2))
    agent.wait_until(lambda: len(steps_of(log)) >= 5, timeout=240)
    ranks = ranks_of(agent)
    os.kill(ranks[0], signal.SIGSTOP)
    other = with_strategy(plan, DegreesPlan(tensor=2))
    assert agent.send("/order", order_of(agent, 2, entry, other, ranks_per_node=2)) == 202
    # torchrun imports torch anew, which takes its time on a busy machine
    agent.wait_until(lambda: agent.status.phase is AgentPhase.COMPLETED, timeout=180)
    assert agent.status.result.step == 40
    assert "starting them anew" in (agent.folder / "agent.log").read_text()
    assert not set(ranks) & set(ranks_of(agent))
