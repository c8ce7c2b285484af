"""The price book: dollars an hour by instance type, capacity and zone. What is missing is missing, never $0."""

from __future__ import annotations

import csv
import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

USD_PER_GB_BETWEEN_ZONES = 0.02
"""Dollars for 1e9 bytes between zones of one region, sender and receiver together: $0.01 out and $0.01 in (AWS EC2 on-demand
page, data transfer within a region; Google Cloud charges $0.01 once)."""

MOST_HOURLY_USD = 1e5
"""Most dollars an hour of one node; a higher price is a typing error."""


class PriceError(ValueError):
    """A price row that cannot be used. The text names the row, the field and what to write instead."""


@dataclass(frozen=True)
class Price:
    """Price of one whole node, with where the figure comes from."""

    hourly_usd: float
    """Dollars an hour of one whole node."""
    source: str
    """Page, document or file that the figure is from."""
    as_of: str
    """Date of the figure, or `undated`."""


@dataclass(frozen=True)
class Instance:
    """One instance type: what the planner needs of it, and its list prices."""

    name: str
    """Instance type as the provider spells it."""
    provider: str
    """Provider's short name, such as aws or gcp."""
    accelerators: int
    """Accelerators of one node."""
    accelerator: str
    """Name of the accelerator."""
    accelerator_memory_gib: float | None
    """Memory of one accelerator, GiB; None where it is not known."""
    on_demand: Price | None
    """List price on demand; None where it is not known."""
    spot: Price | None
    """Typical spot price; None where it is not known."""
    vcpus: float | None = None
    """Virtual cores of one node; None where they are not known."""
    memory_gib: float | None = None
    """Memory of one node, GiB; None where it is not known."""


@dataclass(frozen=True)
class Override:
    """One row of the operator's price ConfigMap."""

    instance_type: str
    """Instance type that the row prices."""
    price: Price
    """Price of one node."""
    capacity_type: str | None = None
    """`OnDemand` or `Spot`; None matches both."""
    zone: str | None = None
    """Zone in which the price holds; None matches any."""


@dataclass(frozen=True)
class PriceBook:
    """Prices by instance type, overrides first."""

    instances: dict[str, Instance] = field(default_factory=dict)
    """Shipped rows by instance type."""
    overrides: tuple[Override, ...] = ()
    """Rows that win over the shipped ones; of equally specific rows, the first wins."""

    def knows(self, instance_type: str) -> bool:
        """Whether the type stands in the book or in an override."""
        return instance_type in self.instances or any(o.instance_type == instance_type for o in self.overrides)

    def similar(self, instance_type: str) -> list[str]:
        """Up to three known types whose names are close, for a message."""
        known = [*self.instances, *(o.instance_type for o in self.overrides)]
        return difflib.get_close_matches(instance_type, known, n=3, cutoff=0.4)

    def price(self, instance_type: str | None, *, spot: bool = False, zone: str | None = None) -> Price | None:
        """The hourly price of a node, or None where the book has none.

        The most specific override wins (zone and capacity, then either, then neither); then the list price.
        """
        if instance_type is None:
            return None
        capacity = "Spot" if spot else "OnDemand"
        matching = [
            o
            for o in self.overrides
            if o.instance_type == instance_type and o.capacity_type in (None, capacity) and o.zone in (None, zone)
        ]
        if matching:
            return max(matching, key=lambda o: (o.zone is not None, o.capacity_type is not None)).price
        instance = self.instances.get(instance_type)
        if instance is None:
            return None
        return instance.spot if spot else instance.on_demand

    def overridden(self, text: str) -> PriceBook:
        """This book under the rows of a price ConfigMap (a JSON list).

        Raises:
            PriceError: not JSON, or a row is incomplete or has an impossible price.
        """
        try:
            rows = json.loads(text or "[]")
        except (ValueError, RecursionError) as error:
            raise PriceError(f"prices.json is not JSON: {error}") from None
        if not isinstance(rows, list):
            raise PriceError("prices.json: expected a list of rows")
        return PriceBook(self.instances, tuple(_override(i, row) for i, row in enumerate(rows)))


def _override(index: int, row: Any) -> Override:
    where = f"prices.json row {index}"
    if not isinstance(row, dict):
        raise PriceError(f"{where}: expected an object, got {row!r}")
    unknown = set(row) - {"instanceType", "capacityType", "zone", "hourlyUSD", "asOf", "source"}
    if unknown:
        raise PriceError(f"{where}: unknown field {sorted(unknown)[0]!r}")
    instance_type, hourly = row.get("instanceType"), row.get("hourlyUSD")
    if not isinstance(instance_type, str) or not instance_type:
        raise PriceError(f"{where}: instanceType is missing")
    # compared and not converted: a whole number may be larger than any float
    if isinstance(hourly, bool) or not isinstance(hourly, int | float) or not 0 < hourly <= MOST_HOURLY_USD:
        said = "too large a number" if isinstance(hourly, int) and hourly > MOST_HOURLY_USD else repr(hourly)
        raise PriceError(
            f"{where} ({instance_type}): hourlyUSD must be a positive number of dollars, "
            f"at most {MOST_HOURLY_USD:,.0f}, got {said}"
        )
    capacity = row.get("capacityType")
    if capacity not in (None, "OnDemand", "Spot"):
        raise PriceError(f"{where} ({instance_type}): capacityType must be OnDemand or Spot, got {capacity!r}")
    zone = row.get("zone")
    if zone is not None and not (isinstance(zone, str) and zone):
        raise PriceError(f"{where} ({instance_type}): zone must be a name, got {zone!r}: leave it out for any zone")
    price = Price(float(hourly), str(row.get("source") or "price ConfigMap"), str(row.get("asOf") or "undated"))
    return Override(instance_type, price, capacity, zone)


def shipped() -> PriceBook:
    """The dated book that comes with the package."""
    text = (
        resources.files("cost_aware_operator.costs.tables").joinpath("data/instances.csv").read_text(encoding="utf-8")
    )
    return PriceBook({i.name: i for i in _instances(csv.DictReader(text.splitlines()))})


def _instances(rows: Iterable[dict[str, str]]) -> Iterable[Instance]:
    for row in rows:
        as_of, region = row["price_asof"], row["region"]
        source = f"{row['provider']} list price, {region}" if region else f"{row['provider']} list price"
        yield Instance(
            name=row["instance"],
            provider=row["provider"],
            accelerators=int(row["gpus"]),
            accelerator=row["gpu"],
            accelerator_memory_gib=_number(row, "gpu_mem_gib"),
            on_demand=_listed(row, "ondemand_usd_h", source, as_of),
            spot=_listed(row, "spot_usd_h_typical", f"{source}, typical spot", as_of),
            vcpus=_number(row, "vcpu"),
            memory_gib=_number(row, "ram_gib"),
        )


def _listed(row: dict[str, str], column: str, source: str, as_of: str) -> Price | None:
    hourly = _number(row, column)
    return None if hourly is None else Price(hourly, source, as_of)


def _number(row: dict[str, str], column: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise PriceError(f"instances.csv, {row['instance']}: {column} is not a number: {text!r}") from None
    if not math.isfinite(value) or value <= 0:
        raise PriceError(f"instances.csv, {row['instance']}: {column} must be positive, got {text!r}")
    return value
