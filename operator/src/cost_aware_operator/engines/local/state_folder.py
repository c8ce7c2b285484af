"""The folder that holds all state of a local engine, so that a process that dies at any moment loses nothing it has answered.

The objects are in one SQLite file. Every write of the store is one transaction, which ends before the call returns. The
journal is not kept, and of events only the newest.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.local.fields import Owners
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore, Write

FORM = 1
"""Version of the file's form. A file of a later one is left alone."""
EVENTS_KEPT = 1000
"""Events in the store; the oldest go first."""
DATABASE = "state.sqlite"
LOCK = "lock"
_FULL_STATUS = 507
_MAGIC = b"SQLite format 3\x00"
_TABLES = (
    "CREATE TABLE objects (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,"
    " document TEXT NOT NULL, owners TEXT NOT NULL, UNIQUE (kind, namespace, name))",
    "CREATE TABLE store (version INTEGER NOT NULL)",
    "INSERT INTO store VALUES (0)",
    f"PRAGMA user_version = {FORM}",
)
_KEEP = (
    "INSERT INTO objects (kind, namespace, name, document, owners) VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (kind, namespace, name) DO UPDATE SET document = excluded.document, owners = excluded.owners"
)
_FORGET = "DELETE FROM objects WHERE kind = ? AND namespace = ? AND name = ?"


class StateFolderError(Exception):
    """The state folder cannot be used. The text says what is wrong, where, and what to do."""


