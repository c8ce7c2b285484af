"""The last step is done: recorded before anything else, and judged by all that is known of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.support.factories.adjusting import PIPELINE, change
from tests.support.factories.facts import (
    DONE,
    MEMBERS,
    RECORD,
    RESULT,
    SPENT,
    START,
    child,
    decide,
    facts,
    job,
    pod,
    refused,
    running,
)

from cost_aware_operator.adjusting.changes import ChangeOutcome
from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.status import ConditionType, JobState
from cost_aware_operator.control.policy.decision import Decision


def test_completion_is_recorded_before_pods_are_let_go() -> None:
    decision = decide(running(agents=DONE))
    assert decision.record.ended_at is not None
    assert decision.result == RESULT
    assert decision.urgent
    assert set(decision.release) == set(MEMBERS.values())


def test_a_change_that_the_run_ends_under_is_judged_by_the_steps_since() -> None:
    checking = change(
        attempt=1, outcome=ChangeOutcome.CHECKING, resumed_at=START + timedelta(seconds=20), downtime_seconds=9.0,
        remaining_steps=81, before_step_usd=0.01, before_node_usd=3.06, target=replace(PIPELINE, nodes=2),
    )  # fmt: skip
    decision = decide(running(agents=DONE, record=RECORD.model_copy(update={"changes": (checking,)})))
    (kept,) = decision.record.changes
    assert kept.outcome is ChangeOutcome.KEPT
    # 20 s for 80 steps, on two nodes
    assert kept.realised_step_usd == pytest.approx(0.25 * 6.12 / 3600)
    paid = 9.0 * 6.12 / 3600
    assert kept.realised_savings_usd == pytest.approx(81 * (0.01 - kept.realised_step_usd) - paid)


def test_a_change_that_comes_after_the_last_step_has_failed_and_the_plan_is_the_one_that_trained() -> None:
    ordered = change(attempt=2, outcome=ChangeOutcome.IN_PROGRESS, target=replace(PIPELINE, micro_batch=1))
    record = RECORD.model_copy(update={"changes": (ordered,), "plan": ordered.target})
    decision = decide(running(agents=DONE, record=record))
    (failed,) = decision.record.changes
    assert failed.outcome is ChangeOutcome.FAILED
    assert "the run was complete" in failed.reason
    assert decision.record.plan is not None
    assert decision.record.plan.micro_batch == PIPELINE.micro_batch


def test_a_change_that_was_ordered_and_of_which_no_step_was_seen_stays_without_figures() -> None:
    ordered = change(attempt=1, outcome=ChangeOutcome.IN_PROGRESS)
    (kept,) = decide(running(agents=DONE, record=RECORD.model_copy(update={"changes": (ordered,)}))).record.changes
    assert (kept.outcome, kept.realised_step_usd) == (ChangeOutcome.KEPT, None)


def test_a_finished_job_succeeds_when_its_pods_have_ended_and_costs_nothing_more() -> None:
    ended = tuple(pod(i, phase="Succeeded", running=False, ended_at=START + timedelta(seconds=50)) for i in range(2))
    record = RECORD.model_copy(update={"ended_at": START + timedelta(seconds=45)})
    given = facts(job(), 500.0, child=child(job(), complete=True), pods=ended, record=record, result=RESULT)
    decision = decide(given)
    assert decision.status.state is JobState.SUCCEEDED
    assert decision.status.progress is not None
    assert decision.status.progress.samples_checksum == "ab"
    assert decision.status.cost is not None
    assert decision.status.cost.pod_seconds == 100.0
    assert not decision.release
    assert decision.requeue_seconds is None


def test_a_finished_job_is_deleted_when_its_time_has_come_and_not_before() -> None:
    given = job(ttlSecondsAfterFinished=60)
    record = RECORD.model_copy(update={"ended_at": START})
    before = decide(facts(given, 30.0, child=child(given, complete=True), record=record))
    after = decide(facts(given, 61.0, child=child(given, complete=True), record=record))
    assert (before.delete_job, before.requeue_seconds) == (False, 30.0)
    assert after.delete_job


@pytest.mark.parametrize("action", ["Suspend", "Fail"])
def test_completion_wins_over_a_budget_that_is_spent_in_the_same_reconcile(action: str) -> None:
    given = job(budget={"totalUSD": 5.0, "onExhausted": action})
    decision = decide(running(given=given, record=SPENT, agents=DONE))
    completes(decision)


def test_completion_wins_over_a_suspension_in_the_same_reconcile() -> None:
    completes(decide(running(given=job(suspend=True), agents=DONE)))


def test_completion_is_seen_where_a_new_plan_would_be_refused() -> None:
    completes(decide(refused(agents=DONE)))


def completes(decision: Decision) -> None:
    assert decision.want_pods
    assert decision.result == RESULT
    assert decision.record.ended_at is not None
    assert decision.record.failed is None
    assert find(decision.status.conditions, ConditionType.SUSPENDED) is None
    assert find(decision.status.conditions, ConditionType.BUDGET_EXHAUSTED) is None
