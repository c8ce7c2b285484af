"""The log of steps, which outlives the processes that write it."""

import json
from pathlib import Path

import pytest

from cost_aware_trainer.contract.rank_environment import StepsLog


@pytest.mark.parametrize("torn", ["", '{"step": 2, "loss": 0.27', "x" * 3])
def test_a_line_cut_short_by_a_kill_does_not_spoil_the_next(tmp_path, torn):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    log = StepsLog(path)
    log.write({"step": 2})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_a_first_line_cut_short_is_dropped_too(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"st')
    log = StepsLog(path)
    log.write({"step": 1})
    log.close()
    assert path.read_text() == '{"step": 1}\n'


def test_a_full_volume_costs_lines_of_the_log_and_not_the_run(caplog):
    log = StepsLog(Path("/dev/full"))
    for step in range(3):
        log.write({"step": step})
    log.close()
    assert [record.message for record in caplog.records] == [
        "STEPS LOG NOT WRITTEN: /dev/full: No space left on device; training goes on, and lines are missing"
    ]
