"""What the version before has written is read, and written the same: records, messages, a rank's metrics and its pulse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cost_aware_operator.control.reading.run_record import KEY_RECORD, RunRecord, from_data, to_data
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.observing.samples import parse_rank
from cost_aware_trainer import contract
from cost_aware_trainer.contract import LaunchStage, Message, Phase
from cost_aware_trainer.contract.heartbeat import Pulse, read_pulses

STORED = Path(__file__).parent / "golden"
RECORDS = sorted((STORED / "records").iterdir())
OLDER = sorted((STORED / "records-before-books").iterdir())
BILLS = sorted((STORED / "bills").glob("*.json"))
MESSAGES = sorted((STORED / "messages").glob("*.json"))


def data_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text().removesuffix("\n") for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_record_of_the_version_before_is_read_and_written_the_same(folder: Path) -> None:
    data = data_of(folder)
    assert to_data(*from_data(data)) == data


@pytest.mark.parametrize("folder", OLDER, ids=lambda folder: folder.name)
def test_a_record_without_a_secret_s_name_is_read(folder: Path) -> None:
    newer = STORED / "records" / folder.name
    record, order, result = from_data(data_of(folder))
    expected, *rest = from_data(data_of(newer))
    assert (record, order, result) == (expected.model_copy(update={"token": None}), *rest)


def test_records_that_are_kept_have_every_field_at_something_else_than_its_default() -> None:
    found = [RunRecord.model_validate_json(data_of(folder)[KEY_RECORD]) for folder in RECORDS]
    for name, declared in RunRecord.model_fields.items():
        assert any(getattr(record, name) != declared.get_default() for record in found), name


def test_a_record_without_what_came_later_is_read_with_defaults() -> None:
    stored = json.loads(data_of(STORED / "records/fresh")[KEY_RECORD])
    first = {name: stored[name] for name in ("attempt", "attempt_at", "members", "started_at")}
    record, order, result = from_data({KEY_RECORD: json.dumps(first)})
    assert (record.attempt, record.members, record.plan, order, result) == (
        1,
        {0: "pod-0", 1: "pod-1"},
        None,
        None,
        None,
    )


@pytest.mark.parametrize("path", BILLS, ids=lambda path: path.stem)
def test_a_bill_of_the_version_before_is_read_and_written_the_same(path: Path) -> None:
    text = path.read_text().removesuffix("\n")
    assert Bill.model_validate_json(text).model_dump_json() == text


def test_bills_that_are_kept_have_every_field_at_something_else_than_its_default() -> None:
    found = [Bill.model_validate_json(path.read_text()) for path in BILLS]
    for name, declared in Bill.model_fields.items():
        assert any(getattr(bill, name) != declared.get_default() for bill in found), name


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: path.stem)
def test_a_message_of_the_version_before_is_read_and_written_the_same(path: Path) -> None:
    kept = json.loads(path.read_text())
    message = getattr(contract, kept["kind"]).from_json(kept["text"])
    assert message.to_json() == kept["text"]


def test_every_message_of_the_contract_is_kept() -> None:
    parts = {contract.BatchPlan, contract.CheckpointPlan, contract.DegreesPlan, contract.ModelPlan}
    parts |= {contract.OptimizerPlan, contract.StrategyPlan}
    whole = {kind.__name__ for kind in Message.__subclasses__() if getattr(contract, kind.__name__, None) is kind}
    whole -= {kind.__name__ for kind in parts}
    assert {json.loads(path.read_text())["kind"] for path in MESSAGES} == whole


def test_metrics_of_a_rank_of_the_version_before_are_read() -> None:
    sample = parse_rank((STORED / "rank_metrics.txt").read_text())
    assert (sample.rank, sample.attempt, sample.step, sample.total_steps, sample.steps) == (1, 3, 41, 100, 21)
    assert (sample.checkpoint_step, sample.resumed_step, sample.loss, sample.heldout_loss) == (40, 20, 1.5, 1.5)
    assert (sample.tokens, sample.model_flops, sample.communication_bytes) == (86016, 1.5e12, 2e9)
    assert (sample.memory_bytes, sample.step_seconds, sample.network_bytes_per_second) == (2**30, 2.75, 1.25e9)
    assert sample.phase_seconds == dict.fromkeys(Phase, 0.25)
    assert sample.stage_seconds == dict.fromkeys(LaunchStage, 0.5)


def test_a_pulse_of_the_version_before_is_read(tmp_path: Path) -> None:
    shutil.copy(STORED / "pulse-3", tmp_path)
    assert read_pulses(tmp_path) == [Pulse(3, 4321, 1234.5, 41, "communication", True, 21)]
