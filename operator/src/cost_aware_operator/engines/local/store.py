"""Objects in memory under an API server's rules: versions, generations, owners of fields, refused writes, garbage collection.

What is left out: lists that are merged by a key, admission webhooks, finalizers that nobody asked for, and a schema's defaults.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from cost_aware_operator.api import KIND
from cost_aware_operator.engines.cluster import ApiError, ConflictError, owner_uids
from cost_aware_operator.engines.local.fields import Owners, applied, merge_patched, updated

JOURNAL_KEPT = 10_000
"""Writes that are remembered."""
WITH_STATUS = frozenset({KIND, "Job", "Pod", "Node"})
"""Kinds whose `status` is written by a call of its own, and left alone by every other."""
WITH_GENERATION = frozenset({KIND, "Job"})
"""Kinds whose `metadata.generation` counts changes of `spec`."""
GRACE_SECONDS = 30
"""What a pod gets to end that says nothing else."""
_SERVER_S = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
"""Metadata that no writer sets."""


@dataclass(frozen=True, order=True)
class ObjectKey:
    """An object's identity."""

    kind: str
    """Its kind."""
    namespace: str
    """Its namespace; empty for an object of the whole cluster."""
    name: str
    """Its name; empty in a list's request."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> ObjectKey:
        """The key of a document."""
        metadata = document["metadata"]
        return cls(document["kind"], metadata.get("namespace", ""), metadata["name"])

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Request:
    """One call to the store."""

    verb: str
    """get, list, create, replace, apply, status, patch, delete or evict."""
    key: ObjectKey
    """The object."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """What is written, or the options of a deletion."""


@dataclass(frozen=True)
class Write:
    """A write that was made or refused."""

    request: Request
    """The call."""
    refused: int = 0
    """The HTTP code of the refusal; 0 if it was made."""
    before: Mapping[str, Any] | None = None
    """The object before it; None where there was none."""
    after: Mapping[str, Any] | None = None
    """The object after it; None where there is none."""


class Admission(Protocol):
    """Whoever is asked before every call."""

    def admit(self, request: Request) -> None:
        """Raises ApiError to refuse it."""


class Storage(Protocol):
    """A place that outlives the process. Each call is whole or raises ApiError and leaves all as it was."""

    def load(self) -> tuple[int, Iterable[tuple[dict[str, Any], Owners]]]:
        """The store's version, and objects with their owners in the order in which they were made."""

    def plain(self, document: dict[str, Any]) -> dict[str, Any]:
        """The document as it will be read again."""

    def keep(self, version: int, key: ObjectKey, document: Mapping[str, Any] | None, owners: Owners) -> None:
        """Writes an object, or removes it where there is no document, and writes the store's version."""


@dataclass
class _Stored:
    """An object as it is kept."""

    document: dict[str, Any]
    """The object."""
    owners: Owners
    """Who owns which of its fields."""


