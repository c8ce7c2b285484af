"""Which writer has which fields of an object, as server-side apply counts them. Pure.

A field is the path to a leaf. A list is a leaf: two writers of one list replace it whole, where Kubernetes merges some by a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Path = tuple[str, ...]
Owners = Mapping[str, frozenset[Path]]
"""The fields of each writer. One that applies and one that updates are two writers, though they have one name."""

_MISSING = object()


def leaves(document: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Paths and values of all leaves; an empty mapping is one too."""
    for name, value in document.items():
        path = (*prefix, name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def value_at(document: Mapping[str, Any], path: Path) -> Any:
    """The value at a path; `absent` tells one that is not there from null."""
    found: Any = document
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return _MISSING
        found = found[name]
    return found


def absent(value: object) -> bool:
    """Whether `value_at` found nothing."""
    return value is _MISSING


def applied(
    before: Mapping[str, Any], owners: Owners, wanted: Mapping[str, Any], writer: str
) -> tuple[dict[str, Any], Owners]:
    """The object and its owners after an apply by force: what is wanted is there, what the writer had and leaves out is not.

    A field that another writer has too stays when it is left out, and is shared where both want the same value.
    """
    result, wants = deepcopy(dict(before)), dict(leaves(wanted))
    others = {name: fields for name, fields in owners.items() if name != writer}
    held = frozenset[Path]().union(*others.values())
    for path in owners.get(writer, frozenset()) - wants.keys() - held:
        _remove(result, path)
    taken = {path for path, value in wants.items() if value_at(result, path) != value}
    for path, value in wants.items():
        _set(result, path, value)
    kept = {name: fields - taken for name, fields in others.items()}
    return result, {**{n: f for n, f in kept.items() if f}, writer: frozenset(wants)}


def updated(before: Mapping[str, Any], after: Mapping[str, Any], owners: Owners, writer: str) -> Owners:
    """The owners after an update or a merge patch: whoever changes a field has it alone."""
    old, new = dict(leaves(before)), dict(leaves(after))
    changed = frozenset(path for path, value in new.items() if path not in old or old[path] != value)
    gone = old.keys() - new.keys()
    kept = {name: fields - changed - gone for name, fields in owners.items()}
    kept[writer] = kept.get(writer, frozenset()) | changed
    return {name: fields for name, fields in kept.items() if fields}


def merge_patched(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396: mappings are merged, null removes, anything else replaces."""
    result = deepcopy(dict(before))
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            deeper = result.get(name)
            result[name] = merge_patched(deeper if isinstance(deeper, Mapping) else {}, value)
        else:
            result[name] = deepcopy(value)
    return result


def _set(document: dict[str, Any], path: Path, value: Any) -> None:
    for name in path[:-1]:
        deeper = document.get(name)
        if not isinstance(deeper, dict):
            deeper = document[name] = {}
        document = deeper
    if not (isinstance(value, Mapping) and not value and isinstance(document.get(path[-1]), dict)):
        document[path[-1]] = deepcopy(value)


def _remove(document: dict[str, Any], path: Path) -> None:
    """Removes a leaf, and what is empty without it."""
    parents = [document]
    for name in path[:-1]:
        deeper = parents[-1].get(name)
        if not isinstance(deeper, dict):
            return
        parents.append(deeper)
    parents[-1].pop(path[-1], None)
    for parent, name in zip(reversed(parents[:-1]), reversed(path[:-1]), strict=True):
        if parent[name]:
            return
        del parent[name]
