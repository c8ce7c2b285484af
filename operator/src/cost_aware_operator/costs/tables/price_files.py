"""Prices from files that a user has: overrides as JSON, a SkyPilot catalog, OpenCost's custom pricing. Told apart by their form.

Every figure that a row must have is a finite, positive number of dollars; anything else is an error that names file, row and
column, and never a price of zero. A catalog's empty price is no error: that capacity has no known price.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cost_aware_operator.costs.tables.prices import MOST_HOURLY_USD, Override, Price, PriceBook, PriceError, shipped

LARGEST_FILE = 64 * 2**20
"""Bytes; the largest public catalog has about 10."""
OPENCOST = ("InstanceID", "AssetClass", "InstanceType", "MarketPriceHourly")
SKYPILOT = ("InstanceType", "Price", "SpotPrice", "Region")
FORMS = (
    f"write a JSON list of overrides, or a CSV with the columns {', '.join(SKYPILOT)} (SkyPilot) or "
    f"{', '.join(OPENCOST)} (OpenCost)"
)


@dataclass(frozen=True)
class _Row:
    """One line of a CSV, with where it stands."""

    file: str
    """Name of the file."""
    line: int
    """Line number in the file, from 1."""
    values: Mapping[str, str | None]
    """Cells by column name."""

    def fail(self, column: str, problem: str) -> PriceError:
        """An error that names file, row and column."""
        return PriceError(f"{self.file}, row {self.line}, {column}: {problem}")

    def text(self, column: str) -> str:
        """The cell without blanks around it; empty where it is absent."""
        return (self.values.get(column) or "").strip()

    def required(self, column: str) -> str:
        """The same, but an empty cell is an error."""
        found = self.text(column)
        if not found:
            raise self.fail(column, "is missing: write a value")
        return found

    def dollars(self, column: str) -> float | None:
        """A price an hour; None where the cell is empty."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise self.fail(column, f"is not a number: {text!r}: write dollars an hour") from None
        if not (math.isfinite(value) and 0 < value <= MOST_HOURLY_USD):
            raise self.fail(
                column, f"must be above 0 and at most {MOST_HOURLY_USD:,.0f}, got {text!r}: write dollars an hour"
            )
        return value


