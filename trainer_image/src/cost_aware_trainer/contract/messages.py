"""Messages as strict JSON: a field that is unknown, missing or of the wrong kind is refused by its name.

A message is read strictly, because two sides that guess are worse than one that stops. This module imports nothing but
the standard library, for the reasons given in `protocol`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

MAX_TEXT = 65_536
"""Longest text in a message, in characters."""
MAX_INTEGER = 2**63 - 1
"""Largest whole number in a message, either way: no reader of another language and no API server takes more."""
MAX_ITEMS = 10_000
"""Longest list in a message."""
MAX_SHOWN = 80
"""Characters of a wrong value that an error shows."""
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
            document = json.loads(text, parse_constant=_no_number)
        except RecursionError:
            raise ContractError(f"{cls.__name__}: not a message: nested too deeply") from None
        except ValueError as error:
            raise ContractError(f"{cls.__name__}: not JSON: {str(error)[:MAX_SHOWN]}") from None
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
        if len(value) > MAX_ITEMS:
            raise ContractError(f"{where}: expected at most {MAX_ITEMS} items, got {len(value)}")
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in [member.value for member in kind]:
            raise ContractError(f"{where}: expected one of {', '.join(kind)}, got {_shown(value)}")
        return kind(value)
    return _read_scalar(kind, value, where)


def _read_scalar(kind: type, value: object, where: str) -> object:
    """Reads a number, a text or a truth value; every number is finite and small enough, every text short enough to be stored."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ContractError(f"{where}: expected a number of at most {MAX_INTEGER} either way")
    if kind is float and is_number:
        number = float(typing.cast("float", value))
        if not math.isfinite(number):
            raise ContractError(f"{where}: expected a finite number, got {number}")
        return number
    if not isinstance(value, kind) or (kind is int and not is_number):
        raise ContractError(f"{where}: expected {kind.__name__}, got {_shown(value)}")
    if isinstance(value, str):
        _check_text(value, where)
    return value


def _check_text(text: str, where: str) -> None:
    if len(text) > MAX_TEXT:
        raise ContractError(f"{where}: expected at most {MAX_TEXT} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContractError(f"{where}: expected text, got half of a surrogate pair") from None


def _no_number(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _shown(value: object) -> str:
    """The kind of a wrong value, and its beginning where it is a text: an error must not be as long as what it refuses."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN])
    return repr(value) if isinstance(value, bool | int | float | None) else type(value).__name__


def _read_message(kind: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {type(value).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ContractError(f"{where}: unknown field {_shown(unknown[0])}; known are {', '.join(fields)}")
    for name, declared in fields.items():
        required = declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise ContractError(f"{where}.{name}: missing")
    kinds = typing.get_type_hints(kind)
    return kind(**{name: _read(kinds[name], item, f"{where}.{name}") for name, item in value.items()})
