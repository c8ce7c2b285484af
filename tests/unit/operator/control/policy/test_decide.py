"""From facts to a decision: what is done, what is told, and that nothing is done twice."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.factories.facts import (
    BOOK,
    MEMBERS,
    RECORD,
    SPENT,
    START,
    agent,
    child,
    condition,
    decide,
    facts,
    job,
    refused,
    running,
    sample,
)

from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.status import ConditionStatus, ConditionType, JobState
from cost_aware_operator.control.policy.attempts import FRUITLESS_LIMIT
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.reading.facts import MissingClaim
from cost_aware_operator.ledger.accounts import LAG_SECONDS
from cost_aware_operator.ledger.ledger import Cause, LedgerState
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase

OWN_PROGRAM: dict[str, Any] = {"trainer": {"config": None, "module": "mine.train"}}


def test_a_new_job_gets_pods_and_no_attempt_yet() -> None:
    decision = decide(facts())
    assert decision.want_pods
    assert not decision.tell
    assert decision.status.state is JobState.STARTING
    assert condition(decision, ConditionType.PLANNED).status is ConditionStatus.TRUE


def test_a_rejected_job_gets_no_pods_and_says_what_to_write() -> None:
    decision = decide(facts(job(nodes={"instanceTypes": ["p3.2xlrge"]})))
    assert not decision.want_pods
    assert decision.status.state is JobState.REJECTED
    assert condition(decision, ConditionType.PLANNED).reason == "UnknownInstanceType"
    assert condition(decision, ConditionType.PRICE_KNOWN).status is ConditionStatus.FALSE
    assert decision.requeue_seconds


def test_a_missing_volume_gets_no_pods_and_names_field_and_claim() -> None:
    decision = decide(facts(missing_claims=(MissingClaim("spec.checkpoint.volume", "nowhere"),)))
    assert not decision.want_pods
    message = condition(decision, ConditionType.PLANNED).message
    assert "spec.checkpoint.volume" in message
    assert "'nowhere'" in message


def test_a_new_attempt_is_recorded_with_a_greater_number_than_any_before() -> None:
    agents = {"pod-0": agent(0, AgentPhase.FAILED, 7), "pod-1": agent(1, AgentPhase.FAILED, 7)}
    record = RECORD.model_copy(update={"attempt": 7})
    decision = decide(running(agents=agents, record=record))
    assert decision.record.attempt == 8
    assert decision.order is not None
    assert decision.order.attempt == 8
    assert decision.urgent
    assert set(decision.tell) == set(MEMBERS.values())


def test_an_attempt_that_added_a_checkpoint_is_not_fruitless() -> None:
    ended = {u: agent(i, AgentPhase.FAILED) for i, u in MEMBERS.items()}
    assert decide(running(agents=ended)).record.fruitless == 1
    saved = {f"pod-{i}": (sample(i, 40, checkpoint_step=30),) for i in range(2)}
    assert decide(running(agents=ended, samples=saved)).record.fruitless == 0
    # from a copy in memory, so that the attempt before it had saved one
    recalled = {f"pod-{i}": (sample(i, 40, checkpoint_step=0, resumed_step=20),) for i in range(2)}
    assert decide(running(agents=ended, samples=recalled)).record.fruitless == 0


def test_efficiency_under_the_threshold_is_told_with_the_largest_loss() -> None:
    good, bad = decide(running(0.9)), decide(running(0.5))
    assert condition(good, ConditionType.EFFICIENT).status is ConditionStatus.TRUE
    assert condition(bad, ConditionType.EFFICIENT).status is ConditionStatus.FALSE
    assert "communication with 50%" in condition(bad, ConditionType.EFFICIENT).message
    assert bad.status.efficiency is not None
    assert bad.status.efficiency.current == 0.5


def test_progress_cost_and_projection_are_in_the_status() -> None:
    status = decide(running()).status
    assert status.progress is not None
    assert (status.progress.step, status.progress.percent, status.progress.estimated_remaining_seconds) == (
        40,
        40.0,
        60.0,
    )
    assert status.cost is not None
    assert status.cost.hourly_usd == 6.12
    assert abs(status.cost.accrued_usd - 2 * (40 - LAG_SECONDS) * 3.06 / 3600) < 1e-6
    assert status.cost.projected_usd is not None
    assert abs(status.cost.projected_usd - 2 * 100 * 3.06 / 3600) < 1e-5


def test_a_node_without_a_price_makes_it_unknown_and_never_zero_dollars() -> None:
    nodes = {f"node-{i}": NodeView(f"node-{i}", "x9.huge", None, False) for i in range(2)}
    decision = decide(running(nodes=nodes))
    priced = condition(decision, ConditionType.PRICE_KNOWN)
    assert priced.status is ConditionStatus.FALSE
    assert "x9.huge" in priced.message
    assert decision.status.cost is not None
    assert decision.status.cost.spent == "unknown"
    assert decision.status.cost.hourly_usd is None
    assert decision.status.cost.unpriced_pod_seconds == 2 * (40.0 - LAG_SECONDS)


def test_suspending_stops_the_pods_and_resuming_brings_them_back() -> None:
    stopped = decide(running(given=job(suspend=True)))
    assert not stopped.want_pods
    assert condition(stopped, ConditionType.SUSPENDED).status is ConditionStatus.TRUE
    resumed = decide(running(given=job(stopped.status.to_document())))
    assert resumed.want_pods
    assert condition(resumed, ConditionType.SUSPENDED).status is ConditionStatus.FALSE


def test_a_spent_budget_suspends_or_fails_as_the_manifest_says() -> None:
    suspended = decide(running(given=job(budget={"totalUSD": 5.0}), record=SPENT))
    assert not suspended.want_pods
    assert condition(suspended, ConditionType.BUDGET_EXHAUSTED).status is ConditionStatus.TRUE
    raised = decide(running(given=job(budget={"totalUSD": 50.0}), record=SPENT))
    assert raised.want_pods
    failed = decide(running(given=job(budget={"totalUSD": 5.0, "onExhausted": "Fail"}), record=SPENT))
    assert failed.status.state is JobState.FAILED


@pytest.mark.parametrize(("total", "warned"), [(7.0, False), (6.0, True)])
def test_a_budget_that_runs_out_is_told_before_it_is_spent(total: float, warned: bool) -> None:
    decision = decide(running(given=job(budget={"totalUSD": total}), record=SPENT))
    assert decision.want_pods
    found = [c for c in decision.status.conditions if c.type is ConditionType.BUDGET_EXHAUSTED]
    assert [c.reason for c in found] == (["NearlySpent"] if warned else [])
    assert any(e.warning and e.reason == "NearlySpent" for e in decision.events) is warned


def test_a_job_past_its_deadline_fails_with_the_job_controller_s_words() -> None:
    late = ("DeadlineExceeded", "Job was active longer than specified deadline")
    decision = decide(running(child=child(job(), failure=late)))
    failed = condition(decision, ConditionType.FAILED)
    assert failed.reason == "DeadlineExceeded"
    assert decision.record.failed == late


def test_a_manifest_changed_while_suspended_makes_the_pods_anew() -> None:
    old = child(job(), template_hash="another", suspended=True)
    waits = decide(running(child=old))
    assert not waits.replace_child, "the old pods are still saving"
    assert not waits.want_pods
    assert decide(running(child=old, pods=())).replace_child


def test_the_same_facts_give_the_same_status_and_no_event_twice() -> None:
    first = decide(running())
    assert {e.reason for e in first.events} >= {"Feasible", "PriceFound", "Training", "AboveThreshold"}
    again = decide(running(given=job(first.status.to_document())))
    assert again.events == ()
    assert again.status == first.status


def test_running_pods_go_on_when_a_new_plan_would_be_refused() -> None:
    decision = decide(refused())
    assert decision.want_pods
    assert not decision.replace_child
    assert decision.status.state is JobState.RUNNING
    planned = condition(decision, ConditionType.PLANNED)
    assert planned.status is ConditionStatus.TRUE
    assert decision.plan is not None
    assert (decision.plan.data, decision.plan.nodes, decision.plan.micro_batch) == (2, 2, 16)


def test_what_is_planned_anew_while_suspended_is_stored_before_pods_run_by_it() -> None:
    old = job(nodes={"min": 1, "max": 1})
    first = decide(facts(old))
    assert first.urgent
    stopped = child(old, suspended=True)
    known = first.record.model_copy(update={"attempt": 1, "stopped": True})
    changed = decide(facts(job(nodes={"min": 2, "max": 2}, suspend=True), 40.0, child=stopped, pods=(), record=known))
    assert changed.record.plan is not None
    assert changed.record.plan.nodes == 2
    assert changed.urgent
    # what was stored is what pods run by, and nothing more needs to be stored
    resumed = job(nodes={"min": 2, "max": 2})
    again = decide(facts(resumed, 50.0, child=child(resumed), pods=(), record=changed.record))
    assert again.record.plan is not None
    assert again.record.plan.nodes == 2
    assert not again.urgent


def test_a_plan_in_force_does_not_keep_suspend_and_budget_from_stopping_the_pods() -> None:
    assert not decide(refused(spec={"suspend": True})).want_pods
    assert not decide(refused(spec={"budget": {"totalUSD": 5.0}}, record=SPENT)).want_pods


def test_suspended_pods_do_not_come_back_under_a_plan_that_would_be_refused() -> None:
    stopped = decide(refused(child=replace(child(job()), suspended=True), pods=()))
    assert not stopped.want_pods
    assert stopped.status.state is JobState.REJECTED


def test_it_looks_again_at_the_moment_the_budget_is_spent() -> None:
    # two pods at $3.06 an hour spend 1.7 ms of a dollar a second
    spent = RECORD.model_copy(update={"ledger": LedgerState(usd={Cause.PRODUCTIVE: 5.0})})
    probe = decide(running(given=job(budget={"totalUSD": 1000.0}), record=spent))
    accrued = probe.record.ledger.accrued_usd
    assert probe.requeue_seconds is not None
    soon = decide(running(given=job(budget={"totalUSD": accrued + 2 * 3.06 / 3600}), record=spent))
    assert soon.requeue_seconds == pytest.approx(1.0, rel=0.01)
    late = decide(running(given=job(budget={"totalUSD": accrued + 1e-9}), record=spent))
    assert late.requeue_seconds == 0.1


def test_the_limit_of_fruitless_attempts_counts_the_present_one() -> None:
    ended = {u: agent(i, AgentPhase.FAILED, message="CUDA out of memory") for i, u in MEMBERS.items()}

    def after(fruitless_before: int) -> Decision:
        return decide(running(agents=ended, record=RECORD.model_copy(update={"fruitless": fruitless_before})))

    assert after(FRUITLESS_LIMIT - 2).status.state is not JobState.FAILED
    given_up = after(FRUITLESS_LIMIT - 1)
    failed = condition(given_up, ConditionType.FAILED)
    assert failed.reason == "RestartsExhausted"
    assert failed.message.startswith(f"{FRUITLESS_LIMIT} attempts in a row")
    assert "CUDA out of memory" in failed.message


def test_an_attempt_with_a_new_checkpoint_is_never_given_up() -> None:
    ended = {u: agent(i, AgentPhase.FAILED) for i, u in MEMBERS.items()}
    saved = {f"pod-{i}": (sample(i, 40, checkpoint_step=30),) for i in range(2)}
    record = RECORD.model_copy(update={"fruitless": FRUITLESS_LIMIT - 1, "attempt_at": START - timedelta(seconds=60)})
    decision = decide(running(agents=ended, samples=saved, record=record))
    assert decision.record.failed is None
    assert decision.record.attempt == 2
    assert decision.record.fruitless == 0


def test_a_node_that_cannot_be_read_has_the_price_of_the_one_type_that_the_manifest_allows() -> None:
    decision = decide(running(given=job(nodes={"instanceTypes": ["p3.2xlarge"]}), nodes={}))
    assert condition(decision, ConditionType.PRICE_KNOWN).status is ConditionStatus.TRUE
    assert decision.status.cost is not None
    assert decision.status.cost.hourly_usd == 6.12
    assert decision.status.cost.unpriced_pod_seconds == 0.0


def test_a_node_that_cannot_be_read_has_the_spot_price_where_only_spot_is_allowed() -> None:
    spot = decide(running(given=job(nodes={"instanceTypes": ["p5.48xlarge"], "capacityType": "Spot"}), nodes={}))
    listed = BOOK.price("p5.48xlarge", spot=True)
    assert listed is not None
    assert spot.status.cost is not None
    assert spot.status.cost.hourly_usd == pytest.approx(2 * listed.hourly_usd)


@pytest.mark.parametrize("types", [[], ["p3.2xlarge", "p3.8xlarge"]])
def test_a_node_that_cannot_be_read_has_no_price_where_it_could_be_of_several_types(types: list[str]) -> None:
    decision = decide(running(given=job(nodes={"instanceTypes": types}), nodes={}))
    priced = condition(decision, ConditionType.PRICE_KNOWN)
    assert priced.status is ConditionStatus.FALSE
    assert "spec.nodes.instanceTypes" in priced.message
    assert decision.status.cost is not None
    assert decision.status.cost.hourly_usd is None


def test_a_program_of_one_s_own_is_running_and_its_time_productive_once_torchrun_runs_everywhere() -> None:
    decision = decide(running(given=job(**OWN_PROGRAM), samples={}, scrapes=()))
    assert decision.status.state is JobState.RUNNING
    assert "TrainingSession adds them" in decision.status.message, "it is told what it does without"
    assert condition(decision, ConditionType.RUNNING).reason == "Training"
    assert decision.status.cost is not None
    assert decision.status.cost.by_cause.productive == decision.status.cost.accrued_usd > 0
    assert find(decision.status.conditions, ConditionType.EFFICIENT) is None


def test_a_program_of_one_s_own_does_not_run_before_every_agent_has_its_order() -> None:
    agents = {"pod-0": agent(0, AgentPhase.RUNNING), "pod-1": agent(1, AgentPhase.WAITING, 0)}
    decision = decide(running(given=job(**OWN_PROGRAM), samples={}, scrapes=(), agents=agents))
    assert decision.status.state is JobState.STARTING
    assert decision.tell == ("pod-1",)


def test_how_often_it_is_saved_may_change_without_making_the_pods_anew() -> None:
    planned = job()
    changed = job(checkpoint={"intervalSeconds": 5, "keep": 9})
    decision = decide(running(given=changed, child=child(planned)))
    assert not decision.replace_child
    assert decision.status.state is JobState.RUNNING
    ended = {u: agent(i, AgentPhase.FAILED) for i, u in MEMBERS.items()}
    order = decide(running(given=changed, child=child(planned), agents=ended)).order
    assert order is not None
    assert order.plan is not None
    assert (order.plan.checkpoint.interval_seconds, order.plan.checkpoint.keep) == (5.0, 9)


def test_where_no_pod_appears_the_message_says_where_to_look() -> None:
    decision = decide(facts(child=child(job())))
    assert "kubectl describe job gpt -n team" in condition(decision, ConditionType.RUNNING).message


def test_a_name_that_something_else_has_is_left_alone_and_nothing_is_written_but_the_status() -> None:
    decision = decide(facts(obstacle="metadata.name: a Service 'gpt' is in the namespace"))
    assert decision.keep_off
    assert not decision.want_pods
    assert condition(decision, ConditionType.PLANNED).reason == "NameTaken"
