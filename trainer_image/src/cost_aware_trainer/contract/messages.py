"""Messages as strict JSON: a field that is unknown, missing or of the wrong kind is refused by its name.

A message is read strictly, because two sides that guess are worse than one that stops. This module imports nothing but
the standard library, for the reasons given in `protocol`.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

_SINCE = "since"
ADDED_IN_2: Mapping[str, int] = {_SINCE: 2}
"""Metadata of fields that version 2 of the contract added. They are not written while they have their defaults: older readers are
strict."""


class ContractError(ValueError):
    """Message that does not follow the contract. The text names the field and says what was expected."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages: strict JSON in both directions."""

    def to_document(self) -> dict[str, Any]:
        """Writes the message as JSON values, without fields of later versions that have their defaults."""
        return {
            declared.name: _written(getattr(self, declared.name))
            for declared in dataclasses.fields(self)
            if _SINCE not in declared.metadata or getattr(self, declared.name) != declared.default
        }

    def to_json(self) -> str:
        """Writes the message as one line of JSON with sorted keys: equal content gives equal text."""
        return json.dumps(self.to_document(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads a message.

        Raises:
            ContractError: not JSON, not an object, or a field is unknown, missing or of the wrong kind.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ContractError(f"{cls.__name__}: not JSON: {error}") from None
        return cls.from_document(document)

    @classmethod
    def from_document(cls, document: object) -> Self:
        """Reads a message from parsed JSON; raises what `from_json` raises."""
        message = _read(cls, document, cls.__name__)
        assert isinstance(message, cls)  # noqa: S101  for the type checker
        return message


def _written(value: object) -> object:
    """Writes a field's value as JSON values."""
    if isinstance(value, Message):
        return value.to_document()
    return [_written(item) for item in value] if isinstance(value, tuple) else value


def _read(kind: Any, value: object, where: str) -> object:
    """Reads one value of a declared kind: a message, a tuple of one kind, an optional, or a JSON scalar."""
    if dataclasses.is_dataclass(kind):
        return _read_message(typing.cast("type", kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ContractError(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in [member.value for member in kind]:
            raise ContractError(f"{where}: expected one of {', '.join(kind)}, got {value!r}")
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        raise ContractError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value


def _read_message(kind: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {type(value).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ContractError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(fields)}")
    for name, declared in fields.items():
        required = declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise ContractError(f"{where}.{name}: missing")
    kinds = typing.get_type_hints(kind)
    return kind(**{name: _read(kinds[name], item, f"{where}.{name}") for name, item in value.items()})
