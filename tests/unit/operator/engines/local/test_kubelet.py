"""Pods as processes: what their status says, how they end, what a kubelet that was killed leaves, and what pods do not share."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
from tests.support import ROOT
from tests.support.pods.pods import PodWorld, pod_document

from cost_aware_operator.engines.local.pods.launch import PodFolder, ProcessIdentity
from cost_aware_operator.engines.local.pods.proc import kill_pod, pids_of_pod
from cost_aware_operator.engines.local.store import ObjectKey
from cost_aware_operator.workload.views import pod_view
from cost_aware_trainer.contract import AGENT_PORT, PodEnd


@pytest.fixture
def world(tmp_path):
    made = PodWorld(tmp_path)
    yield made
    for folder in (tmp_path / "pods").glob("*"):
        kill_pod(folder)


def folder_of(world, name):
    return PodFolder(world.state / "pods" / world.pod(name)["metadata"]["uid"])


def left_over(state):
    return [pid for folder in (state / "pods").glob("*") for pid in pids_of_pod(folder)]


async def running(world, *names, **more):
    for number, name in enumerate(names):
        world.put(pod_document(name, index=number, **more))
    said = [world.volume / f"{name}.token" for name in names]
    await world.until(lambda: all(world.phase(n) == "Running" for n in names) and all(f.exists() for f in said))


async def test_a_pod_that_runs_and_completes_has_the_status_of_a_kubelet_s(world):
    await running(world, "a")
    view = pod_view(world.pod("a"))
    assert view.usable
    assert view.ip.startswith("127.")
    assert world.status("a")["hostIP"] == "127.0.0.1"
    assert world.conditions("a")["Ready"]["status"] == "True"
    (world.volume / "a.finish").write_text("0")
    await world.until(lambda: world.phase("a") == "Succeeded")
    ended = world.terminated("a")
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (0, "Completed", "the result")
    assert ended["startedAt"] <= ended["finishedAt"]
    assert left_over(world.state) == []


async def test_a_pod_that_fails_says_its_log_s_last_lines(world):
    await running(world, "a")
    (world.volume / "a.finish").write_text("3")
    await world.until(lambda: world.phase("a") == "Failed")
    view = pod_view(world.pod("a"))
    assert (view.exit_code, view.problem) == (3, "Error (exit code 3)")
    assert view.last_message == "hello from a\nending\n"
    assert world.starts() == ["a"]


async def test_the_process_gets_its_environment_its_token_and_a_place_of_its_own(world):
    await running(world, "a", "b", OUTPUT="/checkpoints/x:/run/catj", WORD="$(VOLUME)/y")
    lines = (world.volume / "b.environment").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    pod = world.pod("b")
    assert (found["MY_NAME"], found["HOSTNAME"], found["CATJ_NODE"]) == ("b", "b", "node-0")
    assert found["MY_UID"] == pod["metadata"]["uid"]
    assert found["MY_IP"] == found["CATJ_ADDRESS"] == pod["status"]["podIP"] != world.status("a")["podIP"]
    assert (found["JOB_COMPLETION_INDEX"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    own = folder_of(world, "b").volumes
    assert found["OUTPUT"] == f"{world.volume}/x:{own}/run"
    assert found["WORD"] == f"{world.volume}/y"
    assert (world.volume / "b.token").read_text() == "secret"
    assert (own / "token/token").stat().st_mode & 0o777 == 0o600
    assert len(found["TMPDIR"]) < 60


async def test_a_deleted_pod_saves_within_its_grace_and_then_leaves_the_store(world):
    await running(world, "a")
    folder, key = folder_of(world, "a"), ObjectKey("Pod", "team", "a")
    seen = []
    world.store.watchers.append(lambda write: seen.append(write.after and write.after["status"]["phase"]))
    world.store.delete(key)
    await world.until(lambda: world.pod("a") is None)
    assert seen[-2:] == ["Failed", None]
    assert (world.volume / "a.saved").exists()
    assert left_over(world.state) == []
    await world.kubelet.sync()
    assert sorted(path.name for path in folder.path.iterdir()) == ["ended.json", "lock", "log"]


async def test_a_stubborn_pod_is_killed_when_its_grace_is_over(world):
    await running(world, "a", grace_seconds=1, STUBBORN=1)
    began = time.monotonic()
    world.store.evict(ObjectKey("Pod", "team", "a"))
    await world.until(lambda: world.pod("a") is None or world.phase("a") == "Failed")
    assert 0.9 < time.monotonic() - began < 5
    assert left_over(world.state) == []


async def test_pods_of_a_removed_node_and_evicted_ones_are_marked_as_disrupted(world):
    world.put(pod_document("a", node="node-1", SAVE_SECONDS=1))
    await running(world, "b", SAVE_SECONDS=1)
    await world.until(lambda: world.phase("a") == "Running")
    world.store.delete(ObjectKey("Node", "", "node-1"))
    world.store.evict(ObjectKey("Pod", "team", "b"))
    await world.kubelet.sync()
    assert world.conditions("a")["DisruptionTarget"]["reason"] == "DeletionByPodGC"
    assert world.conditions("b")["DisruptionTarget"]["reason"] == "EvictionByEvictionAPI"
    assert pod_view(world.pod("a")).deleting
    await world.until(lambda: world.pod("a") is None and world.pod("b") is None)


async def test_a_pod_that_somebody_else_gave_up_ends(world):
    await running(world, "a")
    failed = {"status": {"phase": "Failed"}}
    world.store.patch(ObjectKey("Pod", "team", "a"), failed, "somebody", only_status=True)
    await world.until(lambda: (world.volume / "a.saved").exists() and not left_over(world.state))
    assert world.phase("a") == "Failed"


async def test_a_pod_whose_parts_are_missing_waits_and_says_for_what(world):
    world.store.delete(ObjectKey("Secret", "team", "token"))
    world.put(pod_document("a"))
    await world.until(lambda: world.phase("a") == "Pending")
    assert pod_view(world.pod("a")).problem == 'CreateContainerConfigError: secret "token" not found'
    assert world.starts() == []


async def test_gpus_are_dealt_out_once(tmp_path):
    world = PodWorld(tmp_path, devices={"node-0": ("0", "1", "2")})
    for name, gpus in (("a", 2), ("b", 2), ("c", 1)):
        world.put(pod_document(name, gpus=gpus))
    await world.until(lambda: world.phase("a") == world.phase("c") == "Running")
    assert "2 GPUs are asked for, and 0 of 3 are free" in pod_view(world.pod("b")).problem
    assert [folder_of(world, name).launch().devices for name in "ac"] == [("0", "1"), ("2",)]
    world.store.delete(ObjectKey("Pod", "team", "a"))
    await world.until(lambda: world.phase("b") == "Running")
    assert folder_of(world, "b").launch().devices == ("0", "1")
    await world.kubelet.close()
    assert left_over(tmp_path) == []


async def test_a_taken_port_gives_another_address(world):
    world.put(pod_document("probe"))
    await world.until(lambda: world.phase("probe") == "Running")
    taken = world.status("probe")["podIP"]
    await world.kubelet.close()
    with socket.socket() as listener:
        listener.bind((taken, AGENT_PORT))
        listener.listen()
        # a pod of the same uid has the same first choice of addresses
        other = PodWorld(world.state / "other", seed=world.state)
        other.put(pod_document("probe"))
        await other.until(lambda: other.phase("probe") == "Running")
        assert other.status("probe")["podIP"] != taken
        await other.kubelet.close()


async def test_a_kubelet_that_stops_leaves_nothing_running_and_the_next_says_how_pods_ended(world):
    await running(world, "a")
    looping = asyncio.create_task(world.kubelet.run())
    await asyncio.sleep(0.05)
    looping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looping
    await world.kubelet.close()
    assert left_over(world.state) == []
    assert world.phase("a") == "Running"
    after = PodWorld(world.state)
    after.put(pod_document("a"))
    await after.until(lambda: after.phase("a") == "Failed")
    assert after.terminated("a")["exitCode"] == 143
    assert after.starts() == ["a"]


@pytest.mark.parametrize("victim", ["keeper", "agent", "both"])
async def test_whatever_is_killed_nothing_is_left_and_the_end_is_known(world, victim):
    await running(world, "a", SAVE_SECONDS=0.3)
    record = folder_of(world, "a").keeper()
    ends = world.volume / "run/pods"
    ends.mkdir(parents=True)
    word = PodEnd(pod_uid="uid-5", ended_at=time.time() - 5)
    (ends / f"{world.pod('a')['metadata']['uid']}.json").write_text(word.to_json())
    for identity in (record.keeper, record.agent):
        if victim == "both" or identity == getattr(record, victim):
            os.kill(identity.pid, signal.SIGKILL)
    await world.until(lambda: world.phase("a") == "Failed")
    view = pod_view(world.pod("a"))
    assert view.exit_code == 137
    assert (view.ended_at.timestamp() == int(word.ended_at)) is (victim != "agent")
    assert (world.volume / "a.saved").exists() is (victim == "keeper")
    assert left_over(world.state) == []


async def test_a_process_of_another_time_is_never_taken_for_a_pod_s(world):
    await running(world, "a")
    me = ProcessIdentity.of(os.getpid())
    assert me.is_alive
    assert not ProcessIdentity(me.pid, me.start_ticks + 1, me.boot).is_alive
    assert not ProcessIdentity(me.pid, me.start_ticks, "another boot").is_alive
    await world.kubelet.close()


def kill_a_kubelet(state):
    """Starts a kubelet of three pods in a process of its own, and kills it a moment after it has begun with the first."""
    command = [sys.executable, str(ROOT / "tests/support/pods/kubelet_process.py"), str(state), "3"]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 20
    while not list(state.glob("pods/*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.wait()


@pytest.mark.parametrize("_", range(6))
async def test_a_kubelet_killed_at_any_moment_is_followed_by_one_that_starts_nothing_twice(tmp_path, _):
    kill_a_kubelet(tmp_path)
    world = PodWorld(tmp_path)
    for number in range(3):
        world.put(pod_document(f"pod-{number}", node=f"node-{number % 2}", index=number))
    names = [f"pod-{number}" for number in range(3)]
    before = {name: folder_of(world, name).launch() is not None for name in names}
    # what was begun ends, what was not is begun now
    await world.until(lambda: all(world.phase(n) == ("Failed" if before[n] else "Running") for n in names))
    await world.kubelet.close()
    assert left_over(tmp_path) == []
    starts = world.starts()
    assert len(starts) == len(set(starts))


async def test_an_agent_that_cannot_be_started_says_why(tmp_path):
    world = PodWorld(tmp_path, agent=("/no/such/program",))
    world.put(pod_document("a"))
    await world.until(lambda: world.phase("a") == "Failed")
    assert world.terminated("a")["reason"] == "StartError"
    assert world.terminated("a")["message"] == "/no/such/program: No such file or directory"


async def test_a_log_is_bounded_and_rotated_once(tmp_path):
    world = PodWorld(tmp_path, log_bytes=20_000)
    await running(world, "a")
    (world.volume / "a.talk").touch()
    folder = folder_of(world, "a")
    await world.until(lambda: folder.older_log.exists())
    (world.volume / "a.talk").unlink()
    await world.kubelet.close()
    assert folder.older_log.read_bytes().startswith(b"hello") or folder.older_log.stat().st_size >= 20_000
    names = {path.name for path in folder.path.iterdir() if "log" in path.name}
    assert names == {"log", "log.1"}
