"""The log's two forms: JSON that a log store can search by namespace and job, and text that names them first."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from cost_aware_operator.app.logs import LogFormat, set_up_logs
from cost_aware_operator.app.settings import Settings, SettingsError

ABOUT = {"namespace": "team", "job": "gpt", "attempt": 2, "predicted_usd": 1.5}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_namespace_job_and_figures_as_keys_of_their_own() -> None:
    stream = io.StringIO()
    set_up_logs(LogFormat.JSON, "INFO", stream)
    logging.getLogger("operator").warning("attempt %d begins", 2, extra=ABOUT)
    line = json.loads(stream.getvalue())
    assert line.pop("time")
    assert line == {"level": "WARNING", "logger": "operator", "message": "attempt 2 begins", **ABOUT}


def test_an_exception_stays_one_json_line() -> None:
    stream = io.StringIO()
    set_up_logs(LogFormat.JSON, "INFO", stream)
    try:
        raise ValueError("no such thing")
    except ValueError:
        logging.getLogger("operator").exception("reconcile failed", extra=ABOUT)
    [line] = stream.getvalue().splitlines()
    assert "no such thing" in json.loads(line)["exc_info"]


def test_a_text_line_names_the_job_it_is_about_or_else_its_logger() -> None:
    stream = io.StringIO()
    set_up_logs(LogFormat.TEXT, "INFO", stream)
    logging.getLogger("operator").info("attempt 2 begins", extra=ABOUT)
    logging.getLogger("operator").info("leads")
    logging.getLogger("operator").debug("not asked for")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("INFO team/gpt: attempt 2 begins")
    assert second.endswith("INFO operator: leads")


def test_the_form_is_read_from_the_environment_and_an_unknown_one_refused_by_name() -> None:
    assert Settings.from_environment({}).log_format is LogFormat.TEXT
    assert Settings.from_environment({"CATJ_LOG_FORMAT": "json"}).log_format is LogFormat.JSON
    with pytest.raises(SettingsError, match="CATJ_LOG_FORMAT must be text or json"):
        Settings.from_environment({"CATJ_LOG_FORMAT": "xml"})
