"""Commands about jobs that are there, over a store: what they change, what they say, and how they end."""

import asyncio
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from rich.console import Console
from tests.support import ROOT

from cost_aware_operator.api import KIND
from cost_aware_operator.api.job import JobKey
from cost_aware_operator.cli.foresee.manifest import ManifestError, read_job
from cost_aware_operator.cli.jobs import changing, events, listing, status, submit
from cost_aware_operator.engines.local.cluster import LocalCluster
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.engines.local.user import LocalUser

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
KEY = JobKey("team", "byte-gpt")
STATUS = {
    "state": "Running",
    "message": "training",
    "attempt": 1,
    "cost": {"accruedUSD": 1.5, "spent": "$1.5000", "hourlyUSD": 6.12, "byCause": {}},
}


@pytest.fixture
def store() -> ObjectStore:
    numbers = itertools.count(1)
    return ObjectStore(lambda: NOW, lambda: f"uid-{next(numbers)}")


@pytest.fixture
def user(store: ObjectStore) -> LocalUser:
    return LocalUser(store)


def document() -> dict[str, Any]:
    made = read_job(str(ROOT / "examples/byte-gpt.yaml"))
    return made | {"metadata": {"name": KEY.name, "namespace": KEY.namespace}}


def made(user: LocalUser) -> dict[str, Any]:
    return asyncio.run(user.submit(document()))


def test_submitting_makes_the_job_once_and_says_what_to_do_where_there_is_one(user: Any, capsys: Any) -> None:
    assert asyncio.run(submit.submit(user, document())) == 0
    assert "team/byte-gpt: is submitted; `catj watch byte-gpt -n team`" in capsys.readouterr().out
    assert asyncio.run(submit.submit(user, document())) == 2
    assert "there is a job of this name: delete it first, or write another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"metadata": {}}, "metadata.name: is missing"),
        ({"spec": {"model": {"layerz": 2}}}, "unknown field; did you mean layers?"),
        ({"kind": "Pod"}, "expected one CostAwareTrainingJob, found 0"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused_before_anybody_is_asked(
    change: dict[str, Any], says: str, tmp_path: Any
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document() | change))
    with pytest.raises(ManifestError, match=says):
        read_job(str(file))


def test_suspending_resuming_and_deleting_change_the_job_and_say_so(user: Any, store: Any, capsys: Any) -> None:
    made(user)
    stored = ObjectKey(KIND, KEY.namespace, KEY.name)
    for verb, suspended in (("suspend", True), ("resume", False)):
        assert asyncio.run(changing.change(user, KEY, verb)) == 0
        assert store.get(stored)["spec"]["suspend"] is suspended
    assert asyncio.run(changing.change(user, KEY, "delete")) == 0
    assert store.get(stored) is None
    assert "checkpoints stay on the volume" in capsys.readouterr().out
    for verb in ("suspend", "resume", "delete"):
        assert asyncio.run(changing.change(user, KEY, verb)) == 3
        assert capsys.readouterr().out == "team/byte-gpt: there is no such job\n"


def test_a_list_has_figures_at_eighty_columns_and_all_where_asked_for(
    user: Any, store: Any, capsys: Any, monkeypatch: Any
) -> None:
    made(user)
    found = asyncio.run(user.jobs(None))
    found[0]["status"] = STATUS
    strange = found[0] | {"status": {"state": "Unheard of"}, "metadata": found[0]["metadata"] | {"name": "strange"}}
    now = NOW + timedelta(hours=7)
    listing.print_jobs([*found, strange], wide=True, now=now)
    wide = capsys.readouterr().out
    for figure in ("team/byte-gpt", "Running", "1.5000", "6.12", "7h", "training", "its status is of another version"):
        assert figure in wide, figure
    monkeypatch.setattr("cost_aware_operator.cli.screen.PIPE_COLUMNS", 80)
    listing.print_jobs(found, wide=False, now=now)
    narrow = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 80
    assert {"team/byte-gpt", "Running", "1.5000"} <= set(narrow.split())
    listing.print_jobs([], wide=False, now=now)
    assert capsys.readouterr().out == "there are no jobs\n"


def test_lists_are_read_by_machines_too(user: Any) -> None:
    made(user)
    found = asyncio.run(user.jobs("team"))
    assert json.loads(listing.text_of(found, "json"))["items"][0]["metadata"]["name"] == KEY.name
    assert yaml.safe_load(listing.text_of(found, "yaml")) == json.loads(listing.text_of(found, "json"))
    assert asyncio.run(user.jobs("another")) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (45, "45s"), (60, "1m"), (7199, "1h"), (86400, "1d"), (400 * 86400, "400d")]
)
def test_ages_have_one_unit(seconds: float, text: str) -> None:
    assert listing.age_of(seconds) == text


def test_events_come_oldest_first_and_only_of_the_job(user: Any, store: Any, capsys: Any) -> None:
    for number, (name, reason) in enumerate([("byte-gpt", "Second"), ("other", "Not"), ("byte-gpt", "First")]):
        at = (NOW - timedelta(minutes=number)).isoformat()
        store.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"event-{number}", "namespace": "team"},
                "involvedObject": {"kind": KIND, "name": name, "namespace": "team"},
                "reason": reason,
                "message": "[bold]as it is[/bold]",
                "type": "Warning",
                "lastTimestamp": at,
            },
            "test",
        )
    found = asyncio.run(user.events(KEY))
    assert [event["reason"] for event in found] == ["First", "Second"]
    events.print_events(found)
    said = capsys.readouterr().out
    assert said.index("First") < said.index("Second")
    assert said.count("[bold]as it is[/bold]") == 2


@pytest.mark.parametrize("output", ["text", "json", "yaml"])
def test_a_status_is_shown_in_every_form_and_its_absence_too(store: Any, capsys: Any, output: str) -> None:
    cluster, screen = LocalCluster(store), Console(width=100)
    assert asyncio.run(status.show(cluster, KEY, screen, output)) == 3
    job = asyncio.run(LocalUser(store).submit(document()))
    store.apply_status({**job, "status": STATUS}, "test")
    capsys.readouterr()
    assert asyncio.run(status.show(cluster, KEY, screen, output)) == 0
    said = capsys.readouterr().out
    if output == "text":
        assert "Running" in said
    else:
        read = json.loads(said) if output == "json" else yaml.safe_load(said)
        assert read["cost"]["accruedUSD"] == 1.5
