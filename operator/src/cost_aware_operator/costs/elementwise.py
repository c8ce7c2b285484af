"""Functions that differ between a number and an array, so that one formula serves one layout and thousands."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = Any
"""One value, or an array with a value for each of many layouts; arrays in one formula have the same length. A number in
gives a number out, which a union type could not say."""
Truths: TypeAlias = Any
"""One truth value, or an array of them."""


def where(condition: Truths, yes: Numbers, no: Numbers) -> Numbers:
    """`yes` if the condition holds, else `no`, for each element. Both are computed, so both must be defined."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def least(one: Numbers, other: Numbers) -> Numbers:
    """The smaller of two."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def most(one: Numbers, other: Numbers) -> Numbers:
    """The larger of two."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def ceil(value: Numbers) -> Numbers:
    """The next whole number."""
    return np.ceil(value) if isinstance(value, np.ndarray) else math.ceil(value)


def nearest(value: Numbers) -> Numbers:
    """The nearest whole number, halves to even."""
    return np.rint(value) if isinstance(value, np.ndarray) else round(value)


def log2(value: Numbers) -> Numbers:
    """The logarithm to base 2."""
    return np.log2(value) if isinstance(value, np.ndarray) else math.log2(value)


def log2_ceil(count: Numbers) -> Numbers:
    """Levels of a binary tree over `count` (1 or more) leaves."""
    return ceil(log2(count))
