import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cost_aware_trainer.contract.heartbeat import Heartbeat, Pulse, find_stall, read_pulses


def pulse(rank, age, phase="compute", waits=False, process=None):
    return Pulse(rank, process or os.getpid(), 1000.0 - age, 7, phase, waits)


def stall(*pulses):
    return find_stall(pulses, "node-a", now_seconds=1000.0, limit_seconds=10.0)


def test_a_record_is_read_as_it_was_written(tmp_path):
    heartbeat = Heartbeat(tmp_path, 3)
    heartbeat.beat("data", 12)
    before = time.monotonic()
    with heartbeat.waiting("communication"):
        (inside,) = read_pulses(tmp_path)
    (after,) = read_pulses(tmp_path)
    assert (inside.rank, inside.process, inside.step) == (3, os.getpid(), 12)
    assert (inside.phase, inside.waits, after.phase, after.waits) == ("communication", True, "data", False)
    assert before <= inside.at_seconds <= after.at_seconds <= time.monotonic()
    heartbeat.close()
    assert read_pulses(tmp_path) == []


def test_a_wait_within_a_wait_is_still_one(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.beat("communication", 3, waits=True)
    with heartbeat.waiting("tensor_communication"):
        pass
    assert [(p.phase, p.waits) for p in read_pulses(tmp_path)] == [("communication", True)]
    with heartbeat.phase("fetch"):
        assert [(p.phase, p.waits) for p in read_pulses(tmp_path)] == [("fetch", False)]


def test_a_rank_that_no_agent_watches_beats_for_nobody():
    heartbeat = Heartbeat(None, 0)
    heartbeat.beat("compute", 1)
    heartbeat.close()


def test_ranks_that_get_on_are_left_alone():
    assert stall() is None
    assert stall(pulse(0, 19, "communication", waits=True)) is None
    assert stall(pulse(0, 9), pulse(1, 0.1, waits=True), pulse(2, 200, phase="checkpoint")) is None


def test_who_waits_is_not_to_blame():
    found = stall(pulse(0, 50, "communication", waits=True), pulse(1, 12), pulse(2, 40, "communication", waits=True))
    assert (found.rank, found.phase) == (1, "compute")
    assert str(found) == "rank 1 on node-a, step 7, compute: has not got on for 12 s"


def test_when_all_wait_the_cause_is_elsewhere():
    found = stall(pulse(0, 25, "communication", waits=True), pulse(1, 26, "communication", waits=True))
    assert found.rank == 1
    assert "has waited 26 s for ranks of other nodes" in str(found)


def test_a_dead_process_comes_first_however_short_ago():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = stall(pulse(0, 500), pulse(1, 0.1, process=gone.pid))
    assert (found.rank, found.is_dead) == (1, True)
    assert str(found).endswith("its process is gone")


def test_a_stopped_process_has_no_excuse():
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        while Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        waiting = pulse(0, 30, "communication", waits=True)
        found = stall(waiting, pulse(1, 11, "checkpoint", waits=True, process=stopped.pid))
        assert (found.rank, found.phase, found.waits) == (1, "checkpoint", False)
    finally:
        stopped.kill()
        stopped.wait()


def live(folder, rank, hang_at):
    heartbeat = Heartbeat(folder, rank)
    for step in range(1, 10_000):
        heartbeat.beat("data", step)
        heartbeat.beat("compute")
        if step == hang_at:
            time.sleep(60)
        with heartbeat.waiting("communication"):
            time.sleep(0.002)


@pytest.mark.parametrize("ending", ["hangs", "dies"])
def test_a_living_process_that_hangs_or_dies_is_found_in_seconds(tmp_path, ending):
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=live, args=(tmp_path, 0, None)),
        context.Process(target=live, args=(tmp_path, 1, 50)),
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + 30
        while not any((p.step, p.phase) == (50, "compute") for p in read_pulses(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if ending == "dies":
            os.kill(ranks[1].pid, signal.SIGKILL)
        since, found = time.monotonic(), None
        while found is None:
            assert time.monotonic() < since + 30
            found = find_stall(read_pulses(tmp_path), "here", limit_seconds=5.0)
            time.sleep(0.02)
        assert (found.rank, found.step, found.phase, found.is_dead) == (1, 50, "compute", ending == "dies")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_a_beat_costs_next_to_nothing(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    started = time.process_time()
    for _ in range(10_000):
        heartbeat.beat("compute")
    assert (time.process_time() - started) / 10_000 < 50e-6
