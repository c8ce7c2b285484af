"""Kubernetes quantities as numbers."""

from __future__ import annotations

import re

_SCALES = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}
_QUANTITY = re.compile(r"^([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)(?:([eE][+-]?[0-9]+)|([A-Za-z]*))$")

GIB = 2.0**30


def quantity(value: str | int | float) -> float:
    """A Kubernetes quantity (`1500m`, `2Gi`, `1e3`) as a number.

    Raises:
        ValueError: not a quantity; the text says so.
    """
    match = _QUANTITY.match(str(value).strip())
    if match is None or (match[3] or "") not in _SCALES:
        raise ValueError(f"{value!r} is not a quantity: write a number with a suffix such as m, Mi or Gi")
    return float(match[1] + (match[2] or "")) * _SCALES[match[3] or ""]