class ObjectStore:
    """All objects of one cluster. Calls are atomic: nothing here waits."""

    def __init__(self, now: Callable[[], datetime], new_uid: Callable[[], str], storage: Storage | None = None) -> None:
        self.admission: list[Admission] = []
        self.watchers: list[Callable[[Write], None]] = []
        self.journal: deque[Write] = deque(maxlen=JOURNAL_KEPT)
        self._now, self._new_uid = now, new_uid
        self._objects: dict[ObjectKey, _Stored] = {}
        self._version, self._storage = 0, storage
        if storage is not None:
            self._version, objects = storage.load()
            self._objects = {ObjectKey.of(document): _Stored(document, owners) for document, owners in objects}

    @property
    def version(self) -> int:
        """Number of changes so far; the newest object has it as its version."""
        return self._version

    def owners(self, key: ObjectKey) -> Owners:
        """The writers of an object with their fields; none where there is no object."""
        stored = self._objects.get(key)
        return dict(stored.owners) if stored is not None else {}

    def get(self, key: ObjectKey) -> dict[str, Any] | None:
        """An object; None where there is none."""
        self._admit(Request("get", key))
        return self._read(key)

    def list(self, kind: str, namespace: str = "") -> Iterator[dict[str, Any]]:
        """Objects of a kind by namespace and name, of one namespace or of all."""
        self._admit(Request("list", ObjectKey(kind, namespace, "")))
        keys = sorted(k for k in self._objects if k.kind == kind and namespace in ("", k.namespace))
        return iter([deepcopy(self._objects[key].document) for key in keys])

    def create(self, document: Mapping[str, Any], writer: str) -> dict[str, Any]:
        """Makes an object; one whose status has a call of its own has none yet.

        Raises:
            ConflictError: one of this name is there.
        """
        with _Attempt(self, Request("create", ObjectKey.of(document), document)) as attempt:
            if attempt.before is not None:
                raise ConflictError(409, f"{attempt.key} already exists")
            made = _written(document)
            if attempt.key.kind in WITH_STATUS:
                made.pop("status", None)
            return attempt.stored(made, updated({}, made, {}, _updater(writer)))

    def replace(self, document: Mapping[str, Any], writer: str) -> dict[str, Any]:
        """Puts an object in the place of the version that it names, or of any where it names none.

        Raises:
            ConflictError: the object has another version.
            ApiError: there is none (404).
        """
        with _Attempt(self, Request("replace", ObjectKey.of(document), document)) as attempt:
            before = attempt.existing(document)
            after = _written(document)
            if attempt.key.kind in WITH_STATUS:
                after = _with_status(after, before.document.get("status"))
            return attempt.stored(after, updated(before.document, after, before.owners, _updater(writer)))

    def apply(self, document: Mapping[str, Any], writer: str) -> dict[str, Any]:
        """Server-side apply by force: all but the status where that has a call of its own.

        Raises:
            ConflictError: it names a version or a uid, and the object has another.
        """
        with _Attempt(self, Request("apply", ObjectKey.of(document), document)) as attempt:
            wanted = _written(document)
            if attempt.key.kind in WITH_STATUS:
                wanted.pop("status", None)
            before = attempt.before
            if before is None and document["metadata"].get("resourceVersion"):
                raise ConflictError(409, f"{attempt.key} is gone")
            if before is not None:
                attempt.existing(document)
            base, owners = (before.document, before.owners) if before is not None else ({}, {})
            return attempt.stored(*applied(base, owners, wanted, f"{writer} applies"))

    def apply_status(self, document: Mapping[str, Any], writer: str) -> dict[str, Any]:
        """Server-side apply of a status and nothing else; what the writer leaves out is removed.

        Raises:
            ConflictError: it names a version or a uid, and the object has another.
            ApiError: there is no such object (404).
        """
        with _Attempt(self, Request("status", ObjectKey.of(document), document)) as attempt:
            before = attempt.existing(document)
            wanted = {"status": document.get("status") or {}}
            return attempt.stored(*applied(before.document, before.owners, wanted, f"{writer} applies status"))

    def patch(
        self, key: ObjectKey, patch: Mapping[str, Any], writer: str, *, only_status: bool = False
    ) -> dict[str, Any]:
        """A merge patch of all but the status, or of the status alone.

        Raises:
            ApiError: there is no such object (404).
        """
        with _Attempt(self, Request("status" if only_status else "patch", key, patch)) as attempt:
            before = attempt.existing(patch)
            parts = {n: v for n, v in patch.items() if key.kind not in WITH_STATUS or (n == "status") is only_status}
            after = merge_patched(before.document, parts)
            return attempt.stored(after, updated(before.document, after, before.owners, _updater(writer)))

    def delete(self, key: ObjectKey, uid: str | None = None, *, grace_seconds: int | None = None) -> None:
        """Deletes an object, and then what nobody owns any more. A pod that runs, and what has finalizers, is only marked.

        Raises:
            ConflictError: the object is another one than was meant.
            ApiError: there is no such object (404).
        """
        self._delete(Request("delete", key), uid, grace_seconds)
        self.collect_garbage()

    def evict(self, key: ObjectKey, uid: str | None = None) -> None:
        """Has a pod end gracefully; raises as `delete`."""
        self._delete(Request("evict", key), uid, None)

    def collect_garbage(self) -> None:
        """Deletes objects whose owners are all gone, and theirs in turn."""
        while True:
            alive = {stored.document["metadata"]["uid"] for stored in self._objects.values()}
            left = [
                key
                for key, stored in self._objects.items()
                if (owners := owner_uids(stored.document))
                and not owners & alive
                and "deletionTimestamp" not in stored.document["metadata"]
            ]
            for key in left:
                self._delete(Request("delete", key), None, None)
            if not left:
                return

    def _delete(self, request: Request, uid: str | None, grace_seconds: int | None) -> None:
        with _Attempt(self, request) as attempt:
            before = attempt.existing({"metadata": {"uid": uid} if uid else {}})
            metadata = before.document["metadata"]
            grace = _grace_seconds(before.document) if grace_seconds is None else grace_seconds
            if not metadata.get("finalizers") and not grace:
                attempt.removed()
            elif "deletionTimestamp" not in metadata:
                until = self._now() + timedelta(seconds=grace)
                attempt.marked({"deletionTimestamp": _text(until), "deletionGracePeriodSeconds": grace})

    def _keep(self, key: ObjectKey, stored: _Stored | None, version: int) -> None:
        """Changes the storage first: a write that it refuses has not happened."""
        if self._storage is not None:
            self._storage.keep(version, key, stored.document if stored else None, stored.owners if stored else {})
        self._version = version
        if stored is not None:
            self._objects[key] = stored
        else:
            del self._objects[key]

    def _read(self, key: ObjectKey) -> dict[str, Any] | None:
        stored = self._objects.get(key)
        return deepcopy(stored.document) if stored is not None else None

    def _newborn(self) -> dict[str, Any]:
        return {"uid": self._new_uid(), "creationTimestamp": _text(self._now())}

    def _admit(self, request: Request) -> None:
        for admission in self.admission:
            admission.admit(request)


