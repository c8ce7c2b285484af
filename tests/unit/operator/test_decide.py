"""From facts to a decision: what is done, what is told, and that nothing is done twice."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.operator.factories import BOOK, START, agent, child, facts, job, pod
from tests.unit.operator.test_adjuster import PIPELINE, change

from cost_aware_operator.adjusting.changes import ChangeOutcome
from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.status import ConditionStatus, ConditionType, JobState
from cost_aware_operator.control.attempts import FRUITLESS_LIMIT
from cost_aware_operator.control.decide import decide
from cost_aware_operator.control.decision import Decision
from cost_aware_operator.control.facts import Facts, MissingClaim
from cost_aware_operator.control.record import RunRecord
from cost_aware_operator.costs.prices import PriceBook
from cost_aware_operator.ledger.ledger import Cause, LedgerState
from cost_aware_operator.observing.samples import RankSample, Scrape
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase, Phase, RunResult

MEMBERS = {0: "pod-0", 1: "pod-1"}
RECORD = RunRecord(attempt=1, attempt_at=START, members=MEMBERS, started_at=START)
RUNNING = {"pod-0": agent(0, AgentPhase.RUNNING), "pod-1": agent(1, AgentPhase.RUNNING)}
SPENT = RECORD.model_copy(update={"ledger": LedgerState(usd={Cause.PRODUCTIVE: 5.0})})
RESULT = RunResult(
    outcome=AgentPhase.COMPLETED, step=100, total_steps=100, loss=1.5, heldout_loss=1.6, samples_checksum="ab"
)
DONE = {u: agent(i, AgentPhase.COMPLETED, result=RESULT) for i, u in MEMBERS.items()}
OWN_PROGRAM: dict[str, Any] = {"trainer": {"config": None, "module": "mine.train"}}


def sample(rank: int, seconds: float, compute: float = 0.9, **over: Any) -> RankSample:
    values: dict[str, Any] = {
        "rank": rank,
        "attempt": 1,
        "step": int(seconds),
        "total_steps": 100,
        "steps": seconds,
        "tokens": seconds * 100,
        "step_seconds": seconds,
        "loss": 2.5,
        "resumed_step": 0,
        "phase_seconds": {Phase.COMPUTE: seconds * compute, Phase.COMMUNICATION: seconds * (1 - compute)},
    }
    return RankSample(**(values | over))


def running(compute: float = 0.9, **over: Any):
    samples = {f"pod-{i}": (sample(i, 40, compute),) for i in range(2)}
    scrapes = (
        Scrape(20.0, (sample(0, 20, compute), sample(1, 20, compute))),
        Scrape(40.0, (sample(0, 40, compute), sample(1, 40, compute))),
    )
    given = over.pop("given", None) or job()
    values = {"child": child(given), "pods": (pod(0), pod(1)), "agents": RUNNING, "record": RECORD}
    return facts(given, 40.0, **(values | {"samples": samples, "scrapes": scrapes} | over))


def condition(decision, kind: ConditionType):
    found = find(decision.status.conditions, kind)
    assert found is not None, f"{kind} is not set"
    return found


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
    assert abs(status.cost.accrued_usd - 2 * 40 * 3.06 / 3600) < 1e-6
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
    assert decision.status.cost.unpriced_pod_seconds == 80.0


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


def refused(**over: Any) -> Facts:
    """Pods that run under their plan, for a manifest whose instance type has gone from the prices since."""
    planned = running(given=job(nodes={"instanceTypes": ["p3.2xlarge"]}))
    first = decide(planned)
    given = job(first.status.to_document(), nodes={"instanceTypes": ["p3.2xlarge"]}, **over.pop("spec", {}))
    known = {name: i for name, i in BOOK.instances.items() if name != "p3.2xlarge"}
    values = {"child": planned.child, "prices": PriceBook(known), "record": first.record}
    return running(given=given, **(values | over))


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
