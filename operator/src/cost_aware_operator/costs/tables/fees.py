"""What a run pays beside its nodes: transfer, storage, the control plane. Dated list prices with sources; missing is an error."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from cost_aware_operator.costs.tables.prices import PriceError

UNITS = ("GB", "GiB-month", "hour")


@dataclass(frozen=True)
class Fee:
    """Price of one thing that a run pays beside its nodes."""

    usd: float
    """Dollars for one `unit`."""
    unit: str
    """What the price is for: GB (1e9 bytes moved), GiB-month (one GiB kept for a month) or hour."""
    as_of: str
    """Date of the figure."""
    source: str
    """Page or document that the figure is from."""


def fee(provider: str, name: str) -> Fee:
    """One row of the shipped table.

    Raises:
        PriceError: no such row; the text names those of the provider, or the providers.
    """
    table = _shipped()
    found = table.get((provider, name))
    if found is None:
        known = sorted(n for p, n in table if p == provider)
        rows = (
            f"{provider} has {', '.join(known)}" if known else f"known are {', '.join(sorted({p for p, _ in table}))}"
        )
        raise PriceError(f"fees.csv has no row {provider}, {name}: {rows}: write one of these, or the price itself")
    return found


def between_zones(provider: str) -> float:
    """Dollars of a GB that crosses zones, sender and receiver together."""
    return 2 * fee(provider, "between-zones-each-way").usd


@cache
def _shipped() -> Mapping[tuple[str, str], Fee]:
    text = resources.files("cost_aware_operator.costs.tables").joinpath("data/fees.csv").read_text(encoding="utf-8")
    return read(csv.DictReader(text.splitlines()))


def read(rows: Iterable[Mapping[str, str | None]]) -> dict[tuple[str, str], Fee]:
    """Rows of a CSV of the shipped form, by provider and fee.

    Raises:
        PriceError: a cell is missing, a figure is no positive number, a unit is unknown, or a row stands twice.
    """
    found: dict[tuple[str, str], Fee] = {}
    for number, row in enumerate(rows, 2):
        cells = {name: (row.get(name) or "").strip() for name in ("provider", "fee", "usd", "unit", "as_of", "source")}
        where = f"fees.csv, row {number} ({cells['provider']}, {cells['fee']})"
        missing = next((name for name, text in cells.items() if not text), None)
        if missing:
            raise PriceError(f"{where}: {missing} is missing: write it; what is not known has no row")
        try:
            usd = float(cells["usd"])
        except ValueError:
            usd = math.nan
        if not (math.isfinite(usd) and usd > 0):
            raise PriceError(f"{where}: usd must be a positive number of dollars, got {cells['usd']!r}")
        if cells["unit"] not in UNITS:
            raise PriceError(f"{where}: unit must be one of {', '.join(UNITS)}, got {cells['unit']!r}")
        key = (cells["provider"], cells["fee"])
        if key in found:
            raise PriceError(f"{where}: stands twice: take one of both out")
        found[key] = Fee(usd, cells["unit"], cells["as_of"], cells["source"])
    return found
