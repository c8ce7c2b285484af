"""The operator's environment: what the chart may set is read, and what cannot be is refused by its name."""

from __future__ import annotations

import pytest

from cost_aware_operator.app.settings import Settings, SettingsError


@pytest.mark.parametrize(("text", "seconds"), [("", 5.0), ("2", 2.0), ("0.5", 0.5), ("2.5", 2.5), ("3600", 3600.0)])
def test_the_scrape_interval_may_be_a_fraction(text: str, seconds: float) -> None:
    assert Settings.from_environment({"CATJ_SCRAPE_INTERVAL_SECONDS": text}).scrape_interval_seconds == seconds


@pytest.mark.parametrize("text", ["0", "0.4", "-1", "3601", "nan", "inf", "often"])
def test_an_impossible_scrape_interval_is_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError, match="CATJ_SCRAPE_INTERVAL_SECONDS"):
        Settings.from_environment({"CATJ_SCRAPE_INTERVAL_SECONDS": text})


@pytest.mark.parametrize("text", ["prometheus:9090", "ftp://prometheus", "http://", "/api"])
def test_an_address_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError, match="CATJ_PROMETHEUS_URL"):
        Settings.from_environment({"CATJ_PROMETHEUS_URL": text})


def test_without_an_address_the_ranks_are_asked() -> None:
    assert Settings.from_environment({}).prometheus_url is None
    assert Settings.from_environment({"CATJ_PROMETHEUS_URL": "https://p/prom"}).prometheus_url == "https://p/prom"
