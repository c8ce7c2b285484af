"""The log tells each attempt, plan, change and refusal once, with its numbers, and never a mere reconcile."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tests.support.factories.adjusting import change
from tests.support.factories.facts import MEMBERS, START, Decided, agent, decide, facts, job, pod, running

from cost_aware_operator.adjusting.changes import ChangeOutcome
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.status.log_lines import LogLine, log_lines
from cost_aware_trainer.contract import AgentPhase

WAITING = {uid: agent(i, AgentPhase.WAITING, attempt=0) for i, uid in MEMBERS.items()}


def lines_of(given: Facts, decided: Decided) -> list[LogLine]:
    return list(log_lines(given.record, decided.decision, decided.events))


def test_an_attempt_is_one_line_with_its_degrees_nodes_and_price() -> None:
    given = facts(pods=(pod(0), pod(1)), agents=WAITING)
    decided = decide(given)
    [line] = [line for line in lines_of(given, decided) if "attempt" in line.fields]
    assert line.message == "attempt 1 begins as 2x1x1 on 2 nodes: all pods are up"
    assert (line.fields["attempt"], line.fields["nodes"], line.fields["data"]) == (1, 2, 2)
    assert line.fields["hourly_usd"] == decided.plan.hourly_usd


def test_a_run_that_goes_on_as_it_was_logs_nothing() -> None:
    first = running()
    decided = decide(first)
    again = running(given=job(decided.status.to_document()), record=decided.record)
    assert lines_of(again, decide(again)) == []


def test_a_refusal_is_a_warning_that_says_what_to_write_and_is_logged_once() -> None:
    given = facts(job(nodes={"instanceTypes": ["x9.unknown"]}))
    decided = decide(given)
    [line] = [line for line in lines_of(given, decided) if line.message.startswith("Planned=False")]
    assert line.warning
    assert "x9.unknown" in line.message
    again = facts(job(decided.status.to_document(), nodes={"instanceTypes": ["x9.unknown"]}), record=decided.record)
    assert lines_of(again, decide(again)) == []


def test_a_change_is_a_line_when_it_is_ordered_and_when_it_is_known_what_came_of_it() -> None:
    begun = change(at=START, attempt=2, outcome=ChangeOutcome.IN_PROGRESS)
    kept = change(
        at=START, attempt=2, outcome=ChangeOutcome.KEPT, realised_step_usd=0.25, resumed_at=START + timedelta(seconds=9)
    )
    decision = decide(running()).decision
    for before, after, outcome in (((), (begun,), "InProgress"), ((begun,), (kept,), "Kept")):
        record = decision.record.model_copy(update={"changes": after})
        old = record.model_copy(update={"changes": before})
        [line] = log_lines(old, replace(decision, record=record), ())
        assert line.fields["outcome"] == outcome
        assert line.fields["predicted_step_usd"] == begun.predicted_step_usd
    assert line.fields["realised_step_usd"] == 0.25
