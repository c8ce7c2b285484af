"""What a run pays beside its nodes: dated, sourced, and an error where it is not known."""

from __future__ import annotations

import pytest

from cost_aware_operator.costs.search.structure import Terms, at_list_prices
from cost_aware_operator.costs.tables.fees import between_zones, fee, read
from cost_aware_operator.costs.tables.prices import USD_PER_GB_BETWEEN_ZONES, PriceError

ROW = {"provider": "aws", "fee": "gp3", "usd": "0.08", "unit": "GiB-month", "as_of": "2025-06-01", "source": "a page"}


def test_both_directions_between_zones_are_what_the_ledger_books() -> None:
    assert between_zones("aws") == USD_PER_GB_BETWEEN_ZONES
    assert between_zones("gcp") == 0.01


def test_terms_at_list_prices() -> None:
    terms = at_list_prices(Terms(stored_gib=100, storage_usd_per_gib_month=1.0), "aws", "s3")
    assert (terms.storage_usd_per_gib_month, terms.usd_per_gb, terms.management_hourly_usd) == (0.023, 0.02, 0.10)
    assert terms.stored_gib == 100


def test_what_has_no_row_is_named() -> None:
    with pytest.raises(PriceError, match="no row aws, tape: aws has between-regions, "):
        fee("aws", "tape")
    with pytest.raises(PriceError, match="no row moon, gp3: known are aws, gcp"):
        fee("moon", "gp3")
    with pytest.raises(PriceError, match="aws, to-internet: is priced by the GB: write a kind of storage"):
        at_list_prices(Terms(), "aws", "to-internet")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        *((column, "", f"{column} is missing") for column in ROW),
        ("usd", "nan", "usd must be a positive number"),
        ("usd", "0", "usd must be a positive number"),
        ("usd", "-1", "usd must be a positive number"),
        ("usd", "x", "usd must be a positive number"),
        ("unit", "TB", "unit must be one of GB, GiB-month, hour"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(column: str, value: str, said: str) -> None:
    with pytest.raises(PriceError, match=rf"fees.csv, row 2 \(.*{said}"):
        read([{**ROW, column: value}])


def test_a_row_that_stands_twice_is_named() -> None:
    with pytest.raises(PriceError, match=r"row 3 \(aws, gp3\): stands twice"):
        read([ROW, ROW])
