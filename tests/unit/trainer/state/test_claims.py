"""Who may publish and remove checkpoints in a folder, whatever else writes there."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.ranks.checkpoint_cases import alone

from cost_aware_trainer.state.checkpoint import CheckpointError
from cost_aware_trainer.state.claims import ClaimLostError, FolderClaim
from cost_aware_trainer.state.validation import InvalidRunError


@pytest.fixture
def claimed(tmp_path):
    def make(job, attempt=1):
        claim = FolderClaim(tmp_path, job, attempt)
        claim.take()
        return claim

    return make


def test_a_newer_attempt_takes_the_folder_and_the_older_one_has_lost_it(claimed, tmp_path):
    older, newer = claimed("a", 1), claimed("a", 2)
    newer.check()
    with pytest.raises(ClaimLostError, match="claimed by attempt 2"):
        older.check()
    with pytest.raises(ClaimLostError, match="claimed by attempt 2"):
        FolderClaim(tmp_path, "a", 1).take()


def test_the_same_attempt_started_again_takes_it_from_its_dead_self(claimed):
    dead, again = claimed("a", 1), claimed("a", 1)
    again.check()
    with pytest.raises(ClaimLostError):
        dead.check()


def test_another_job_may_take_a_folder_over_and_the_first_cannot_have_it_back(claimed, tmp_path):
    first, second = claimed("a", 7), claimed("b", 1)
    second.check()
    with pytest.raises(ClaimLostError, match="of the job of uid b"):
        first.check()
    with pytest.raises(InvalidRunError, match="went from this job to the job of uid b"):
        FolderClaim(tmp_path, "a", 8).take()
    claimed("b", 2).check()
    claimed("c", 1).check()
    with pytest.raises(InvalidRunError):
        FolderClaim(tmp_path, "a", 9).take()


def test_a_run_that_goes_on_in_its_process_takes_its_next_attempt_with_it(claimed, tmp_path):
    claim = claimed("a", 1)
    claim.check(attempt=2)
    claim.check()
    with pytest.raises(ClaimLostError):
        FolderClaim(tmp_path, "a", 1).take()


def test_an_attempt_that_lost_its_claim_does_not_get_it_back_under_its_next_number(claimed):
    first = claimed("a", 1)
    claimed("b", 1)
    with pytest.raises(ClaimLostError):
        first.check(attempt=2)


def test_a_run_by_hand_makes_no_claim_but_loses_its_folder_to_one(claimed, tmp_path):
    by_hand = claimed("", 0)
    by_hand.check()
    assert not (tmp_path / "claims").exists()
    claimed("a", 1)
    with pytest.raises(ClaimLostError):
        by_hand.check()


def test_of_many_that_claim_at_once_one_holds(claimed):
    with ThreadPoolExecutor(8) as pool:
        claims = [future.result() for future in [pool.submit(claimed, f"job-{number}") for number in range(8)]]
    holding = []
    for claim in claims:
        try:
            claim.check()
        except ClaimLostError:
            continue
        holding.append(claim)
    assert len(holding) == 1


def test_a_claim_that_a_power_cut_has_torn_is_held_by_nobody(claimed, tmp_path):
    claimed("a", 1)
    (path,) = (tmp_path / "claims").iterdir()
    path.write_text("")
    claimed("a", 1).check()


def test_where_there_are_no_hard_links_a_claim_is_made_by_exclusive_creation(claimed, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    first, second = claimed("a", 1), claimed("a", 2)
    second.check()
    with pytest.raises(ClaimLostError):
        first.check()
    assert {json.loads(path.read_text())["attempt"] for path in (tmp_path / "claims").iterdir()} == {1, 2}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "claims")


def test_a_stale_attempt_neither_publishes_nor_removes_nor_tidies(tmp_path):
    stale = alone(tmp_path, claim=("a", 1), keep=1)
    assert stale.resume() == 0
    stale.save(1)
    live = alone(tmp_path, claim=("a", 2), keep=3)
    assert live.resume() == 1
    live.save(2)
    with pytest.raises(CheckpointError, match=r"step 3 was not published: .* is claimed by attempt 2"):
        stale.save(3)
    stale.checkpointer.close()
    live.save(3)
    live.checkpointer.close()
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    with pytest.raises(CheckpointError, match="claimed by attempt 2"):
        alone(tmp_path, claim=("a", 1)).resume()


def test_an_older_attempt_that_writes_for_the_same_step_leaves_the_newer_one_s_files_alone(tmp_path):
    stale, live = alone(tmp_path, claim=("a", 1)), alone(tmp_path, claim=("a", 2))
    assert (stale.resume(), live.resume()) == (0, 0)
    live.save(5)
    with pytest.raises(CheckpointError):
        stale.save(5)
    again = alone(tmp_path, claim=("a", 3))
    assert again.resume() == 5
    for run in (stale, live, again):
        run.checkpointer.close()
