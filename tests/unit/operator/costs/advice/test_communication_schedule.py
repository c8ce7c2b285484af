"""Buckets: the simulation by hand, the choice against every other, and overlap that does not grow by wishing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_aware_operator.costs.advice.communication_schedule import CommunicationScheduler, LayerGradients
from cost_aware_operator.costs.advice.data_parallel import exposed_seconds
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.communication import Fabric, Link

LAYERS = st.lists(st.builds(LayerGradients, st.floats(0, 10), st.integers(0, 10**9)), min_size=1, max_size=7)


def fabric(network: float = 12.5e9, latency: float = 20e-6) -> Fabric:
    return Fabric(8, Link(230e9, 8e-6), Link(network, latency))


def line(alpha: float, per_byte: float):  # type: ignore[no-untyped-def]
    return lambda size: alpha + size * per_byte


def test_a_timeline_by_hand() -> None:
    """Layers of 1 s and 10 bytes; a bucket of 20 bytes takes 1 + 2 s."""
    scheduler = CommunicationScheduler([LayerGradients(1.0, 10)] * 5, line(1.0, 0.1))
    found = scheduler.simulate(20.0)
    assert [(b.ready_seconds, b.start_seconds, b.end_seconds) for b in found.sent] == [(2, 2, 5), (4, 5, 8), (5, 8, 10)]
    assert (found.communication_seconds, found.exposed_seconds, found.overlap) == (8, 5, pytest.approx(3 / 8))


def test_latency_asks_for_large_buckets_and_its_absence_for_small_ones() -> None:
    layers = [LayerGradients(0.01, 50_000_000)] * 32
    free = CommunicationScheduler(layers, line(0.0, 1e-10)).optimise()
    dear = CommunicationScheduler(layers, line(0.05, 1e-10)).optimise()
    assert free.best.bucket_bytes == 50e6
    assert dear.best.bucket_bytes > 3 * 50e6
    assert dear.best.exposed_seconds < dear.per_layer.exposed_seconds
    assert free.best.exposed_seconds < free.whole.exposed_seconds


def test_it_agrees_with_the_closed_form_for_equal_buckets() -> None:
    group = fabric().group(32)
    found = CommunicationScheduler.even(24, 2.4e9, 0.5, group).simulate(1e8)
    assert found.exposed_seconds == pytest.approx(exposed_seconds(group.all_reduce(1e8), 24, 0.5))


def test_overlap_shrinks_as_communication_outgrows_backward() -> None:
    """The seed's grows with communication until it reaches 100 %."""
    overlaps = [
        CommunicationScheduler.even(32, 4e9, seconds, fabric().group(64)).optimise().best.overlap
        for seconds in (2.0, 0.5, 0.1, 0.01)
    ]
    assert overlaps == sorted(overlaps, reverse=True)
    assert overlaps[0] > 0.9
    assert overlaps[-1] < 0.05


@given(LAYERS, st.floats(0, 1), st.floats(1e-12, 1e-6))
@settings(max_examples=60)
def test_no_bucket_size_and_no_grouping_is_better(layers: list[LayerGradients], alpha: float, beta: float) -> None:
    reduce = line(alpha, beta)
    advice = CommunicationScheduler(layers, reduce).optimise()
    scheduler = CommunicationScheduler(layers, reduce)
    for size in [0.0, 1.0, 1e6, 1e8, 1e10, *(layer.size_bytes * 1.5 for layer in layers)]:
        assert advice.best.exposed_seconds <= scheduler.simulate(size).exposed_seconds + 1e-9
    groupings = []
    for cuts in itertools.product([False, True], repeat=len(layers) - 1):
        end = ready = 0.0
        held = 0
        for layer, cut in zip(layers, [*cuts, True], strict=True):
            ready, held = ready + layer.seconds, held + layer.size_bytes
            if cut and held > 0:
                end, held = max(end, ready) + reduce(held), 0
        groupings.append(max(0.0, end - sum(layer.seconds for layer in layers)))
    assert advice.bound_seconds == pytest.approx(min(groupings), rel=1e-6, abs=1e-6)
    assert advice.best.exposed_seconds >= advice.bound_seconds - 1e-6


@given(st.integers(1, 40), st.floats(0, 1e11), st.floats(0, 10), st.integers(1, 64), st.floats(1, 50))
@settings(max_examples=40)
def test_more_bandwidth_never_exposes_more(layers: int, size: float, seconds: float, ranks: int, factor: float) -> None:
    slow, fast = (
        CommunicationScheduler.even(layers, size, seconds, fabric(net).group(ranks)).optimise().best
        for net in (2e9, 2e9 * factor)
    )
    assert 0 <= slow.exposed_seconds < math.inf
    assert 0 <= slow.overlap <= 1
    assert fast.exposed_seconds <= slow.exposed_seconds * (1 + 1e-6) + 1e-9


def test_many_layers_stay_quick_and_above_the_bound() -> None:
    advice = CommunicationScheduler.even(1000, 4e10, 1.0, fabric().group(64)).optimise()
    assert advice.bound_seconds <= advice.best.exposed_seconds
    assert advice.bucket_mib > 0


@given(st.floats(), st.floats(), st.integers(-3, 5000))
@settings(max_examples=40)
def test_any_figures_give_an_answer_or_name_the_field(size: float, seconds: float, layers: int) -> None:
    try:
        advice = CommunicationScheduler.even(min(layers, 3000), size, seconds, fabric().group(8)).optimise()
    except AnalysisError as error:
        assert "write" in str(error)  # noqa: PT017
    else:
        assert 0 <= advice.best.exposed_seconds < math.inf


def test_no_layers_is_an_error() -> None:
    with pytest.raises(AnalysisError, match="layers: 0 of them: write 1 to 2000"):
        CommunicationScheduler([], lambda size: size)
