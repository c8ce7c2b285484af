"""Checks of an analyser's inputs: one error type, which names the field and the nearest value that would do."""

from __future__ import annotations

import math

LEAST, MOST = 1e-12, 1e18
"""Figures outside are typing errors in any unit used here, and products of those inside stay finite."""
MOST_COUNT = 10**9


class AnalysisError(ValueError):
    """An analyser's input that cannot be. The text names the field, the value and what to write instead."""


def positive(field: str, value: float, most: float = MOST) -> float:
    """A finite number above 0 and no larger than `most`.

    Raises:
        AnalysisError: it is not.
    """
    return _within(field, value, LEAST, most)


def not_negative(field: str, value: float, most: float = MOST) -> float:
    """A finite number, 0 or above, no larger than `most`.

    Raises:
        AnalysisError: it is not.
    """
    return _within(field, value, 0.0, most)


def share(field: str, value: float, most: float = 1.0) -> float:
    """A number from 0 to `most`.

    Raises:
        AnalysisError: it is not.
    """
    return _within(field, value, 0.0, most)


def count(field: str, value: int, least: int = 1, most: int = MOST_COUNT) -> int:
    """A whole number from `least` to `most`.

    Raises:
        AnalysisError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnalysisError(f"{field}: must be a whole number, got {value!r}: write {least} or more")
    if not least <= value <= most:
        raise AnalysisError(
            f"{field}: must lie from {least} to {most}, got {value}: write {max(least, min(value, most))}"
        )
    return value


def _within(field: str, value: float, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnalysisError(f"{field}: must be a number, got {value!r}: write {least:g} or more")
    if math.isnan(value):
        raise AnalysisError(f"{field}: must be a number from {least:g} to {most:g}, got nan: write {least:g} or more")
    if not least <= value <= most:
        raise AnalysisError(
            f"{field}: must lie from {least:g} to {most:g}, got {value!r}: write {max(least, min(value, most)):g}"
        )
    return float(value)
