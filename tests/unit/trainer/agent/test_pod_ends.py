"""When pods ended, as they leave it on the volume: never in the way of an end, never more than can be sent."""

import os
import time
from dataclasses import replace

import pytest

from cost_aware_trainer.agent import pod_ends as words
from cost_aware_trainer.agent.pod_ends import KEPT_SECONDS, MOST_ENDS, last_words, leave_result, leave_word
from cost_aware_trainer.contract import (
    MAX_MESSAGE_BYTES,
    MAX_TERMINATION_BYTES,
    AgentPhase,
    PodEnd,
    PodEnds,
    RunResult,
)


def test_words_are_read_back_the_newest_first(tmp_path):
    folder = tmp_path / "run" / "pods"
    for uid, at in (("a", 10.5), ("b", 30.0), ("c", 20.0)):
        leave_word(folder, uid, at)
    assert [(end.pod_uid, end.ended_at) for end in last_words(folder).ends] == [("b", 30.0), ("c", 20.0), ("a", 10.5)]


@pytest.mark.parametrize("folder", [None, "missing"])
def test_where_nobody_left_a_word_there_is_none(tmp_path, folder):
    assert last_words(folder and tmp_path / folder) == PodEnds()


def test_a_pod_that_does_not_know_its_uid_or_a_folder_leaves_nothing(tmp_path):
    leave_word(None, "a", 1.0)
    leave_word(tmp_path, "", 1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_word_that_cannot_be_read_costs_no_other(tmp_path):
    leave_word(tmp_path, "a", 1.0)
    (tmp_path / "b.json").write_text('{"pod_uid": "b"')
    (tmp_path / "c.json").write_bytes(b"\xff")
    assert last_words(tmp_path).ends == (PodEnd(pod_uid="a", ended_at=1.0),)


def test_old_words_are_tidied_up_by_the_next(tmp_path):
    now = time.time()
    leave_word(tmp_path, "old", now)
    os.utime(tmp_path / "old.json", (now - KEPT_SECONDS - 60,) * 2)
    leave_word(tmp_path, "new", now)
    assert [end.pod_uid for end in last_words(tmp_path).ends] == ["new"]


def test_an_answer_is_never_longer_than_a_message_may_be(tmp_path):
    for n in range(MOST_ENDS + 5):
        (tmp_path / f"{n}.json").write_text(PodEnd(pod_uid=f"{n:036d}", ended_at=1.8e9 + n).to_json())
    said = last_words(tmp_path)
    assert len(said.ends) == MOST_ENDS
    assert said.ends[0].ended_at == 1.8e9 + MOST_ENDS + 4
    assert len(said.to_json()) < MAX_MESSAGE_BYTES


def test_while_a_read_hangs_others_are_answered_at_once(tmp_path):
    leave_word(tmp_path, "a", 1.0)
    with words.only_reader:
        assert last_words(tmp_path) == PodEnds()
    assert len(last_words(tmp_path).ends) == 1


def test_a_volume_that_refuses_or_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    leave_word(tmp_path / "file" / "pods", "a", 1.0)
    monkeypatch.setattr(words, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(words, "write_atomically", lambda *_: time.sleep(3))
    began = time.monotonic()
    leave_word(tmp_path, "a", 1.0)
    assert time.monotonic() - began < 2


RESULT = RunResult(outcome=AgentPhase.COMPLETED, step=9, total_steps=9, loss=1.5, samples=72, samples_checksum="0" * 16)


def test_a_result_is_left_where_the_kubelet_looks_and_nowhere_else(tmp_path):
    file = tmp_path / "termination-log"
    leave_result(file, RESULT)
    assert not file.exists(), "outside a pod"
    file.touch()
    leave_result(file, None)
    assert file.read_text() == ""
    leave_result(file, RESULT)
    assert RunResult.from_json(file.read_text()) == RESULT


def test_a_result_is_never_cut_in_the_middle_by_what_the_kubelet_keeps(tmp_path):
    file = tmp_path / "termination-log"
    file.touch()
    leave_result(file, replace(RESULT, message="ä" * MAX_TERMINATION_BYTES))
    assert len(file.read_bytes()) < MAX_TERMINATION_BYTES
    assert RunResult.from_json(file.read_text()) == RESULT


def test_a_result_that_cannot_be_written_does_not_hold_up_the_end(tmp_path):
    leave_result(tmp_path, RESULT)
