"""From exposition text to speed and efficiency."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.factories.samples import sample

from cost_aware_operator.observing.samples import Scrape, ScrapeError, observe, parse_rank
from cost_aware_trainer.contract import LaunchStage, Phase

TEXT = """# TYPE catj_rank_step gauge
catj_rank_step{namespace="n",job="j",attempt="3",rank="1"} 42.0
# TYPE catj_rank_tokens_total counter
catj_rank_tokens_total{namespace="n",job="j",attempt="3",rank="1"} 1000.0
# TYPE catj_rank_loss gauge
catj_rank_loss{namespace="n",job="j",attempt="3",rank="1"} NaN
# TYPE catj_rank_phase_seconds_total counter
catj_rank_phase_seconds_total{namespace="n",job="j",attempt="3",rank="1",phase="compute"} 7.5
"""


def test_a_rank_s_metrics_are_read_and_what_is_not_finite_is_absent() -> None:
    read = parse_rank(TEXT)
    assert (read.rank, read.attempt, read.step, read.tokens, read.loss) == (1, 3, 42, 1000.0, None)
    assert read.phase_seconds == {Phase.COMPUTE: 7.5}


def test_how_long_an_attempt_took_to_its_first_step_is_read_by_stage_and_what_it_did_not_have_is_absent() -> None:
    stage = '# TYPE catj_rank_reconfiguration_seconds gauge\ncatj_rank_reconfiguration_seconds{{rank="1",attempt="3",stage="{}"}} {}\n'
    text = "".join(
        (
            TEXT,
            stage.format("drain", 1.5),
            stage.format("save", 0),
            stage.format("load", "NaN"),
            stage.format("later", 3),
        )
    )
    assert parse_rank(text).stage_seconds == {LaunchStage.DRAIN: 1.5}
    assert parse_rank(TEXT).stage_seconds == {}


def test_the_slowest_rank_s_share_of_the_network_is_what_the_probe_found() -> None:
    link = '# TYPE catj_rank_link_bytes_per_second gauge\ncatj_rank_link_bytes_per_second{{rank="1",attempt="3",level="{}"}} {}\n'
    assert parse_rank(TEXT).network_bytes_per_second is None
    assert parse_rank(TEXT + link.format("node", 9e9)).network_bytes_per_second is None
    assert parse_rank(TEXT + link.format("network", 2.5e6)).network_bytes_per_second == 2.5e6
    assert parse_rank(TEXT + link.format("network", "NaN")).network_bytes_per_second is None
    ranks = [replace(sample(i, 10), network_bytes_per_second=rate) for i, rate in enumerate((3e6, 2e6))]
    later = [replace(sample(i, 20), network_bytes_per_second=rate) for i, rate in enumerate((3e6, 2e6))]
    seen = observe([Scrape(0.0, tuple(ranks)), Scrape(10.0, tuple(later))])
    assert seen is not None
    assert seen.network_bytes_per_second == 2e6


@pytest.mark.parametrize("text", ["", "<html>", "up 1", 'catj_rank_step{rank="x",attempt="1"} 1'])
def test_what_is_not_a_rank_s_metrics_is_refused(text: str) -> None:
    with pytest.raises(ScrapeError):
        parse_rank(text)


def test_efficiency_is_the_share_that_moves_the_weights_over_all_ranks() -> None:
    scrapes = [Scrape(0.0, (sample(0, 10), sample(1, 10))), Scrape(10.0, (sample(0, 20), sample(1, 20)))]
    seen = observe(scrapes)
    assert seen is not None
    assert seen.efficiency == pytest.approx(0.8)
    assert seen.tokens_per_second == pytest.approx(20.0)
    assert seen.steps_per_second == pytest.approx(1.0)
    assert sum(seen.shares.values()) == pytest.approx(1.0)


def test_scrapes_of_another_attempt_are_not_compared() -> None:
    scrapes = [Scrape(0.0, (sample(0, 50, 1),)), Scrape(10.0, (sample(0, 5, 2),))]
    assert observe(scrapes) is None
    assert observe([*scrapes, Scrape(15.0, (sample(0, 9, 2),))]) is not None


def test_nothing_is_said_before_steps_were_taken() -> None:
    assert observe([]) is None
    assert observe([Scrape(0.0, (sample(0, 5),)), Scrape(9.0, (sample(0, 5),))]) is None
