"""How often a run is saved, where nobody wrote it: from what a save blocks and how often something fails."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.facts import (
    BOOK,
    MEMBERS,
    RECORD,
    START,
    agent,
    child,
    decide,
    facts,
    job,
    pod,
    running,
    sample,
)

from cost_aware_operator.control.policy.checkpoint_interval import (
    LEAST_SECONDS,
    MOST_SECONDS,
    failures_per_hour,
    interval_of,
    saves_seen,
)
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import Saves
from cost_aware_operator.costs.tables.hazards import node_hazard
from cost_aware_operator.ledger.ledger import LedgerState
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan, planning_key
from cost_aware_operator.workload.order import run_order
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase, Phase

PLAN = make_plan(PlanInput(job().spec, BOOK))
assert isinstance(PLAN, Plan)
SPOT = {f"node-{i}": NodeView(f"node-{i}", "p3.2xlarge", None, True) for i in range(2)}
ENDED = {u: agent(i, AgentPhase.FAILED) for i, u in MEMBERS.items()}


def chosen(facts: Facts) -> tuple[float, str]:
    """The interval for the next attempt, and why."""
    return interval_of(Reading(facts), facts.record, PLAN)


def saved(stall: float | None, **over: Any) -> Facts:
    """A run whose saves block it for so long."""
    record = RECORD.model_copy(update={"saves": Saves(attempt=1, newest=5, count=1, stall_seconds=stall)})
    return running(**({"record": record} | over))


def test_what_is_written_is_done() -> None:
    assert chosen(saved(1.0, given=job(checkpoint={"intervalSeconds": 7}))) == (
        7.0,
        "spec.checkpoint.intervalSeconds",
    )


def test_the_interval_is_the_root_of_twice_stall_times_mean_time_between_failures() -> None:
    seconds, why = chosen(saved(2.0, nodes=SPOT))
    mtbf = 3600 / (2 * node_hazard(1, spot=True))
    assert seconds == pytest.approx(math.sqrt(2 * 2.0 * mtbf), rel=0.03)
    assert "2 s that a save blocks (measured)" in why
    assert "2 nodes, 2 of them spot" in why


@settings(max_examples=40)
@given(stall=st.floats(1e-4, 1e4), interruptions=st.integers(0, 50), hours=st.floats(0, 1e4), spot=st.booleans())
def test_it_is_bounded_and_shorter_where_more_fails(stall: float, interruptions: int, hours: float, spot: bool) -> None:
    ledger = LedgerState(pod_seconds=hours * 3600)
    given_ = saved(stall, **({"nodes": SPOT} if spot else {}))
    given_ = replace(given_, record=given_.record.model_copy(update={"ledger": ledger}))
    calm, _ = chosen(given_)
    rough = replace(given_, record=given_.record.model_copy(update={"interruptions": interruptions}))
    seconds, why = chosen(rough)
    assert LEAST_SECONDS <= seconds <= MOST_SECONDS
    assert seconds <= calm
    assert why
    assert failures_per_hour(rough, rough.record, PLAN)[0] >= failures_per_hour(given_, given_.record, PLAN)[0] > 0


def test_before_a_save_was_seen_what_one_blocks_is_predicted_or_a_minute_taken() -> None:
    assert "(predicted)" in chosen(saved(None))[1]
    own = job(trainer={"config": None, "module": "mine"}, model=None)
    assert chosen(saved(None, given=own))[0] == 60.0


def look(given_: Facts, checkpoint: int, blocked: float) -> Facts:
    """The run a little later, with its newest checkpoint and what saves have blocked so far."""
    phases = {Phase.COMPUTE: 30.0, Phase.CHECKPOINT: blocked}
    samples = {f"pod-{i}": (sample(i, 40, checkpoint_step=checkpoint, phase_seconds=phases),) for i in range(2)}
    return replace(
        given_,
        samples=samples,
        record=given_.record.model_copy(update={"saves": saves_seen(Reading(replace(given_, samples=samples)))}),
    )


def test_what_a_save_blocks_is_counted_at_whole_checkpoints_and_each_of_them_once() -> None:
    after = look(look(look(running(), 10, 2.0), 10, 2.0), 20, 5.0)
    assert (after.record.saves.count, after.record.saves.stall_seconds) == (2, 2.5)
    midway = look(after, 20, 6.5)
    assert midway.record.saves == after.record.saves, "the next save has blocked, and is not whole yet"


def test_the_checkpoint_that_was_resumed_from_is_not_a_save_of_the_attempt() -> None:
    resumed = running(record=RECORD.model_copy(update={"attempt_checkpoint": 10}))
    assert look(resumed, 10, 0.0).record.saves.count == 0


def test_the_next_attempt_is_given_the_interval_and_a_running_one_is_not_ended_for_it() -> None:
    steady = decide(saved(2.0, nodes=SPOT, order=run_order(job(), PLAN, 1)))
    assert steady.record.attempt == 1
    again = decide(saved(2.0, nodes=SPOT, agents=ENDED, order=run_order(job(), PLAN, 1)))
    assert again.order is not None
    assert again.order.plan is not None
    assert again.order.plan.checkpoint.interval_seconds == pytest.approx(120, rel=0.05)
    assert again.record.interruptions == 1
    assert again.status.checkpoint is not None
    assert again.status.checkpoint.reason.startswith("Young/Daly")
    assert again.status.checkpoint.stall_seconds == 2.0


def test_ranks_that_go_on_in_their_processes_keep_their_interval() -> None:
    order = run_order(job(), replace(PLAN, micro_batch=8), 1, interval_seconds=45.0)
    decision = decide(saved(2.0, nodes=SPOT, order=order))
    assert decision.record.attempt == 2
    assert decision.order is not None
    assert decision.order.plan is not None
    assert decision.order.plan.checkpoint.interval_seconds == 45.0


def test_a_suspension_is_no_failure() -> None:
    stopped = decide(running(given=job(suspend=True)))
    assert stopped.urgent, "it is written down at once"
    pods = (pod(0, "x"), pod(1, "y"))
    agents = {"x": agent(0, AgentPhase.WAITING, 0), "y": agent(1, AgentPhase.WAITING, 0)}
    resumed = decide(running(record=stopped.record, pods=pods, agents=agents, child=child(job())))
    assert resumed.record.attempt == 2
    assert (resumed.record.interruptions, resumed.record.stopped) == (0, False)


def test_no_plan_is_made_anew_for_an_interval() -> None:
    assert planning_key(job().spec) == planning_key(job(checkpoint={"intervalSeconds": 7}).spec)


def test_an_interval_in_a_first_order_comes_with_its_reason() -> None:
    waiting = {u: agent(i, AgentPhase.WAITING, 0) for i, u in MEMBERS.items()}
    decision = decide(facts(pods=(pod(0), pod(1)), child=child(job()), agents=waiting))
    assert decision.record.interruptions == 0
    assert decision.order is not None
    assert decision.order.plan is not None
    assert LEAST_SECONDS <= decision.order.plan.checkpoint.interval_seconds <= MOST_SECONDS
    assert (decision.record.attempt_at or START) - START < timedelta(minutes=2)
