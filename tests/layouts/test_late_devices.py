"""A device that works behind the host, as a GPU does: nothing of a step is read before the next has been started."""

import dataclasses
import shutil

import pytest
from tests.support.ranks.layouts import MODELS, assert_same_run

from cost_aware_trainer.contract import DegreesPlan, Recompute, Sharding

LAYOUTS = {
    "one": (DegreesPlan(), {}),
    "data": (DegreesPlan(data=2), {}),
    "zero3": (DegreesPlan(data=2), {"sharding": Sharding.ZERO3, "recompute": Recompute.FULL}),
    "all": (DegreesPlan(data=2, tensor=2, pipeline=2), {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_the_same_and_every_step_is_reported_once_and_in_order(pool, plan_of, reference, name):
    degrees, strategy = LAYOUTS[name]
    plan = plan_of(degrees, **strategy)
    run = pool.run(degrees.ranks, "late", case="train", plan=plan.to_json())[0]
    assert_same_run(run, reference(MODELS[4]))
    assert [step["step"] for step in run["steps"]] == list(range(1, plan.steps + 1))
    for step in run["steps"]:
        assert sum(step["seconds"].values()) == pytest.approx(step["step_seconds"])
        assert step["seconds"]["compute"] > 0
        assert step["overlapped_seconds"] >= 0
    assert [step["step"] for step in run["steps"] if step["heldout_loss"] is not None] == [10, 20]


def test_a_stop_is_seen_a_step_later_and_the_run_goes_on_from_its_checkpoint_as_if_undisturbed(
    pool, plan_of, reference
):
    plan = plan_of(DegreesPlan(data=2)).to_json()
    first = pool.run(2, "late", case="train", plan=plan, stop_after=6)[0]
    stopped = first["result"]["step"]
    assert [step["step"] for step in first["steps"]] == list(range(1, stopped + 1))
    assert stopped in (7, 8)
    run = pool.run(2, "late", case="train", plan=plan)[0]
    assert run["loaded"] == first["checksums"]
    assert [step["step"] for step in run["steps"]] == list(range(stopped + 1, 21))
    run["steps"] = first["steps"] + run["steps"]
    assert_same_run(run, reference(MODELS[4]))


def test_a_run_changes_its_layout_in_living_processes_and_is_the_same_run(pool, plan_of, reference, tmp_path):
    ways = [DegreesPlan(data=4), DegreesPlan(tensor=2, pipeline=2), DegreesPlan(data=2, tensor=2)]
    first, *others = (plan_of(degrees, folder=tmp_path / "run") for degrees in ways)
    successors = {4 * number: plan.to_json() for number, plan in enumerate(others, start=1)}
    run = pool.run(4, "late", case="reconfigure", plan=first.to_json(), successors=successors)[0]
    assert_same_run(run, reference(MODELS[4]))
    assert {step["attempt"] for step in run["steps"]} == {0, 1, 2}


def test_a_step_reads_the_vote_of_the_step_before_and_nothing_else(pool, plan_of):
    plan = plan_of(DegreesPlan(data=2), steps=30)
    for rank in pool.run(2, "late", case="host_reads", plan=plan.to_json(), steps=3):
        for places in rank:
            assert len(places) == 1, places
            assert places[0].startswith("votes.py")


def test_a_copy_that_is_made_behind_the_next_step_holds_the_state_of_its_own(pool, plan_of, tmp_path):
    def plan(folder, interval_seconds):
        made = plan_of(DegreesPlan(data=2), folder=tmp_path / folder)
        checkpoint = dataclasses.replace(made.checkpoint, interval_seconds=interval_seconds, keep=99)
        return dataclasses.replace(made, checkpoint=checkpoint).to_json()

    pool.run(2, "late", case="train", plan=plan("late", 0.001))
    saved = {int(folder.name.removeprefix("step-")): folder for folder in (tmp_path / "late").glob("step-*")}
    chosen = sorted(saved)[1]
    assert 1 < chosen < 18, "saved behind later steps"
    for step, folder in saved.items():
        if step > chosen:
            shutil.rmtree(folder)
    at_once = pool.run(2, "train", plan=plan("at once", 3600.0), stop_after=chosen)[0]
    assert at_once["result"]["step"] == chosen
    found = pool.run(2, "train", plan=plan("late", 3600.0), stop_after=1)[0]
    assert found["loaded"] == at_once["checksums"]


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "a step late"])
@pytest.mark.parametrize(
    ("degrees", "strategy"), [(DegreesPlan(data=2), {}), (DegreesPlan(data=2), {"sharding": Sharding.ZERO3})]
)
def test_a_gradient_that_is_not_finite_changes_no_weight_and_the_error_names_its_step(
    pool, plan_of, degrees, strategy, behind
):
    plan = plan_of(degrees, **strategy)
    for said, is_finite, reported in pool.run(2, "diverge", plan=plan.to_json(), at_step=7, behind=behind):
        assert said.startswith("step 7: loss ")
        assert "gradient norm nan: not finite; the checkpoint of step 0 is kept" in said
        assert is_finite
        assert reported in ((6, 0) if not behind else (6, 5, 0))


def test_a_session_reports_every_step_once_and_in_order_the_last_one_too(pool, tmp_path):
    lines, losses = pool.run(2, "late_session", folder=str(tmp_path / "run"), steps=7)[0]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["loss"] for line in lines] == pytest.approx(losses)
    for line in lines:
        assert sum(line["seconds"].values()) == pytest.approx(line["step_seconds"])
