"""The operator's metrics: what is not known has no series, and a job that is gone has none either."""

from __future__ import annotations

from tests.support.factories.facts import job, publish, running

from cost_aware_operator.app.telemetry import Telemetry


def series(telemetry: Telemetry, name: str | None = None) -> set[str]:
    """The names of the series that belong to a job."""
    return {
        sample.name
        for family in telemetry.registry.collect()
        for sample in family.samples
        if "job" in sample.labels and name in (None, sample.name)
    }


def test_dollars_an_hour_are_absent_while_a_price_is_unknown_and_never_zero() -> None:
    telemetry = Telemetry(lambda: 0.0, lambda: 0.0)
    publish(telemetry, running(nodes={}))
    assert series(telemetry, "catj_hourly_usd") == set()
    publish(telemetry, running())
    labels = {"namespace": "team", "job": "gpt"}
    assert telemetry.registry.get_sample_value("catj_hourly_usd", labels) == 6.12
    publish(telemetry, running(nodes={}))
    assert series(telemetry, "catj_hourly_usd") == set()
    assert series(telemetry, "catj_cost_usd")


def test_all_series_of_a_job_go_with_it_and_others_stay() -> None:
    telemetry = Telemetry(lambda: 0.0, lambda: 0.0)
    gone, stays = running(), running()
    publish(telemetry, gone)
    names = series(telemetry)
    assert names >= {"catj_step", "catj_loss", "catj_time_share_ratio", "catj_cost_usd", "catj_hourly_usd"}
    key = gone.job.key
    telemetry.forgotten(key)
    assert series(telemetry) == set()
    publish(telemetry, stays)
    telemetry.forgotten(type(key)("other", key.name))
    assert series(telemetry) == names


def test_forgetting_a_job_that_was_never_published_is_harmless() -> None:
    Telemetry(lambda: 0.0, lambda: 0.0).forgotten(job().key)
