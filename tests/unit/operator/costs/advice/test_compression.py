"""Compression: what it moves, what it takes, and that it says no."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.advice.compression import Compression, GradientCompressor
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.communication import Fabric, Group, Link
from cost_aware_operator.costs.tables.hardware import accelerator

A100 = accelerator("A100-SXM-80GB")
COMPRESSOR = GradientCompressor(A100)
BILLION = 1e9


def network(gbit: float, nodes: int = 16) -> Group:
    return Fabric(8, Link(230e9, 8e-6), Link(gbit / 8 * 1e9 * 0.79, 20e-6)).group(8 * nodes)


def test_bytes_are_the_seed_s_ratios_and_the_scales() -> None:
    group = network(100)
    sent = {kind: COMPRESSOR.cost(kind, group, 250e6, 0.0).sent_bytes for kind in Compression}
    whole = 2 * 127 / 128 * 1000e6
    assert sent[Compression.NONE] == pytest.approx(whole)
    assert sent[Compression.BF16] == pytest.approx(whole / 2)
    assert sent[Compression.INT8] == pytest.approx(whole / 4 * (1 + 2 / 256))
    assert sent[Compression.INT4] == pytest.approx(whole / 8 * (1 + 4 / 32))


def test_a_billion_gradients_take_about_seven_milliseconds_to_quantise_on_an_a100() -> None:
    """research/trainer.md, E: about 10 bytes of memory traffic an element."""
    assert COMPRESSOR.quantise_seconds(BILLION, 128, Compression.INT8) == pytest.approx(0.007, rel=0.05)


def test_it_pays_on_a_slow_network_and_never_inside_a_node_that_hides_it() -> None:
    slow = COMPRESSOR.advise(network(100), BILLION, 0.0, job_hourly_usd=16 * 21.957642)
    assert slow.use is Compression.INT4
    assert slow.saved_seconds > 0.5
    assert slow.saved_usd == pytest.approx(slow.saved_seconds * 16 * 21.957642 / 3600)
    inside = COMPRESSOR.advise(network(100, nodes=1), BILLION, 0.3)
    assert not inside.pays
    assert inside.reason.startswith("no: ")
    assert "to quantise" in inside.reason


def test_what_backward_hides_is_not_saved() -> None:
    open_, hidden = (COMPRESSOR.advise(network(400), BILLION, t).saved_seconds for t in (0.0, 10.0))
    assert hidden < open_


def test_only_what_is_allowed_is_advised() -> None:
    assert COMPRESSOR.advise(network(25), BILLION, 0.0, allowed=[Compression.BF16]).use is Compression.BF16
    assert not COMPRESSOR.advise(network(25), BILLION, 0.0, allowed=[]).pays
    assert not COMPRESSOR.advise(network(25), BILLION, 0.0, allowed=[Compression.BF16], gradient_bytes=2).pays


def test_a_gradient_has_a_float_type() -> None:
    with pytest.raises(AnalysisError, match=r"gradient_bytes: 3 .* write 4"):
        COMPRESSOR.cost(Compression.INT8, network(25), 1.0, 0.0, gradient_bytes=3)


@given(st.floats(0, 1e12), st.floats(0, 10), st.floats(1, 3200), st.integers(1, 64), st.floats(1, 50))
def test_the_answer_is_yes_only_if_saved_exceeds_quantisation(
    elements: float, window: float, gbit: float, nodes: int, factor: float
) -> None:
    advice = COMPRESSOR.advise(network(gbit, nodes), elements, window, job_hourly_usd=10.0)
    plain = advice.options[0]
    used = next(o for o in advice.options if o.compression is advice.use)
    assert advice.pays is (plain.exposed_seconds - used.exposed_seconds > used.quantise_seconds)
    assert 0 <= advice.saved_usd < math.inf
    for option in advice.options:
        assert 0 <= option.exposed_seconds <= option.communication_seconds * (1 + 1e-9) < math.inf
    faster = COMPRESSOR.advise(network(gbit * factor, nodes), elements, window)
    shortest = min(o.cost_seconds for o in advice.options)
    assert min(o.cost_seconds for o in faster.options) <= shortest * (1 + 1e-9)


@given(st.floats(1, 20))
def test_more_memory_bandwidth_never_costs_time(factor: float) -> None:
    faster = GradientCompressor(replace(A100, memory_gbytes_per_s=A100.memory_gbytes_per_s * factor))
    for kind in Compression:
        assert faster.quantise_seconds(1e9, 8, kind) <= COMPRESSOR.quantise_seconds(1e9, 8, kind)


@given(st.floats(), st.floats(), st.floats(), st.floats())
def test_any_figures_give_an_answer_or_name_the_field(a: float, b: float, c: float, d: float) -> None:
    try:
        advice = COMPRESSOR.advise(network(100), a, b, bucket_bytes=c, job_hourly_usd=d)
    except AnalysisError as error:
        assert "write" in str(error)  # noqa: PT017
    else:
        assert 0 <= advice.saved_usd < math.inf


def test_a_gain_within_the_error_of_the_model_is_no_reason_to_compress():
    def advised(worth):
        return COMPRESSOR.advise(network(400, nodes=2), BILLION, 0.0, worth=worth)

    every = advised(0.0)
    gain = every.saved_seconds / every.options[0].exposed_seconds
    assert advised(gain - 0.01).use is every.use
    refused = advised(gain + 0.01)
    assert not refused.pays
    assert "of what is exposed, which this model cannot tell from none" in refused.reason