def load_prices(path: Path, base: PriceBook | None = None) -> PriceBook:
    """The shipped book (or `base`) under the prices of one file, dated by the day it was changed where it gives none.

    Raises:
        PriceError: the file cannot be read, or see `parse_prices`.
    """
    try:
        state = path.stat()
        if state.st_size > LARGEST_FILE:
            raise PriceError(
                f"{path}: is larger than {LARGEST_FILE // 2**20} MiB: write the instance types in use only"
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise error if isinstance(error, PriceError) else PriceError(f"{path}: cannot be read: {error}") from None
    return parse_prices(text, path.name, datetime.fromtimestamp(state.st_mtime, UTC).date().isoformat(), base)


def parse_prices(text: str, file: str, as_of: str, base: PriceBook | None = None) -> PriceBook:
    """The shipped book (or `base`) under the prices of a file's text.

    The form is read from the text: a JSON list of overrides (the ConfigMap's form), or a CSV whose header is that of a
    SkyPilot catalog or of OpenCost's custom pricing. Rows of the text win over rows of `base` that are as specific.

    Raises:
        PriceError: none of these forms, or a row is incomplete or impossible.
    """
    book = shipped() if base is None else base
    if not text.strip():
        raise PriceError(f"{file}: is empty: {FORMS}")
    read = _json_rows if text.lstrip()[:1] in ("[", "{") else _csv_rows
    return replace(book, overrides=(*read(file, text, as_of), *book.overrides))


def _json_rows(file: str, text: str, as_of: str) -> tuple[Override, ...]:
    try:
        rows = PriceBook().overridden(text).overrides
    except PriceError as error:
        raise PriceError(f"{file}: {error}") from None
    return tuple(
        replace(row, price=replace(row.price, as_of=as_of)) if row.price.as_of == "undated" else row for row in rows
    )


def _csv_rows(file: str, text: str, as_of: str) -> tuple[Override, ...]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = header
        for columns, read in ((OPENCOST, _opencost), (SKYPILOT, _skypilot)):
            if set(columns) <= set(header):
                found = list(_unique(file, read, reader, as_of))
                return (*found, *_anywhere(found))
    except csv.Error as error:
        raise PriceError(f"{file}, row {reader.line_num}: is not CSV: {error}") from None
    raise PriceError(f"{file}: unknown form: {FORMS}")


def _unique(
    file: str, read: Callable[[_Row, str], list[Override]], reader: csv.DictReader[str], as_of: str
) -> Iterable[Override]:
    """Overrides in order. A later row of the same type, capacity and place would be ignored silently, so it must agree."""
    seen: dict[tuple[str, str | None, str | None], tuple[float, int]] = {}
    for values in reader:
        row = _Row(file, reader.line_num, values)
        if None in values:
            raise row.fail("the row", f"has more cells than the header's {len(reader.fieldnames or ())}")
        for one in read(row, as_of):
            key = (one.instance_type, one.capacity_type, one.zone)
            usd, line = seen.setdefault(key, (one.price.hourly_usd, row.line))
            if usd != one.price.hourly_usd:
                raise row.fail(
                    "InstanceType", f"{one.instance_type} costs {one.price.hourly_usd} here and {usd} in row {line}"
                )
            if line == row.line:
                yield one


def _anywhere(found: list[Override]) -> list[Override]:
    """Where all zones of a file agree on the price of a type and capacity, it also holds where the zone is not known."""
    prices: dict[tuple[str, str | None], list[Override]] = {}
    for one in found:
        prices.setdefault((one.instance_type, one.capacity_type), []).append(one)
    return [
        replace(rows[0], zone=None)
        for rows in prices.values()
        if len({r.price.hourly_usd for r in rows}) == 1 and all(r.zone is not None for r in rows)
    ]


def _skypilot(row: _Row, as_of: str) -> list[Override]:
    """One row is one type in one zone. An empty price or spot price is not known, and stays so."""
    name = row.text("InstanceType")
    if not name:
        raise row.fail("InstanceType", "is missing: write a whole node's; an accelerator's price alone is not one's")
    region, zone = row.required("Region"), row.text("AvailabilityZone") or None
    found = [
        Override(name, Price(usd, f"{row.file}, {region}{said}", as_of), capacity, zone)
        for column, capacity, said in (("Price", "OnDemand", ""), ("SpotPrice", "Spot", ", spot"))
        if (usd := row.dollars(column)) is not None
    ]
    if not found:
        raise row.fail("Price", f"is missing and so is SpotPrice ({name}): write one of them, in dollars an hour")
    return found


def _opencost(row: _Row, as_of: str) -> list[Override]:
    """One row prices a class of assets. This book prices nodes by type; volumes are not its matter."""
    kind = row.required("AssetClass").lower()
    if kind == "pv":
        return []
    if kind != "node":
        raise row.fail(
            "AssetClass", f"is {kind!r}, but prices here are a whole node's: write node, or take the row out"
        )
    by_type = row.text("InstanceIDField").endswith("instance-type")
    name = row.text("InstanceType") or (row.text("InstanceID") if by_type else "")
    if not name:
        raise row.fail("InstanceType", "is missing, and the row names a single node: write the type that it prices")
    usd = row.dollars("MarketPriceHourly")
    if usd is None:
        raise row.fail("MarketPriceHourly", f"is missing ({name}): write dollars an hour")
    ended = row.text("EndTimestamp")
    if ended and not re.match(r"\d{4}-\d{2}-\d{2}", ended):
        raise row.fail("EndTimestamp", f"is not a date: {ended!r}: write for example 2026-11-21 00:00:00 UTC")
    return [Override(name, Price(usd, f"{row.file}, OpenCost custom pricing", ended[:10] or as_of))]