class _Attempt:
    """One write: admitted first, journalled at its end, whatever came of it."""

    def __init__(self, store: ObjectStore, request: Request) -> None:
        self.key = request.key
        self._store, self._request = store, request

    def __enter__(self) -> _Attempt:
        try:
            self._store._admit(self._request)
        except ApiError as error:
            self._close(error)
            raise
        self.before = self._store._objects.get(self.key)
        self._old = self._store._read(self.key)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, ApiError):
            self._close(error)

    def existing(self, document: Mapping[str, Any]) -> _Stored:
        """The object, if it is the one and the version that a document names."""
        if self.before is None:
            raise ApiError(404, f"{self.key} not found")
        for name in ("uid", "resourceVersion"):
            named, found = (d.get("metadata", {}).get(name) for d in (document, self.before.document))
            if named and named != found:
                raise ConflictError(409, f"{self.key}: {name} is {found} and not {named}: the object has been modified")
        return self.before

    def stored(self, document: dict[str, Any], owners: Owners) -> dict[str, Any]:
        """Keeps an object as it shall be; a write that changes nothing makes no version."""
        store, old = self._store, self.before.document if self.before is not None else None
        metadata = {n: v for n, v in document["metadata"].items() if n not in _SERVER_S}
        kept: Mapping[str, Any] = old["metadata"] if old is not None else store._newborn()
        document = {**document, "metadata": metadata | {n: kept[n] for n in _SERVER_S if n in kept}}
        _check(self.key, old, document)
        if store._storage is not None:
            document = store._storage.plain(document)
        if document != old:
            if self.key.kind in WITH_GENERATION and (old is None or old.get("spec") != document.get("spec")):
                document["metadata"]["generation"] = kept.get("generation", 0) + 1
            self._put(_Stored(document, owners))
        elif self.before is not None and owners != self.before.owners:
            store._keep(self.key, _Stored(document, owners), store.version)
        return deepcopy(document)

    def marked(self, metadata: Mapping[str, Any]) -> None:
        """Keeps the object with more metadata of the server's own."""
        assert self.before is not None  # noqa: S101  `existing` was called
        document = {**self.before.document, "metadata": {**self.before.document["metadata"], **metadata}}
        self._put(_Stored(document, self.before.owners))

    def removed(self) -> None:
        """Forgets the object."""
        self._store._keep(self.key, None, self._store.version + 1)

    def _put(self, stored: _Stored) -> None:
        version = self._store.version + 1
        stored.document["metadata"]["resourceVersion"] = str(version)
        self._store._keep(self.key, stored, version)

    def _close(self, error: ApiError | None) -> None:
        request = Request(self._request.verb, self.key, deepcopy(dict(self._request.document)))
        if error is not None:
            write = Write(request, refused=error.status)
        else:
            write = Write(request, 0, self._old, self._store._read(self.key))
        self._store.journal.append(write)
        for watcher in self._store.watchers:
            watcher(write)


def _updater(writer: str) -> str:
    return f"{writer} updates"


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _written(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document as it is stored: a Secret's text becomes data, metadata of the server's own is dropped."""
    result = deepcopy(dict(document))
    result["metadata"] = {n: v for n, v in result["metadata"].items() if n not in _SERVER_S}
    text = result.pop("stringData", None) if result["kind"] == "Secret" else None
    if text:
        encoded = {name: base64.b64encode(value.encode()).decode() for name, value in text.items()}
        result["data"] = {**(result.get("data") or {}), **encoded}
    return result


def _with_status(document: dict[str, Any], status: Any) -> dict[str, Any]:
    rest = {name: value for name, value in document.items() if name != "status"}
    return rest if status is None else {**rest, "status": status}


def _grace_seconds(document: Mapping[str, Any]) -> int:
    """What an object gets to end: nothing, but for a pod on a node that has not ended."""
    spec, status = document.get("spec") or {}, document.get("status") or {}
    if document["kind"] != "Pod" or not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return 0
    return int(spec.get("terminationGracePeriodSeconds", GRACE_SECONDS))


def _check(key: ObjectKey, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> None:
    """What may not change of a Job: its pods' template, and the number of indices without that of pods."""
    if key.kind != "Job" or before is None:
        return
    old, new = before["spec"], after["spec"]
    if old.get("template") != new.get("template"):
        raise ApiError(422, f"{key} is invalid: spec.template: field is immutable")
    if old.get("completions") != new.get("completions") and new.get("completions") != new.get("parallelism"):
        raise ApiError(422, f"{key} is invalid: spec.completions: can only be changed together with spec.parallelism")
