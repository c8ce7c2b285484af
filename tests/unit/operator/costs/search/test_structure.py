"""The four blocks: they close to 100 %, and each second is booked once."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.models.layout import Layout, Recompute, StateSharding
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.predict import predict
from cost_aware_operator.costs.search.structure import Terms, structure
from cost_aware_operator.costs.tables.hardware import NumberFormat, accelerator

SHAPE = DecoderShape(24, 2048, 16, 16, 8192, 2048, 50304, gated_mlp=False, tied_embeddings=True)
LAYOUT = Layout(16, 2, 1, 1, StateSharding.ZERO1, 1, Recompute.NONE, 2, 512, NumberFormat.BF16)
MACHINE = Machine(accelerator("A100-SXM-40GB"), 8, 300, 100)
PREDICTION = predict(SHAPE, MACHINE, LAYOUT)
TERMS = Terms(
    checkpoint_seconds=5,
    checkpoint_interval_seconds=600,
    input_share=0.02,
    goodput=0.97,
    stored_gib=2000,
    storage_usd_per_gib_month=0.08,
    zone_gb_per_step=0.1,
    management_hourly_usd=0.10,
)


def test_a_bare_run_is_nodes_times_hours_times_price() -> None:
    found = structure(PREDICTION, LAYOUT, 8, 1000, 21.957642)
    assert found.hours == pytest.approx(1000 * PREDICTION.step_seconds / 3600)
    assert found.total_usd == pytest.approx(4 * found.hours * 21.957642)
    assert found.storage_usd == found.management_usd == 0
    assert found.communication_usd > 0


def test_every_second_and_every_fee_is_booked_once() -> None:
    found = structure(PREDICTION, LAYOUT, 8, 1000, 21.957642, TERMS)
    step = PREDICTION.step_seconds
    assert found.hours == pytest.approx(1000 * step / 0.98 * (1 + 5 / 600) / 0.97 / 3600)
    fees = 1000 * 0.1 * 0.02 + 2000 * 0.08 * found.hours / 730 + 0.10 * found.hours
    assert found.total_usd == pytest.approx(4 * found.hours * 21.957642 + fees)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(block > 0 for block in found.shares.values())


def test_a_faster_network_shrinks_communication_alone() -> None:
    fast = predict(SHAPE, replace(MACHINE, network_gbit_per_s=1600), LAYOUT)
    before, after = (structure(p, LAYOUT, 8, 1000, 21.957642) for p in (PREDICTION, fast))
    assert after.communication_usd < before.communication_usd
    assert after.total_usd < before.total_usd


def test_what_costs_must_have_a_price() -> None:
    with pytest.raises(AnalysisError, match="storage_usd_per_gib_month: missing"):
        Terms(stored_gib=1)
    with pytest.raises(AnalysisError, match="checkpoint_interval_seconds: missing"):
        Terms(checkpoint_seconds=1)


@given(
    st.sampled_from(["storage_usd_per_gib_month", "management_hourly_usd", "zone_gb_per_step", "checkpoint_seconds"]),
    st.floats(1, 100),
    st.floats(1, 100),
)
def test_dollars_rise_with_every_price(name: str, factor: float, price: float) -> None:
    base = structure(PREDICTION, LAYOUT, 8, 1000, 10.0, TERMS)
    worse = structure(PREDICTION, LAYOUT, 8, 1000, 10.0, replace(TERMS, **{name: getattr(TERMS, name) * factor}))
    assert base.total_usd <= worse.total_usd * (1 + 1e-12)
    assert base.total_usd <= structure(PREDICTION, LAYOUT, 8, 1000, 10.0 * price, TERMS).total_usd * (1 + 1e-12)


@given(
    st.fixed_dictionaries({f.name: st.one_of(st.floats(), st.floats(0, 1)) for f in fields(Terms)}),
    st.integers(),
    st.integers(),
    st.floats(),
)
def test_any_terms_give_finite_dollars_or_name_the_field(
    values: dict[str, float], gpus: int, steps: int, usd: float
) -> None:
    try:
        found = structure(PREDICTION, LAYOUT, gpus, steps, usd, Terms(**values))
    except AnalysisError as error:
        assert "write" in str(error)  # noqa: PT017
    else:
        assert 0 < found.total_usd < math.inf
        assert sum(found.shares.values()) == pytest.approx(1)
