"""Prices from files of users: three forms told apart, and no figure that is missing becomes zero."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.tables.price_files import load_prices, parse_prices
from cost_aware_operator.costs.tables.prices import PriceBook, PriceError

SKYPILOT = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone,GpuInfo\n"
    "p3.2xlarge,V100,1.0,8.0,61.0,3.06,0.37,us-east-1,us-east-1a,\"{'Gpus': [{'Name': 'V100'}]}\"\n"
    "p3.2xlarge,V100,1.0,8.0,61.0,3.06,0.75,us-east-1,us-east-1b,\n"
    "p5.48xlarge,H100,8.0,192.0,2048.0,98.32,,us-east-1,us-east-1a,\n"
    "new.type,H100,8.0,192.0,2048.0,,12.5,us-east-1,us-east-1a,\n"
)
OPENCOST = (
    "EndTimestamp,InstanceID,Region,AssetClass,InstanceIDField,InstanceType,MarketPriceHourly,Version\n"
    "2026-10-01 00:00:00 UTC,,us-east-1,node,,p3.2xlarge,1.99,\n"
    "2026-10-01 00:00:00 UTC,g5.xlarge,,node,metadata.labels.node.kubernetes.io/instance-type,,0.8,\n"
    "2026-10-01 00:00:00 UTC,pvc-1,,pv,metadata.name,,0.0001,\n"
)


def usd(book: PriceBook, name: str, *, spot: bool = False, zone: str | None = None) -> float | None:
    price = book.price(name, spot=spot, zone=zone)
    return None if price is None else price.hourly_usd


def parse(text: str, base: PriceBook | None = None) -> PriceBook:
    return parse_prices(text, "prices", "2026-11-21", base)


def test_a_skypilot_catalog_prices_zones_and_leaves_an_empty_spot_price_unknown() -> None:
    book = parse(SKYPILOT, PriceBook())
    assert usd(book, "p3.2xlarge", zone="us-east-1a") == usd(book, "p3.2xlarge") == 3.06
    assert [usd(book, "p3.2xlarge", spot=True, zone=f"us-east-1{z}") for z in "ab"] == [0.37, 0.75]
    assert usd(book, "p3.2xlarge", spot=True) is None, "its zones disagree"
    assert usd(book, "p5.48xlarge", spot=True, zone="us-east-1a") is None
    assert usd(book, "new.type", zone="us-east-1a") is None
    assert usd(book, "new.type", spot=True) == 12.5


def test_opencost_s_custom_pricing_prices_nodes_by_type_and_keeps_its_date() -> None:
    price = parse(OPENCOST).price("p3.2xlarge", spot=True, zone="any")
    assert price is not None
    assert (price.hourly_usd, price.as_of) == (1.99, "2026-10-01")
    assert "OpenCost" in price.source
    assert usd(parse(OPENCOST), "g5.xlarge") == 0.8


def test_a_file_of_overrides_is_read_from_its_path_and_dated_by_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('\ufeff[{"instanceType": "p3.2xlarge", "hourlyUSD": 1.5}]', encoding="utf-8")
    book = load_prices(path)
    price = book.price("p3.2xlarge")
    assert price is not None
    assert price.hourly_usd == 1.5
    assert len(price.as_of) == len("2026-11-21")
    assert usd(book, "p3.8xlarge") == 12.24, "the shipped book stays below"


def test_the_newest_file_wins_over_the_one_before() -> None:
    first = parse('[{"instanceType": "a", "hourlyUSD": 1}, {"instanceType": "b", "hourlyUSD": 1}]')
    book = parse('[{"instanceType": "a", "hourlyUSD": 2}]', first)
    assert (usd(book, "a"), usd(book, "b")) == (2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "prices: is empty: write a JSON list"),
        ("a,b\n1,2\n", "prices: unknown form: write a JSON list"),
        ("{}", "prices: prices.json: expected a list"),
        ("[" * 100_000, "prices: prices.json is not JSON"),
        ('[{"instanceType": "a", "hourlyUSD": 1' + "0" * 400 + "}]", "row 0 (a): hourlyUSD must be a positive"),
        ('[{"instanceType": "a", "hourlyUSD": 1, "zone": 3}]', "row 0 (a): zone must be a name, got 3"),
        (SKYPILOT.replace("0.37", "nan"), "prices, row 2, SpotPrice: must be above 0"),
        (SKYPILOT.replace("98.32", "-98.32"), "prices, row 4, Price: must be above 0"),
        (SKYPILOT.replace("98.32", "0"), "prices, row 4, Price: must be above 0"),
        (SKYPILOT.replace("98.32", ""), "prices, row 4, Price: is missing and so is SpotPrice (p5.48xlarge)"),
        (SKYPILOT.replace("98.32", "cheap"), "prices, row 4, Price: is not a number: 'cheap'"),
        (SKYPILOT.replace("p5.48xlarge", ""), "prices, row 4, InstanceType: is missing"),
        (SKYPILOT.replace("us-east-1,us-east-1b", ","), "prices, row 3, Region: is missing"),
        (SKYPILOT.replace("3.06,0.75,us-east-1,us-east-1b", "9,0.75,us-east-1,us-east-1a"), "costs 9.0 here and 3.06 in row 2"),
        (SKYPILOT + "a,b,1,1,1,1,1,r,z,i,more\n", "row 6, the row: has more cells than the header's 10"),
        (OPENCOST.replace("1.99", ""), "prices, row 2, MarketPriceHourly: is missing (p3.2xlarge)"),
        (OPENCOST.replace("1.99", "inf"), "prices, row 2, MarketPriceHourly: must be above 0"),
        (OPENCOST.replace(",node,,p3", ",gpu,,p3"), "prices, row 2, AssetClass: is 'gpu'"),
        (OPENCOST.replace("p3.2xlarge", ""), "prices, row 2, InstanceType: is missing, and the row names a single node"),
        (OPENCOST.replace("2026-10-01 00:00:00 UTC,,us", "soon,,us"), "prices, row 2, EndTimestamp: is not a date"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_with_file_row_and_column(text: str, said: str) -> None:
    with pytest.raises(PriceError) as error:
        parse(text)
    assert said in str(error.value)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.csv", tmp_path, binary):
        with pytest.raises(PriceError, match="cannot be read"):
            load_prices(path)


CELL = st.one_of(st.sampled_from(["", "nan", "-1", "0", "1.5", "1e400", "p3.2xlarge", "node"]), st.text(max_size=6))


@given(
    st.sampled_from([SKYPILOT, OPENCOST]), st.lists(st.lists(CELL, max_size=11).map(",".join), max_size=4), st.text()
)
def test_any_text_gives_positive_prices_or_an_error_that_names_the_file(form: str, rows: list[str], junk: str) -> None:
    for text in (form.splitlines()[0] + "\n" + "\n".join(rows), junk):
        try:
            book = parse(text, PriceBook())
        except PriceError as error:
            assert str(error).startswith("prices")  # noqa: PT017
        else:
            assert all(0 < o.price.hourly_usd < math.inf for o in book.overrides)
