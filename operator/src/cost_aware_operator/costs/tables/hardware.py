"""Accelerators: peak arithmetic, memory, links. A dated, sourced table; what is missing is an error that names the row."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources


class HardwareError(ValueError):
    """Hardware that is unknown or incomplete. The text names the row, the field and what to write instead."""


class NumberFormat(StrEnum):
    """The type in which matrix products are computed."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class AcceleratorGeneration(StrEnum):
    """GPUs whose kernels reach alike fractions of their peaks."""

    VOLTA = "volta"
    AMPERE = "ampere"
    ADA = "ada"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    CPU = "cpu"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator and the node that it usually stands in."""

    name: str
    """Name in accelerators.csv."""
    generation: AcceleratorGeneration
    """GPU generation; decides which fitted fractions of peak apply."""
    peak_tflops: Mapping[NumberFormat, float]
    """Dense peak by precision, in 1e12 operations a second; a precision without hardware is absent."""
    memory_gib: float
    """Memory of one accelerator, GiB."""
    memory_gbytes_per_s: float
    """Memory bandwidth, 1e9 bytes a second."""
    power_watts: float | None
    """Power of the board, watts; None where it is not known."""
    link: str
    """Kind of link inside the node, such as NVLink4 or PCIe4."""
    link_gbytes_per_s: float
    """Link of one accelerator inside the node, one direction, 1e9 bytes a second."""
    gpus_per_node: int
    """Accelerators of the usual node."""
    network_gbit_per_s: float
    """Network of the whole node, 1e9 bits a second."""
    as_of: str
    """Date of the figures."""
    source: str
    """Page or document that the figures are from."""

    def peak(self, precision: NumberFormat) -> float:
        """Dense peak in TFLOP/s.

        Raises:
            HardwareError: this accelerator has no units for that precision.
        """
        value = self.peak_tflops.get(precision)
        if value is None:
            known = ", ".join(sorted(self.peak_tflops))
            raise HardwareError(f"{self.name} has no peak for {precision}: write precision as one of {known}")
        return value


def accelerators() -> Mapping[str, Accelerator]:
    """The shipped table by name."""
    return _shipped()


def accelerator(name: str) -> Accelerator:
    """One row of the shipped table.

    Raises:
        HardwareError: no such row; the text names the nearest.
    """
    table = _shipped()
    if name not in table:
        similar = difflib.get_close_matches(name, table, n=2, cutoff=0.4) or sorted(table)
        raise HardwareError(
            f"{name!r} is not in accelerators.csv (nearest: {', '.join(similar)}): write a known name, or give "
            "peak_tflops, memory_gib and memory_gbytes_per_s"
        )
    return table[name]


@cache
def _shipped() -> Mapping[str, Accelerator]:
    text = (
        resources.files("cost_aware_operator.costs.tables")
        .joinpath("data/accelerators.csv")
        .read_text(encoding="utf-8")
    )
    return read(csv.DictReader(text.splitlines()))


def read(rows: Iterable[Mapping[str, str]]) -> dict[str, Accelerator]:
    """Rows of a CSV of the shipped form.

    Raises:
        HardwareError: a figure is absent, no number, or not positive.
    """
    return {one.name: one for one in map(_row, rows)}


def _row(row: Mapping[str, str]) -> Accelerator:
    peaks = {p: value for p in NumberFormat if (value := _number(row, f"{p}_tflops", optional=True)) is not None}
    name = _text(row, "name")
    if not peaks:
        raise HardwareError(
            f"accelerators.csv, {name}: no peak is given: write at least one of fp32_tflops to fp8_tflops"
        )
    kind = _text(row, "generation")
    try:
        generation = AcceleratorGeneration(kind)
    except ValueError:
        raise HardwareError(
            f"accelerators.csv, {name}: generation {kind!r} is none of {', '.join(AcceleratorGeneration)}"
        ) from None
    return Accelerator(
        name=name,
        generation=generation,
        peak_tflops=peaks,
        memory_gib=_required(row, "memory_gib"),
        memory_gbytes_per_s=_required(row, "memory_gbytes_per_s"),
        power_watts=_number(row, "power_watts", optional=True),
        link=_text(row, "link"),
        link_gbytes_per_s=_required(row, "link_gbytes_per_s"),
        gpus_per_node=int(_required(row, "gpus_per_node")),
        network_gbit_per_s=_required(row, "network_gbit_per_s"),
        as_of=_text(row, "as_of"),
        source=_text(row, "source"),
    )


def _text(row: Mapping[str, str], column: str) -> str:
    value = (row.get(column) or "").strip()
    if not value:
        raise HardwareError(f"accelerators.csv, {row.get('name') or 'a row without a name'}: {column} is missing")
    return value


def _required(row: Mapping[str, str], column: str) -> float:
    value = _number(row, column, optional=False)
    if value is None:
        raise AssertionError(column)
    return value


def _number(row: Mapping[str, str], column: str, *, optional: bool) -> float | None:
    if optional and not (row.get(column) or "").strip():
        return None
    text = _text(row, column)
    try:
        value = float(text)
    except ValueError:
        raise HardwareError(f"accelerators.csv, {row['name']}: {column} is not a number: {text!r}") from None
    if not math.isfinite(value) or value <= 0:
        raise HardwareError(f"accelerators.csv, {row['name']}: {column} must be positive, got {text!r}")
    return value
