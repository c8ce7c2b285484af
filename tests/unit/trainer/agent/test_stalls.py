import subprocess
import sys

import pytest

from cost_aware_trainer.agent.stalls import StallWatch
from cost_aware_trainer.contract.heartbeat import PHASE_LIMITS_SECONDS, Heartbeat


class Run:
    """One rank and its agent's watch, on a clock of the test's own."""

    def __init__(self, folder, monkeypatch, **options):
        self.now = 1000.0
        monkeypatch.setattr("cost_aware_trainer.contract.heartbeat.time.monotonic", lambda: self.now)
        self.heartbeat, self.watch = Heartbeat(folder, 3), StallWatch(folder, "node-a", 5.0, **options)

    def train(self, steps, seconds, first=1):
        for step in range(first, first + steps):
            self.heartbeat.beat("compute", step)
            self.wait(seconds)

    def wait(self, seconds):
        """What the agent says in the meantime, if anything."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            if stall := self.watch.look(self.now):
                return stall
        return None


@pytest.fixture
def start(tmp_path, monkeypatch):
    return lambda **options: Run(tmp_path, monkeypatch, **options)


def test_a_rank_that_does_not_get_on_is_named_within_the_limit(start):
    run = start()
    run.train(5, 0.2)
    run.heartbeat.beat("compute", 6)
    stall = run.wait(8)
    assert str(stall) == "rank 3 on node-a, step 6, compute: has not got on for 6 s"


def test_slow_steps_get_ten_of_their_median(start):
    run = start()
    run.train(5, 3.0)
    assert run.watch.limit_seconds() == pytest.approx(30.0)
    run.heartbeat.beat("compute", 6)
    assert run.wait(29) is None
    assert run.wait(3) is not None


def test_the_first_step_may_compile_and_so_may_the_first_under_another_plan(start):
    run = start()
    run.heartbeat.beat("compute", 1)
    assert run.wait(PHASE_LIMITS_SECONDS["start"]) is None
    run.train(5, 0.2, first=2)
    run.heartbeat.begin_anew()
    run.watch.begin_anew()
    run.heartbeat.beat("compute", 7)
    assert run.wait(PHASE_LIMITS_SECONDS["start"]) is None
    assert run.wait(2) is not None


def test_a_node_that_stood_still_gives_its_ranks_time_to_get_on(start):
    run = start()
    run.train(20, 0.2)
    run.now += 300
    assert run.watch.look(run.now) is None
    run.heartbeat.beat("compute", 21)
    assert run.wait(5) is None
    assert run.wait(2) is not None


def test_fetching_data_is_never_a_stall(start):
    run = start()
    with run.heartbeat.phase("fetch"):
        assert run.wait(3000) is None


def test_a_program_of_one_s_own_may_do_between_steps_what_it_likes(start):
    run = start(is_own_program=True)
    run.train(5, 0.2)
    assert run.wait(70) is None
    assert run.wait(10) is not None


def test_a_death_is_left_to_torchrun_which_knows_more_of_it(start):
    run = start()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run.heartbeat.process = gone.pid
    run.train(3, 0.2)
    assert run.wait(50) is None
    stall = run.wait(20)
    assert stall.is_dead
    assert str(stall).endswith("its process is gone")


def test_a_rank_that_ended_as_it_should_is_not_missed(start):
    run = start()
    run.train(3, 0.2)
    run.heartbeat.close()
    assert run.wait(1000) is None
