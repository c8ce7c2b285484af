"""Bills: found by uid, bounded in number without losing a dollar, and restored from a backup."""

from __future__ import annotations

import io
import json
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.factories.facts import job

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.cli.jobs.costs import add_arguments, costs
from cost_aware_operator.control.reading import bills as module
from cost_aware_operator.control.reading.bills import LABEL_BILL, OLDER, Bills, bill_name, trains
from cost_aware_operator.control.reading.unreadable_record import RecordUnreadableError
from cost_aware_operator.engines.cluster import ConflictError
from cost_aware_operator.engines.local.cluster import LocalCluster
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.ledger.ledger import Cause, LedgerState

START = datetime(2026, 1, 1, tzinfo=UTC)
WHERE = "operators"


@pytest.fixture
def store() -> ObjectStore:
    numbers = count(1)
    return ObjectStore(lambda: START, lambda: f"uid-{next(numbers)}")


def bill(number: int, usd: float = 1.0, closed: bool = True, **over: object) -> Bill:
    at = START + timedelta(minutes=number)
    made = Bill(
        uid=f"{number:04d}",
        namespace="team",
        name=f"gpt-{number % 3}",
        opened_at=at,
        closed_at=at if closed else None,
        ledger=LedgerState(usd={Cause.PRODUCTIVE: usd}),
    )
    return made.model_copy(update=over)


async def said(store: ObjectStore, *options: str) -> tuple[int, str]:
    parser = ArgumentParser()
    add_arguments(parser)
    arguments: Namespace = parser.parse_args(["--operator-namespace", WHERE, *options])
    screen = io.StringIO()
    code = await costs(LocalCluster(store), arguments, Console(file=screen, width=400))
    return code, screen.getvalue()


async def test_the_number_of_closed_bills_is_bounded_and_no_dollar_is_lost(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSED_KEPT", 5)
    monkeypatch.setattr(module, "SWEPT_EVERY", 2)
    bills = Bills(LocalCluster(store), WHERE)
    for number in range(20):
        stored = await bills.save(bill(number, closed=False), None)
        await bills.save(bill(number), stored.version)
    kept = list(store.list("ConfigMap", WHERE))
    assert len([d for d in kept if LABEL_BILL in d["metadata"]["labels"]]) <= 5 + 2
    code, text = await said(store, "--closed")
    assert code == 0
    assert "in all $20.00" in text
    assert await bills.open_keys() == frozenset()


async def test_a_sum_that_a_leader_wrote_before_it_died_is_not_added_twice() -> None:
    once = module.with_sum({}, bill(1))
    assert module.with_sum(once, bill(1)) == once
    assert module.with_sum(once, bill(2))["team"]["usd"] == 2.0


async def test_open_bills_are_found_again_by_the_next_operator(store: ObjectStore) -> None:
    await Bills(LocalCluster(store), WHERE).save(bill(1, closed=False), None)
    after = Bills(LocalCluster(store), WHERE)
    assert await after.open_keys() == {JobKey("team", "gpt-1")}
    assert await after.open_of(JobKey("team", "gpt-1")) == {"0001"}


async def test_a_stale_leader_cannot_write_a_bill(store: ObjectStore) -> None:
    bills = Bills(LocalCluster(store), WHERE)
    first = await bills.save(bill(1, closed=False), None)
    await bills.save(bill(1, usd=2.0, closed=False), first.version)
    with pytest.raises(ConflictError):
        await bills.save(bill(1, usd=0.0, closed=False), first.version)


async def test_a_bill_that_cannot_be_read_is_named_and_left(store: ObjectStore) -> None:
    bills = Bills(LocalCluster(store), WHERE)
    await bills.save(bill(1), None)
    key = ObjectKey("ConfigMap", WHERE, bill_name("0001"))
    store.patch(key, {"data": {"bill.json": '{"uid": 5}'}}, "somebody")
    with pytest.raises(RecordUnreadableError, match="operators/catj-bill-0001"):
        await bills.read("0001")
    code, text = await said(store, "--closed")
    assert code == 1
    assert "'catj-bill-0001' in namespace 'operators' is no bill" in text


async def test_fields_and_causes_of_a_newer_operator_are_kept_and_counted(store: ObjectStore) -> None:
    bills = Bills(LocalCluster(store), WHERE)
    await bills.save(bill(1), None)
    key = ObjectKey("ConfigMap", WHERE, bill_name("0001"))
    text = json.loads(bill(1).model_dump_json())
    text |= {"ofTomorrow": 1, "ledger": {**text["ledger"], "usd": {"productive": 1.0, "of_tomorrow": 2.0}, "later": 3}}
    store.patch(key, {"data": {"bill.json": json.dumps(text)}}, "somebody")
    stored = await bills.read("0001")
    assert stored is not None
    assert stored.bill.ledger.accrued_usd == 3.0
    await bills.save(stored.bill, stored.version)
    document = store.get(key)
    assert document is not None
    written = json.loads(document["data"]["bill.json"])
    assert (written["ofTomorrow"], written["ledger"]["later"]) == (1, 3)


async def test_all_bills_are_backed_up_and_restored_by_one_command(store: ObjectStore, tmp_path: Path) -> None:
    bills = Bills(LocalCluster(store), WHERE)
    for number in range(3):
        await bills.save(bill(number, closed=number > 0), None)
    file = tmp_path / "bills.json"
    assert (await said(store, "--backup", str(file)))[0] == 0
    before = await said(store, "--closed")
    store.delete(ObjectKey("ConfigMap", WHERE, bill_name("0001")))
    assert await said(store, "--closed") != before
    code, text = await said(store, "--restore", str(file))
    assert (code, "1 bills are made again" in text, "2 were there" in text) == (0, True, True)
    assert await said(store, "--closed") == before
    code, text = await said(store)
    assert "team/gpt-0" in text
    file.write_text("[]")
    code, text = await said(store, "--restore", str(file))
    assert code == 1
    assert "not a backup of version 1" in text


async def test_only_what_was_done_to_its_end_and_deleted_in_its_time_is_done_before(store: ObjectStore) -> None:
    given = job()
    named = {"name": "gpt", "trains": trains(given)}
    bills = Bills(LocalCluster(store), WHERE)
    for number, over in enumerate(
        [
            {"outcome": "Succeeded"},
            {"outcome": "Failed", "expired": True},
            {"outcome": "Succeeded", "expired": True, "trains": "another"},
            {"outcome": "Succeeded", "expired": True, "namespace": "elsewhere"},
        ]
    ):
        await bills.save(bill(number, **{**named, **over}), None)
    assert await bills.done_before(given) is None
    await bills.save(bill(9, outcome="Succeeded", expired=True, **named), None)
    found = await bills.done_before(given)
    assert found is not None
    assert found.uid == "0009"
    assert await Bills(LocalCluster(store), WHERE).done_before(job(trainer={"config": {"steps": 200}})) is None


def test_the_sums_are_no_bill() -> None:
    assert not OLDER.startswith(bill_name(""))
