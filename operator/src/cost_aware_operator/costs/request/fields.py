"""One section of a JSON object, read field by field. Errors name the field, what was wrong and what to write instead."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

MOST = 10**9
"""No count is larger; beyond it sums would leave the range in which floating point is exact enough."""

LIMITS = {"layers": 10**5, "hidden": 10**7, "heads": 10**5, "kv_heads": 10**5}

Choice = TypeVar("Choice", bound=StrEnum)


class RequestError(ValueError):
    """A question that cannot be answered. The text names the field, what was wrong and the nearest value that would do."""


class Fields:
    """One section of an object: every reader names its field in errors and notes what it had to assume."""

    def __init__(self, entry: Mapping[str, Any], section: str, known: tuple[str, ...], assumed: dict[str, Any]) -> None:
        values = entry.get(section)
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise RequestError(f"{section}: expected an object, got {kind(values)}")
        known_only(values, f"{section}.", known)
        self._values, self._section, self._assumed = values, section, assumed

    def given(self, name: str) -> Any:
        """The unchecked value; None if absent."""
        return self._values.get(name)

    def assume(self, name: str, value: Any) -> None:
        """Notes a default."""
        self._assumed[f"{self._section}.{name}"] = value

    def fail(self, name: str, problem: str, nearest: Any) -> NoReturn:
        """An error about one field."""
        raise RequestError(f"{self._section}.{name}: {problem}: write {nearest}")

    def required(self, name: str) -> int:
        """A whole number that has no default."""
        if self.given(name) is None:
            raise RequestError(f"{self._section}.{name}: is missing: write a whole number, 1 or more")
        return self.count(name, 1)

    def count(self, name: str, default: int, *, say: bool = True) -> int:
        """A whole number from 1 to the field's limit; `say`: whether the default is noted as assumed."""
        value = self.given(name)
        if value is None:
            if say:
                self.assume(name, default)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            nearest = max(1, round(value)) if isinstance(value, float) and math.isfinite(value) else default
            self.fail(name, f"must be a whole number, got {kind(value)}", nearest)
        most = LIMITS.get(name, MOST)
        if not 1 <= value <= most:
            self.fail(name, f"must be from 1 to {most:,}, got {short(value)}", 1 if value < 1 else most)
        return int(value)

    def rate(self, name: str, default: float) -> float:
        """A positive number with a default."""
        value = self.positive(name)
        if value is None:
            self.assume(name, default)
            return default
        return value

    def positive(self, name: str) -> float | None:
        """A positive number; None if absent."""
        value = self.given(name)
        if value is None:
            return None
        bad = isinstance(value, bool) or not isinstance(value, int | float)
        if bad or not 1e-6 <= value <= 1e9:
            raise RequestError(
                f"{self._section}.{name}: must be a number from 0.000001 to 1,000,000,000, got {short(value)}: "
                "write a positive one, or null for the usual"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.given(name)
        if value is None:
            self.assume(name, default)
            return default
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, got {kind(value)}", str(default).lower())
        return bool(value)

    def text(self, name: str) -> str:
        """A name of at most 100 characters."""
        value = self.given(name)
        if not isinstance(value, str) or not 1 <= len(value) <= 100:
            raise RequestError(
                f"{self._section}.{name}: must be a name, got {kind(value)}: write for example A100-SXM-80GB"
            )
        return value

    def choice(self, name: str, options: type[Choice], default: Choice | None) -> Choice:
        """One of an enumeration's values. Without a default, an absent one is the first, and nothing is noted."""
        value = self.given(name)
        if value is None:
            if default is not None:
                self.assume(name, default)
                return default
            return next(iter(options))
        if not isinstance(value, str) or value not in options.__members__.values():
            similar = difflib.get_close_matches(short(value), list(options), n=1, cutoff=0.0)
            nearest = similar[0] if similar else default
            self.fail(name, f"must be one of {', '.join(options)}, got {short(value)}", nearest)
        return options(value)


def known_only(values: Mapping[str, Any], prefix: str, known: tuple[str, ...]) -> None:
    """Refuses names that are not known, with the nearest one that is.

    Raises:
        RequestError: an unknown name.
    """
    for name in values:
        if name not in known:
            similar = difflib.get_close_matches(short(name), known, n=1)
            hint = f"did you mean {prefix}{similar[0]}?" if similar else f"known are {', '.join(known)}"
            raise RequestError(f"{prefix}{short(name)}: unknown field; {hint}")


def kind(value: Any) -> str:
    """A value's type and text, for a message."""
    return "nothing" if value is None else f"{type(value).__name__} {short(value)}"


def short(value: Any) -> str:
    """A value's text, cut to what a message can hold."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    except RecursionError:
        return "something nested without end"
    return text if len(text) <= 40 else text[:37] + "..."
