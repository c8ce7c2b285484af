"""The state folder: what was answered is there after a kill, and what cannot be used is told and left as it is."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_cases import CASES, Case

from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.cluster import LocalCluster
from cost_aware_operator.engines.local.state_folder import DATABASE, FORM, StateFolder, StateFolderError
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = ("ConfigMap", "Pod", "Job", "Event")


def uids() -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"uid-{next(numbers)}"


def opened(path: Path, new_uid: Callable[[], str] | None = None, **options: Any) -> StateFolder:
    return StateFolder(path, lambda: NOW, new_uid or uids(), **options)


def document(kind: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "team"}, **rest}


def contents(store: ObjectStore) -> list[Any]:
    found = [one for kind in KINDS for one in store.list(kind)]
    return [store.version, *((one, store.owners(ObjectKey.of(one))) for one in found)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    with opened(tmp_path / ".catj") as made:
        yield made


class FolderWorld:
    """A namespace of a store, in the hands of somebody else."""

    namespace = "team"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, document: dict[str, Any]) -> None:
        self._store.create(document, "somebody")

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        return self._store.get(ObjectKey(kind, self.namespace, name))

    def patch(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        self._store.patch(ObjectKey(kind, self.namespace, name), patch, "somebody")

    def remove(self, kind: str, name: str) -> None:
        self._store.delete(ObjectKey(kind, self.namespace, name))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_stored_store_is_an_engine_as_the_others_are(case: Case, folder: StateFolder) -> None:
    await case(LocalCluster(folder.store), FolderWorld(folder.store))


CALLS = st.tuples(
    st.sampled_from(("create", "apply", "replace", "patch", "status", "delete", "evict", "forced")),
    st.sampled_from(KINDS),
    st.sampled_from(("a", "b")),
    st.dictionaries(st.sampled_from(("x", "y")), st.sampled_from((1, 2.5, None, "t\ud800", {"z": [1]})), max_size=2),
    st.sampled_from(("one", "two")),
    st.sampled_from((None, "ConfigMap", "Job")),
)


def call(store: ObjectStore, made: tuple[Any, ...]) -> None:
    verb, kind, name, data, writer, owner_kind = made
    key, written = ObjectKey(kind, "team", name), document(kind, name, data=data, spec={"nodeName": "n"})
    owner = store.get(ObjectKey(owner_kind, "team", "a")) if owner_kind else None
    if owner is not None:
        written["metadata"]["ownerReferences"] = [{"uid": owner["metadata"]["uid"], "kind": owner_kind}]
    try:
        match verb:
            case "create" | "apply" | "replace":
                getattr(store, verb)(written, writer)
            case "patch":
                store.patch(key, {"data": data}, writer)
            case "status":
                store.patch(key, {"status": data}, writer, only_status=True)
            case "evict" if kind == "Pod":
                store.evict(key)
            case _:
                store.delete(key, grace_seconds=0 if verb == "forced" else None)
    except ApiError:
        pass


@settings(max_examples=25, deadline=None)
@given(calls=st.lists(CALLS, max_size=12))
def test_after_any_calls_what_is_read_again_is_what_a_store_in_memory_has(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[Any, ...]]
) -> None:
    path, memory, new_uid = tmp_path_factory.mktemp("calls"), ObjectStore(lambda: NOW, uids()), uids()
    with opened(path / "live", new_uid) as live:
        for number, made in enumerate(calls):
            call(memory, made)
            call(live.store, made)
            # what a killed process leaves: the files as they are, with the log that nobody has put away
            copy = path / str(number)
            shutil.copytree(path / "live", copy)
            with opened(copy) as again:
                assert contents(again.store) == contents(live.store) == contents(memory)


KILLED = """
import sys
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from cost_aware_operator.engines.local.state_folder import StateFolder
store = StateFolder(Path(sys.argv[1]), lambda: datetime(2026, 1, 1, tzinfo=UTC), map("uid-{}".format, count()).__next__).store
for number in count():
    store.apply({"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"n": number, "twice": number}}, "writer")
    print(number, flush=True)
"""


def test_a_killed_process_loses_no_write_that_it_told_of(tmp_path: Path) -> None:
    path = tmp_path / ".catj"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 20:
                process.send_signal(signal.SIGKILL)
                break
        told = [int(line) for line in process.stdout] or [20]
    with opened(path) as folder:
        found = folder.store.get(ObjectKey("ConfigMap", "", "c"))
    assert found is not None
    assert found["data"]["n"] == found["data"]["twice"] >= told[-1]


def test_a_second_process_is_told_who_has_the_folder(folder: StateFolder) -> None:
    with pytest.raises(StateFolderError, match=rf"{folder.path} is in use by process {os.getpid()}: "):
        opened(folder.path)


def test_a_closed_folder_is_free(tmp_path: Path) -> None:
    for _ in range(2):
        opened(tmp_path / "f").close()


def test_a_folder_of_a_newer_form_is_refused_and_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute(f"PRAGMA user_version = {FORM + 1}")
    before = (tmp_path / DATABASE).read_bytes()
    with pytest.raises(StateFolderError, match=f"has form {FORM + 1}.*newer catj"):
        opened(tmp_path)
    assert (tmp_path / DATABASE).read_bytes() == before


@pytest.mark.parametrize("damage", ["text", "page", "row"])
def test_a_damaged_file_is_told_and_left(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as folder:
        for number in range(200):
            folder.store.create(document("ConfigMap", f"c-{number}"), "one")
    path = tmp_path / DATABASE
    if damage == "text":
        path.write_text("not a database " * 20)
    elif damage == "page":
        data = bytearray(path.read_bytes())
        data[4096:12288] = b"\xff" * 8192
        path.write_bytes(data)
    else:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE objects SET document = '{' WHERE name = 'c-7'")
    before = path.read_bytes()
    with pytest.raises(StateFolderError, match=r"cannot be used.*from a copy, or move it away"):
        opened(tmp_path)
    assert path.read_bytes() == before


def test_a_path_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFolderError, match="make it a folder that you may write to"):
        opened(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to what is read-only")
def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for path in (*tmp_path.iterdir(), tmp_path):
        path.chmod(0o500)
    with pytest.raises(StateFolderError, match="that you may write to"):
        opened(tmp_path)


FULL = """
import resource, signal, sys
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.state_folder import StateFolder
from cost_aware_operator.engines.local.store import ObjectKey
folder = StateFolder(Path(sys.argv[1]), lambda: datetime(2026, 1, 1, tzinfo=UTC), map("uid-{}".format, count()).__next__)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
for number in count():
    try:
        folder.store.create({"kind": "ConfigMap", "metadata": {"name": str(number)}, "data": "x" * 9000}, "writer")
    except ApiError as error:
        assert folder.store.get(ObjectKey("ConfigMap", "", str(number))) is None
        print(number, folder.store.version, error.status)
        break
"""


def test_a_write_that_finds_no_room_is_refused_in_memory_and_on_disk(tmp_path: Path) -> None:
    path = tmp_path / ".catj"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    written, version, status = map(int, done.stdout.split())
    assert (version, status) == (written, 507)
    with opened(path) as folder:
        assert len(list(folder.store.list("ConfigMap"))) == folder.store.version == written


def test_a_folder_that_was_removed_in_use_takes_no_writes(tmp_path: Path) -> None:
    with opened(tmp_path / ".catj") as folder:
        shutil.rmtree(folder.path)
        with pytest.raises(ApiError, match="was removed or replaced while in use"):
            folder.store.create(document("ConfigMap", "c"), "one")
        assert folder.store.get(ObjectKey("ConfigMap", "team", "c")) is None


def test_of_events_the_newest_are_kept_before_and_after_opening(tmp_path: Path) -> None:
    for first in (0, 5):
        with opened(tmp_path, events_kept=3) as folder:
            for number in range(first, first + 5):
                folder.store.create(document("Event", f"e-{9 - number}"), "one")
            found = {event["metadata"]["name"] for event in folder.store.list("Event")}
            assert found == {f"e-{9 - number}" for number in range(first + 2, first + 5)}


def test_dependents_that_a_killed_deletion_left_go_when_the_folder_is_opened(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        orphan = document("ConfigMap", "c")
        orphan["metadata"]["ownerReferences"] = [{"uid": "gone", "kind": "Job", "name": "j"}]
        folder.store.create(orphan, "one")
    with opened(tmp_path) as folder:
        assert list(folder.store.list("ConfigMap")) == []


def test_what_is_no_json_is_refused(folder: StateFolder) -> None:
    with pytest.raises(ApiError, match="422"):
        folder.store.create(document("ConfigMap", "c", data={"at": NOW}), "one")
