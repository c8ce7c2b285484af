"""A pod's volumes as folders and files of this host: planned from its document alone, and made."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Read = Callable[[str, str], Mapping[str, Any] | None]
"""Reads an object of the pod's namespace by kind and name; None where there is none."""


class CannotStartError(Exception):
    """A pod cannot be started as it is, or not yet. The text says why."""


@dataclass(frozen=True)
class VolumePlan:
    """What has to be there before a pod starts."""

    mounts: Mapping[str, str]
    """Folders or files of this host by the path in the container."""
    folders: tuple[Path, ...]
    """Folders to make."""
    files: Mapping[Path, bytes]
    """Files to write, for this user alone."""


def plan_volumes(spec: Mapping[str, Any], own: Path, claim_folder: Callable[[str], Path], read: Read) -> VolumePlan:
    """Plans the volumes of a pod's first container. That a mount is read-only is not enforced.

    Args:
        spec: the pod's.
        own: a folder for volumes of the pod's own.
        claim_folder: the folder of a PersistentVolumeClaim by its name.
        read: reads Secrets and ConfigMaps.

    Raises:
        CannotStartError: a volume is of a kind that this host has not, or something that it names is missing.
    """
    places: dict[str, Path] = {}
    folders: list[Path] = []
    files: dict[Path, bytes] = {}
    for volume in spec.get("volumes") or ():
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if read("PersistentVolumeClaim", claim) is None:
                raise CannotStartError(f'persistentvolumeclaim "{claim}" not found')
            places[name] = claim_folder(claim)
        elif "hostPath" in volume:
            places[name] = Path(volume["hostPath"]["path"])
            continue
        elif not volume.keys() & {"emptyDir", "secret", "configMap", "projected"} and len(volume) > 1:
            raise CannotStartError(
                f'volume "{name}": {", ".join(volume.keys() - {"name"})} is not to be had on this host'
            )
        else:
            places[name] = own / name
            files |= {own / name / path: content for path, content in _entries(volume, read)}
        folders.append(places[name])
    mounts: dict[str, str] = {}
    for mount in spec["containers"][0].get("volumeMounts") or ():
        if mount["name"] not in places:
            raise CannotStartError(f'volumeMount "{mount["name"]}" names no volume')
        place = places[mount["name"]] / str(mount.get("subPath", "")).lstrip("/")
        mounts[mount["mountPath"].rstrip("/") or "/"] = str(place)
    return VolumePlan(mounts, tuple(folders), files)


def make_volumes(plan: VolumePlan) -> None:
    """Makes folders and writes files. It may be done again.

    Raises:
        OSError: the host refuses.
    """
    for folder in plan.folders:
        folder.mkdir(parents=True, exist_ok=True)
    for file, content in plan.files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(content)


def entry_of(kind: str, document: Mapping[str, Any], key: str) -> bytes | None:
    """One entry of a Secret or a ConfigMap; None where it has none of this name."""
    text = (document.get("data") or {}).get(key)
    if text is None:
        return None
    return base64.b64decode(text) if kind == "Secret" else str(text).encode()


def _entries(volume: Mapping[str, Any], read: Read) -> Iterator[tuple[str, bytes]]:
    """Files of a volume by their path in it."""
    for source in (volume.get("projected") or {}).get("sources") or (volume,):
        for field, kind, named in (("secret", "Secret", ("secretName", "name")), ("configMap", "ConfigMap", ("name",))):
            if field in source:
                name = next((source[field][n] for n in named if source[field].get(n)), "")
                yield from _files(source[field], kind, name, read)


def _files(source: Mapping[str, Any], kind: str, name: str, read: Read) -> Iterator[tuple[str, bytes]]:
    document = read(kind, name)
    if document is None:
        if source.get("optional"):
            return
        raise CannotStartError(f'{kind.lower()} "{name}" not found')
    items = source.get("items") or [{"key": key, "path": key} for key in document.get("data") or {}]
    for item in items:
        content = entry_of(kind, document, item["key"])
        if ".." in Path(item["path"]).parts or Path(item["path"]).is_absolute():
            raise CannotStartError(f'{kind.lower()} "{name}": {item["path"]!r} is no path inside a volume')
        if content is None:
            raise CannotStartError(f'{kind.lower()} "{name}" has no entry {item["key"]!r}')
        yield item["path"], content