class StateFolder:
    """An open state folder with its store. No other process can open it until it is closed, or this process has ended."""

    def __init__(
        self, path: Path, now: Callable[[], datetime], new_uid: Callable[[], str], *, events_kept: int = EVENTS_KEPT
    ) -> None:
        self.path = path
        self._lock = _locked(path)
        try:
            self._file = _StateFile(path)
            try:
                self.store = ObjectStore(now, new_uid, self._file)
                self._bound = _EventsBound(self.store, events_kept)
                # a process that died between a deletion and that of the dependents left them
                self.store.collect_garbage()
            except ApiError as error:
                self._file.close()
                raise StateFolderError(str(error)) from None
            except BaseException:
                self._file.close()
                raise
        except BaseException:
            os.close(self._lock)
            raise
        self.store.watchers.append(self._bound.heard)

    def __enter__(self) -> StateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets others open the folder; the store must not be written to any more."""
        if self._lock >= 0:
            self._file.close()
            os.close(self._lock)
            self._lock = -1


class _EventsBound:
    """Removes the oldest events once there are too many."""

    def __init__(self, store: ObjectStore, kept: int) -> None:
        self._store, self._kept = store, kept
        found = sorted(store.list("Event"), key=lambda event: int(event["metadata"]["resourceVersion"]))
        self._keys = deque(ObjectKey.of(event) for event in found)

    def heard(self, write: Write) -> None:
        key = write.request.key
        if key.kind != "Event" or write.refused:
            return
        if write.after is None:
            with suppress(ValueError):
                self._keys.remove(key)
        elif write.before is None:
            self._keys.append(key)
        while len(self._keys) > self._kept:
            try:
                self._store.delete(self._keys[0])
            except ApiError:
                # refused for now, and tried again with the next event
                return


class _StateFile:
    """The SQLite file, as a Storage."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DATABASE
        try:
            _refuse_other_forms(self._path)
            self._database = sqlite3.connect(self._path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(self._path, error) from error
        try:
            self._prepare()
            self._inode = self._path.stat().st_ino
        except (OSError, sqlite3.Error) as error:
            self._database.close()
            raise _unusable(self._path, error) from error
        except StateFolderError:
            self._database.close()
            raise

    def load(self) -> tuple[int, list[tuple[dict[str, Any], Owners]]]:
        """See `Storage`."""
        try:
            ((version,),) = self._database.execute("SELECT version FROM store")
            rows = self._database.execute("SELECT document, owners FROM objects ORDER BY id").fetchall()
            return version, [(json.loads(document), _owners_of(owners)) for document, owners in rows]
        except (sqlite3.Error, ValueError, TypeError, AttributeError) as error:
            raise _unusable(self._path, error) from error

    def plain(self, document: dict[str, Any]) -> dict[str, Any]:
        """See `Storage`."""
        try:
            result: dict[str, Any] = json.loads(json.dumps(document))
        except (TypeError, ValueError) as error:
            raise ApiError(422, f"the object is not JSON: {error}") from None
        return result

    def keep(self, version: int, key: ObjectKey, document: Mapping[str, Any] | None, owners: Owners) -> None:
        """See `Storage`."""
        named = (key.kind, key.namespace, key.name)
        if document is None:
            self._write(version, _FORGET, named)
        else:
            self._write(version, _KEEP, (*named, json.dumps(document), _owners_text(owners)))

    def close(self) -> None:
        """Closes the file."""
        with suppress(sqlite3.Error):
            self._database.close()

    def _prepare(self) -> None:
        database = self._database
        ((form,),) = database.execute("PRAGMA user_version")
        ((tables,),) = database.execute("SELECT count(*) FROM sqlite_master")
        if form > FORM:
            raise _newer(self._path, form)
        if not tables:
            # before the file has a write-ahead log, so that its form stands in its first page
            _transaction(database, [(statement, ()) for statement in _TABLES])
        elif form != FORM:
            raise sqlite3.DatabaseError("its tables are not those of a state folder")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        ((found,), *_) = database.execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        # a folder that cannot be written to shall be told now and not in the middle of a run
        _transaction(database, [("UPDATE store SET version = version", ())])

    def _write(self, version: int, statement: str, values: tuple[str, ...]) -> None:
        try:
            if self._path.stat().st_ino != self._inode:
                raise FileNotFoundError
        except OSError:
            raise ApiError(500, f"{self._path} was removed or replaced while in use: nothing can be saved") from None
        try:
            _transaction(self._database, [(statement, values), ("UPDATE store SET version = ?", (version,))])
        except sqlite3.Error as error:
            status = _FULL_STATUS if _is_full(error) else 500
            raise ApiError(status, f"{self._path}: not saved: {error}: {_advice(self._path, error)}") from error


def _transaction(database: sqlite3.Connection, statements: Iterable[tuple[str, tuple[object, ...]]]) -> None:
    database.execute("BEGIN IMMEDIATE")
    try:
        for statement, values in statements:
            database.execute(statement, values)
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _locked(folder: Path) -> int:
    """The folder's lock, as a file descriptor; makes the folder."""
    try:
        # Secrets are in it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        ignored = folder / ".gitignore"
        if not ignored.exists():
            ignored.write_text("*\n", encoding="utf-8")
    except BlockingIOError:
        text = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        holder = f"process {text}" if text.isdecimal() else "another process"
        raise StateFolderError(f"{folder} is in use by {holder}: end that first, or name another folder") from None
    except OSError as error:
        os.close(lock)
        raise _unusable(folder, error) from error
    return lock


def _refuse_other_forms(path: Path) -> None:
    """Reads the file's first page before SQLite may touch the file."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except FileNotFoundError:
        return
    if not head:
        return
    if len(head) < 100 or not head.startswith(_MAGIC):
        raise sqlite3.DatabaseError("file is not a database")
    form = int.from_bytes(head[60:64], "big")
    if form > FORM:
        raise _newer(path, form)


def _newer(path: Path, form: int) -> StateFolderError:
    return StateFolderError(
        f"{path} has form {form}, and this version of catj knows form {FORM}: it was left as it is; "
        "use the newer catj, or name another folder"
    )


def _unusable(path: Path, error: Exception) -> StateFolderError:
    said = " ".join(str(error).split())
    return StateFolderError(f"{path} cannot be used: {said}: {_advice(path, error)}")


def _is_full(error: Exception) -> bool:
    # a quota and a limit on a file's size are told as a write that failed
    full = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return getattr(error, "sqlite_errorcode", None) in full or getattr(error, "errno", None) in (ENOSPC, EDQUOT)


def _advice(path: Path, error: Exception) -> str:
    """What a reader can do."""
    if _is_full(error):
        return "free some space on its disk, or raise its quota, and try again"
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, OSError) or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return "make it a folder that you may write to, or name another folder"
    if code == sqlite3.SQLITE_BUSY:
        return "close the other program that has the file open"
    folder = path.parent if path.name == DATABASE else path
    return f"nothing was changed; put {folder} back from a copy, or move it away to begin with nothing"


def _owners_text(owners: Owners) -> str:
    return json.dumps({writer: sorted(map(list, fields)) for writer, fields in owners.items()})


def _owners_of(text: str) -> Owners:
    return {writer: frozenset(map(tuple, fields)) for writer, fields in json.loads(text).items()}
