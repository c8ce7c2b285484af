"""The books close by cause and by block, and savings are against the submitted plan as it was seen, never a straw man."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.factories.facts import START, decide, running
from tests.support.factories.ledger import at, pod
from tests.support.factories.stragglers import FIRST, trained

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.cli.jobs.views import one_line, summary
from cost_aware_operator.control.policy.accounting import fees_now
from cost_aware_operator.ledger.blocks import Baseline, Block, by_block, saved, total_usd
from cost_aware_operator.ledger.ledger import Cause, Fees, LedgerState, TrainedSteps, accrue
from cost_aware_trainer.contract import Phase

FEES = Fees(storage_hourly_usd=0.36, management_hourly_usd=0.72)


def test_every_phase_is_in_the_block_that_a_prediction_would_put_it_in() -> None:
    phases = {
        Phase.COMPUTE: 50.0,
        Phase.PIPELINE_BUBBLE: 10.0,
        Phase.COMMUNICATION: 20.0,
        Phase.CHECKPOINT: 5.0,
        Phase.DATA: 5.0,
    }
    state = accrue(
        LedgerState(), [pod(attempt=1, phase_seconds=phases, otherwise=Cause.RESTART)], TrainedSteps(), at(100), FEES
    )
    assert by_block(state) == {
        Block.COMPUTE: pytest.approx(0.060),
        Block.COMMUNICATION: pytest.approx(0.020),
        Block.STORAGE: pytest.approx(0.010 + 0.01),
        Block.MANAGEMENT: pytest.approx(0.010 + 0.02),
    }


@given(
    looks=st.lists(st.floats(0, 1000), max_size=8),
    shares=st.lists(st.floats(0, 1), min_size=len(Phase), max_size=len(Phase)),
    resumed=st.integers(0, 100),
    late=st.floats(0, 5),
)
def test_blocks_and_causes_add_up_to_the_whole_whatever_happens(
    looks: list[float], shares: list[float], resumed: int, late: float
) -> None:
    state, whole = LedgerState(), sum(shares) or 1.0
    for now in (*sorted(looks), 1010.0):
        attempt = 1 if now < 500 else 2
        seen = now if attempt == 1 else now - 500
        phases = {phase: seen * share / whole for phase, share in zip(Phase, shares, strict=True)}
        progress = TrainedSteps(attempt, int(seen) + (resumed if attempt == 2 else 0), resumed if attempt == 2 else 0)
        end = 1000.0 if now >= 1000 + late else None
        pods = [pod(0, "a", end=end, attempt=attempt, phase_seconds=phases, sent_bytes=now * 1e8, zone="x"),
                pod(1, "b", end=end, zone="y")]  # fmt: skip
        state = accrue(state, pods, progress, at(now), FEES)
        total = total_usd(state)
        assert sum(by_block(state).values()) == pytest.approx(total, rel=0.005)
        assert total == pytest.approx(
            state.pod_seconds * 0.001 + state.transfer_usd + state.storage_usd + state.management_usd
        )
        assert all(usd >= -1e-9 for usd in by_block(state).values())


def test_fees_run_while_a_pod_does_and_are_booked_once() -> None:
    state = LedgerState()
    for now in (100, 100, 50, 200):
        state = accrue(state, [pod()], TrainedSteps(), at(now), FEES)
    assert (state.storage_usd, state.management_usd) == (pytest.approx(0.02), pytest.approx(0.04))
    state = accrue(state, [], TrainedSteps(), at(1000), FEES)
    assert state.management_usd == pytest.approx(0.04), "nothing is paid while suspended"
    state = accrue(state, [pod(uid="b", start=1100)], TrainedSteps(), at(1200), FEES)
    assert state.management_usd == pytest.approx(0.06)


def test_fees_are_those_of_the_provider_of_the_nodes() -> None:
    fees = fees_now(running())
    assert fees.management_hourly_usd == pytest.approx(0.10), "EKS"
    assert 0 < fees.storage_hourly_usd < 0.01
    unknown = {name: replace(node, instance_type=None) for name, node in running().nodes.items()}
    assert fees_now(running(nodes=unknown)) == Fees()


BASELINE = Baseline(plan="2x1x1 on 2 nodes", nodes=2, step_seconds=1.0, step=100, accrued_usd=1.0, pod_seconds=1000.0)


def test_savings_are_against_the_first_plan_at_its_observed_rate_and_the_prices_paid() -> None:
    state = LedgerState(usd={Cause.PRODUCTIVE: 1.5}, pod_seconds=1500.0)
    found = saved(BASELINE, state, 500)
    assert found is not None
    assert found.paid_usd == pytest.approx(0.5)
    assert found.counterfactual_usd == pytest.approx(400 * 1.0 * 2 * 0.001)
    assert found.usd == pytest.approx(0.3)


def test_a_change_that_has_not_paid_for_itself_yet_shows_what_it_cost() -> None:
    found = saved(BASELINE, LedgerState(usd={Cause.RESTART: 1.2}, pod_seconds=1200.0), 100)
    assert found is not None
    assert found.usd == pytest.approx(-0.2)


def test_there_are_no_savings_before_a_change_and_none_without_a_price() -> None:
    status = decide(trained(FIRST)).status
    assert status.cost is not None
    assert status.cost.savings is None
    assert saved(BASELINE, LedgerState(usd={Cause.IDLE: 1.0}, pod_seconds=1500.0), 500) is None


def test_the_first_change_writes_down_how_the_submitted_plan_did_and_later_ones_leave_it() -> None:
    first = decide(trained(FIRST))
    baseline = first.record.baseline
    assert baseline is not None
    assert (baseline.nodes, baseline.step, baseline.step_seconds) == (2, 40, pytest.approx(1.0))
    kept = FIRST.model_copy(update={"baseline": BASELINE})
    assert decide(trained(kept)).record.baseline == BASELINE


def test_blocks_and_savings_are_told_on_the_terminal() -> None:
    record = FIRST.model_copy(
        update={"baseline": BASELINE.model_copy(update={"step": 0, "accrued_usd": 0.0, "pod_seconds": 0.0})}
    )
    given_ = trained(record)
    status = decide(replace(given_, now=START + timedelta(seconds=60))).status
    assert status.cost is not None
    assert status.cost.savings is not None
    assert "2x1x1 on 2 nodes, at the 1 s a step" in status.cost.savings.counterfactual
    key = JobKey("team", "gpt")
    assert "saved" in one_line(key, status)
    text = summary(key, status)
    assert all(f"    {block}" in text for block in Block)
    assert "against the submitted plan" in text
