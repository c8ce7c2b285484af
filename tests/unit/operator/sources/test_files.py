"""Mounted configuration changes while the operator runs, and a typing error in it stops nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cost_aware_operator.app.settings import Settings, SettingsError
from cost_aware_operator.sources.files import defaults_file, price_file


def test_a_changed_price_is_in_force_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    watched = price_file(path)
    listed = watched.value().price("p3.2xlarge")
    path.write_text('[{"instanceType": "p3.2xlarge", "hourlyUSD": 1.5}]')
    overridden = watched.value().price("p3.2xlarge")
    assert listed is not None
    assert overridden is not None
    assert (listed.hourly_usd, overridden.hourly_usd) == (3.06, 1.5)


def test_a_price_file_with_an_error_keeps_what_was_in_force_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prices.json"
    path.write_text('[{"instanceType": "p3.2xlarge", "hourlyUSD": 1.5}]')
    watched = price_file(path)
    watched.value()
    path.write_text('[{"instanceType": "p3.2xlarge", "hourlyUSD": -1}]')
    with caplog.at_level(logging.ERROR):
        kept = watched.value().price("p3.2xlarge")
    assert kept is not None
    assert kept.hourly_usd == 1.5
    assert "hourlyUSD" in caplog.text


def test_pod_defaults_are_read_and_an_unknown_one_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text("image: mine\nvolumeMounts: [{name: torch, mountPath: /opt/torch}]\n")
    watched = defaults_file(path)
    assert watched.value().image == "mine"
    path.write_text("imgae: typo\n")
    with caplog.at_level(logging.ERROR):
        assert watched.value().image == "mine"
    assert "imgae" in caplog.text


def test_settings_name_the_variable_that_is_wrong() -> None:
    assert Settings.from_environment({"CATJ_WATCH_NAMESPACES": "a,b"}).watch_namespaces == ("a", "b")
    with pytest.raises(SettingsError, match="CATJ_SCRAPE_CONCURRENCY"):
        Settings.from_environment({"CATJ_SCRAPE_CONCURRENCY": "many"})
