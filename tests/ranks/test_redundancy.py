"""A lost node's state comes back from its peers' memory, and the volume is not read for it."""

import os
import shutil
import signal
import time

import pytest

from cost_aware_trainer.contract import Redundancy

STEPS = 120


@pytest.fixture
def copied_plan(make_plan, changed):
    def make(name, kind, **options):
        plan = make_plan(name, steps=STEPS, **options)
        return changed(plan, checkpoint=changed(plan.checkpoint, redundancy=kind, redundancy_interval_seconds=0.05))

    return make


def generations(memory, rank):
    return sorted(path.name for path in (memory / f"rank-{rank}").glob("step-*"))


def wait_for_checkpoint(run, volume):
    """Until the volume has a whole one: how many steps that takes differs from machine to machine."""
    deadline = time.monotonic() + 60
    while not list(volume.glob("step-*/manifest.json")):
        assert time.monotonic() < deadline, run.output
        time.sleep(0.005)


def lose(run, memory, ranks):
    """Kills ranks and what their nodes hold, when every rank holds a copy; the others end by themselves."""
    world = len(run.ranks)
    run.wait_for_step(10)
    deadline = time.monotonic() + 30
    while not all(generations(memory, rank) for rank in range(world)):
        assert time.monotonic() < deadline, run.output
        time.sleep(0.005)
    run.wait_for_step(run.steps[-1]["step"] + 5)
    for rank in ranks:
        os.kill(run.ranks[rank].pid, signal.SIGKILL)
    assert all(code != 0 for code in run.wait())
    for rank in ranks:
        shutil.rmtree(memory / f"rank-{rank}")


def on_nodes_of_one(memory):
    return {"LOCAL_WORLD_SIZE": "1", "CATJ_MEMORY_FOLDER": str(memory)}


@pytest.mark.parametrize(
    ("kind", "data", "lost"),
    [
        ("replica", 2, [1]),
        ("parity", 4, [0]),
        pytest.param("replica", 4, [0, 2], marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_from_memory_as_if_undisturbed(
    kind, data, lost, copied_plan, start_run, finish, final_weights, tmp_path
):
    memory = tmp_path / "memory"
    undisturbed = finish(copied_plan("undisturbed", Redundancy.NONE, data=data))
    plan = copied_plan("disturbed", Redundancy(kind), data=data)
    first = start_run(plan, **on_nodes_of_one(memory))
    lose(first, memory, lost)
    again = finish(plan, **on_nodes_of_one(memory))
    resumed = again.steps[0]["step"] - 1
    assert 0 < resumed <= first.steps[-1]["step"]
    assert f"resuming step {resumed} from memory, the volume has step 0: ranks {lost} got theirs" in again.output
    assert again.result == undisturbed.result
    assert [s["loss"] for s in again.steps] == [s["loss"] for s in undisturbed.steps[resumed:]]
    assert final_weights(plan) == final_weights(copied_plan("undisturbed", Redundancy.NONE))
    # what a complete run holds is given back
    assert not any(generations(memory, rank) for rank in range(data))


def test_more_losses_than_copies_make_up_for_are_told_of_and_the_volume_is_used(
    copied_plan, start_run, finish, changed, tmp_path
):
    memory, volume = tmp_path / "memory", tmp_path / "disturbed"
    plan = copied_plan("disturbed", Redundancy.PARITY, data=4, interval_seconds=0.1)
    first = start_run(plan, **on_nodes_of_one(memory))
    wait_for_checkpoint(first, volume)
    lose(first, memory, [1, 2])
    # as if the volume had not been reached for a while: only its first checkpoints are there
    for folder in sorted(volume.glob("step-*"))[1:]:
        shutil.rmtree(folder)
    again = finish(plan, **on_nodes_of_one(memory))
    assert "COPIES IN MEMORY" in again.output
    assert again.result.step == STEPS


def test_memory_is_newer_than_what_is_good_of_a_volume_whose_newest_checkpoint_is_damaged(
    copied_plan, start_run, finish, tmp_path
):
    memory, volume = tmp_path / "memory", tmp_path / "disturbed"
    plan = copied_plan("disturbed", Redundancy.REPLICA, data=2, interval_seconds=0.1)
    first = start_run(plan, **on_nodes_of_one(memory))
    wait_for_checkpoint(first, volume)
    lose(first, memory, [1])
    # the newest may be half written; only whole ones can be the good one
    oldest, *others = sorted(path.parent for path in volume.glob("step-*/manifest.json"))
    for folder in others:
        shutil.rmtree(folder)
    shutil.copytree(oldest, damaged := volume / f"step-{STEPS - 1:08}")
    for file in damaged.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-100])
    again = finish(plan, **on_nodes_of_one(memory))
    resumed = again.steps[0]["step"] - 1
    good = int(oldest.name.removeprefix("step-"))
    assert resumed > good
    assert f"resuming step {resumed} from memory, the volume has step {good}: ranks [1] got theirs" in again.output
    assert again.result.step == STEPS


def test_copies_of_another_layout_are_left_alone(copied_plan, start_run, finish, changed, tmp_path):
    from cost_aware_trainer.contract import DegreesPlan

    memory = tmp_path / "memory"
    plan = copied_plan("moved", Redundancy.REPLICA, data=2)
    first = start_run(plan, **on_nodes_of_one(memory))
    lose(first, memory, [1])
    again = finish(changed(plan, degrees=DegreesPlan(tensor=2)), **on_nodes_of_one(memory))
    assert again.steps[0]["step"] == 1
    assert again.result.step == STEPS


def test_one_node_alone_says_that_it_has_no_peer(copied_plan, finish, tmp_path):
    run = finish(
        copied_plan("alone", Redundancy.REPLICA, data=2),
        LOCAL_WORLD_SIZE="2",
        CATJ_MEMORY_FOLDER=str(tmp_path / "memory"),
    )
    assert "checkpoint.redundancy: replica does nothing: there is one node only" in run.output
    assert not (tmp_path / "memory").exists()
