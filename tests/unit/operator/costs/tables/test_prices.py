"""Prices: dated, overridable, and never invented."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.api.units import quantity
from cost_aware_operator.costs.tables.prices import PriceError, shipped

BOOK = shipped()


def test_the_seed_s_price_stands_in_the_shipped_book() -> None:
    price = BOOK.price("p3.2xlarge")
    assert price is not None
    assert price.hourly_usd * 24 == pytest.approx(73.44)
    assert price.as_of == "2026-07-20"


def test_every_shipped_price_is_dated_and_sourced() -> None:
    for instance in BOOK.instances.values():
        for price in (instance.on_demand, instance.spot):
            if price is not None:
                assert price.as_of, instance.name
                assert price.source, instance.name


def test_a_missing_price_is_none_and_not_zero() -> None:
    assert BOOK.price("no-such-type") is None
    assert BOOK.price(None) is None
    assert BOOK.price("p5e.48xlarge") is None, "has no on-demand price in the book"


def test_the_most_specific_override_wins() -> None:
    rows = [
        {"instanceType": "p3.2xlarge", "hourlyUSD": 2.0},
        {"instanceType": "p3.2xlarge", "hourlyUSD": 1.5, "capacityType": "Spot"},
        {"instanceType": "p3.2xlarge", "hourlyUSD": 1.0, "zone": "a", "asOf": "2026-09-01", "source": "contract"},
    ]
    book = BOOK.overridden(json.dumps(rows))

    def usd(**where) -> float:
        price = book.price("p3.2xlarge", **where)
        assert price is not None
        return price.hourly_usd

    assert (usd(), usd(spot=True), usd(zone="a"), usd(zone="b")) == (2.0, 1.5, 1.0, 2.0)
    assert usd(spot=True, zone="a") == 1.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"hourlyUSD": 1}, "instanceType"),
        ({"instanceType": "x"}, "hourlyUSD"),
        ({"instanceType": "x", "hourlyUSD": 0}, "hourlyUSD"),
        ({"instanceType": "x", "hourlyUSD": -1}, "hourlyUSD"),
        ({"instanceType": "x", "hourlyUSD": True}, "hourlyUSD"),
        ({"instanceType": "x", "hourlyUSD": 1, "capacityType": "cheap"}, "capacityType"),
        ({"instanceType": "x", "hourlyUSD": 1, "currency": "EUR"}, "currency"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_field(row: dict, said: str) -> None:
    with pytest.raises(PriceError, match=f"row 0.*{said}|{said}"):
        BOOK.overridden(json.dumps([row]))


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", "[NaN]", '[{"instanceType": "x", "hourlyUSD": NaN}]'])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(PriceError):
        BOOK.overridden(text)


@given(st.text(max_size=40))
def test_any_text_is_a_quantity_or_a_clear_error(text: str) -> None:
    said = ""
    try:
        quantity(text)
    except ValueError as error:
        said = str(error)
    assert said == "" or "is not a quantity" in said


@pytest.mark.parametrize(
    ("text", "number"), [("1500m", 1.5), ("2Gi", 2**31), ("1e3", 1000.0), ("1.5G", 1.5e9), (4, 4.0)]
)
def test_quantities_of_kubernetes_are_read(text: str, number: float) -> None:
    assert quantity(text) == number
