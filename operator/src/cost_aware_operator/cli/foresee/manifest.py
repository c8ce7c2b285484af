"""A manifest file as a checked spec, without a cluster."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cost_aware_operator.api.base import ApiModel
from cost_aware_operator.api.spec import JobSpec

KIND = "CostAwareTrainingJob"


class ManifestError(ValueError):
    """A file that holds no usable manifest. One line for each thing that is wrong, naming the field."""


def read_spec(file: str) -> JobSpec:
    """The spec of the one training job in a YAML file; `-` is standard input.

    Raises:
        ManifestError: not readable, not YAML, no training job or several, or a field is wrong.
    """
    return _spec_of(_document(file))


def read_job(file: str) -> dict[str, Any]:
    """The one training job in a YAML file, as it is written there, when its fields were checked; `-` is standard input.

    Raises:
        ManifestError: as `read_spec`, or it has no name.
    """
    document = _document(file)
    _spec_of(document)
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise ManifestError("metadata.name: is missing: write a name for the job")
    return document


def _document(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = [d for d in yaml.safe_load_all(text) if isinstance(d, dict)]
    except OSError as error:
        raise ManifestError(f"{error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"is not YAML: {' '.join(str(error).split())}") from None
    jobs = [d for d in documents if d.get("kind") == KIND]
    if len(jobs) != 1:
        raise ManifestError(f"kind: expected one {KIND}, found {len(jobs)}: write exactly one into the file")
    found: dict[str, Any] = jobs[0]
    return found


def _spec_of(document: dict[str, Any]) -> JobSpec:
    spec = document.get("spec")
    if not isinstance(spec, dict):
        raise ManifestError("spec: is missing: write what to train, on what and how much of it")
    try:
        return JobSpec.model_validate(spec)
    except ValidationError as error:
        raise ManifestError("\n".join(_line(one, spec) for one in error.errors())) from None


def _line(error: Any, spec: dict[str, Any]) -> str:
    path = "spec" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error["loc"])
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        known = _known(error["loc"][:-1])
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        return f"{path}: unknown field; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")
    if error["type"] == "missing":
        return f"{path}: is missing"
    message = str(error["msg"]).removeprefix("Input should be ")
    return f"{path}: must be {message[0].lower()}{message[1:]}, got {error.get('input')!r}"


def _known(path: tuple[Any, ...]) -> list[str]:
    """Names of the fields that an object at a path may have."""
    model: Any = JobSpec
    for part in path:
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, ApiModel)):
            continue
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        model = _model_in(field.annotation) if field is not None else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in getattr(annotation, "__args__", ()) if (m := _model_in(a)) is not None), None)
