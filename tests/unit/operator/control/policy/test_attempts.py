"""When an attempt begins, waits, ends: an operator that died anywhere in between goes on from what it finds."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.support.factories.facts import BOOK, START, agent, child, facts, job, pod

from cost_aware_operator.control.policy.attempts import (
    FRUITLESS_LIMIT,
    Complete,
    GiveUp,
    Start,
    Steady,
    Step,
    Tell,
    Wait,
    next_step,
)
from cost_aware_operator.control.reading.facts import Facts, Unread
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_trainer.contract import AgentPhase, RunResult

JOB = job()
PLAN = make_plan(PlanInput(JOB.spec, BOOK))
assert isinstance(PLAN, Plan)
PODS = (pod(0), pod(1))
RECORD = RunRecord(attempt=1, attempt_at=START, members={0: "pod-0", 1: "pod-1"}, started_at=START)


def world(*phases: AgentPhase | None, attempt: int = 1, **over):
    agents = {f"pod-{i}": agent(i, p, attempt) for i, p in enumerate(phases) if p is not None}
    return facts(JOB, **({"child": child(JOB), "pods": PODS, "agents": agents, "record": RECORD} | over))


def step_of(given: Facts, plan: Plan) -> Step:
    return next_step(given, given.record, plan)


def test_the_first_attempt_waits_for_every_pod() -> None:
    step = step_of(world(AgentPhase.WAITING, None, record=RunRecord(), pods=(pod(0),)), PLAN)
    assert isinstance(step, Wait)
    assert step.reason == "WaitingForPods"
    assert "1 of 2" in step.message


def test_the_first_attempt_begins_when_every_agent_answers() -> None:
    step = step_of(world(AgentPhase.WAITING, AgentPhase.WAITING, attempt=0, record=RunRecord()), PLAN)
    assert step == Start({0: "pod-0", 1: "pod-1"}, "all pods are up")


def test_an_image_that_does_not_exist_waits_and_says_until_when() -> None:
    broken = pod(1, running=False, problem="ErrImagePull: no such image", image_problem=True)
    step = step_of(world(AgentPhase.WAITING, record=RunRecord(), pods=(pod(0), broken)), PLAN)
    assert isinstance(step, Wait)
    assert step.reason == "ImagePullFailing"
    assert "2026-01-01T12:10:00" in step.message


def test_an_image_that_does_not_exist_fails_after_the_stated_time() -> None:
    broken = pod(1, running=False, problem="ErrImagePull: no such image", image_problem=True)
    step = step_of(world(AgentPhase.WAITING, record=RunRecord(), pods=(pod(0), broken), seconds=601), PLAN)
    assert isinstance(step, GiveUp)
    assert "spec.template.image" in step.message


def test_a_run_that_has_trained_waits_for_capacity_without_a_deadline() -> None:
    step = step_of(world(AgentPhase.FAILED, None, pods=(pod(0),), seconds=86400), PLAN)
    assert isinstance(step, Wait)


def test_a_running_attempt_is_left_alone() -> None:
    assert step_of(world(AgentPhase.RUNNING, AgentPhase.RUNNING), PLAN) == Steady()


def test_an_agent_that_has_not_heard_is_told_again() -> None:
    agents = {"pod-0": agent(0, AgentPhase.RUNNING, 1), "pod-1": agent(1, AgentPhase.WAITING, 0)}
    assert step_of(world(agents=agents), PLAN) == Tell(("pod-1",))


def test_a_replaced_pod_begins_a_new_attempt() -> None:
    pods = (pod(0), pod(1, "new"))
    agents = {"pod-0": agent(0, AgentPhase.FAILED, 1), "new": agent(1, AgentPhase.WAITING, 0)}
    step = step_of(world(pods=pods, agents=agents), PLAN)
    assert isinstance(step, Start)
    assert step.members == {0: "pod-0", 1: "new"}


def test_a_pod_that_is_being_deleted_is_not_given_work() -> None:
    pods = (pod(0), pod(1, deleting=True))
    assert isinstance(step_of(world(AgentPhase.CHECKPOINTED, AgentPhase.CHECKPOINTED, pods=pods), PLAN), Wait)


def test_ranks_that_died_begin_a_new_attempt_and_the_next_ones_wait_longer() -> None:
    dead = world(AgentPhase.FAILED, AgentPhase.FAILED, seconds=3)
    assert isinstance(step_of(dead, PLAN), Start)
    again = replace(dead, record=RECORD.model_copy(update={"fruitless": 2}))
    assert isinstance(step_of(again, PLAN), Wait)
    assert isinstance(step_of(replace(again, now=START + timedelta(seconds=60)), PLAN), Start)


def test_attempts_that_never_reach_a_checkpoint_are_given_up_with_the_last_error() -> None:
    agents = {"pod-0": agent(0, AgentPhase.FAILED, message="CUDA out of memory"), "pod-1": agent(1, AgentPhase.FAILED)}
    record = RECORD.model_copy(update={"fruitless": FRUITLESS_LIMIT - 1})
    step = step_of(world(agents=agents, record=record), PLAN)
    assert isinstance(step, GiveUp)
    assert step.reason == "RestartsExhausted"
    assert "CUDA out of memory" in step.message


def test_a_run_whose_pods_are_lost_every_time_before_a_checkpoint_is_given_up_too() -> None:
    pods = (pod(0), pod(1, "new"))
    agents = {"pod-0": agent(0, AgentPhase.RUNNING, 1), "new": agent(1, AgentPhase.WAITING, 0)}
    record = RECORD.model_copy(update={"fruitless": FRUITLESS_LIMIT - 1})
    step = step_of(world(pods=pods, agents=agents, record=record), PLAN)
    assert isinstance(step, GiveUp)
    assert "pods were lost" in step.message
    saved = record.model_copy(update={"newest_checkpoint": 10})
    assert isinstance(step_of(world(pods=pods, agents=agents, record=saved), PLAN), Start | Wait)


def test_a_plan_that_can_never_work_fails_at_once_with_the_trainer_s_words() -> None:
    agents = {"pod-0": agent(0, AgentPhase.INVALID, message="train.bin is shorter than its manifest says")}
    step = step_of(world(agents=agents), PLAN)
    assert step == GiveUp("InvalidRun", "pod gpt-0-a: train.bin is shorter than its manifest says")


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_is_complete_when_one_agent_says_so_whatever_became_of_the_others(gone: bool) -> None:
    result = RunResult(outcome=AgentPhase.COMPLETED, step=100, total_steps=100)
    agents = {"pod-0": agent(0, AgentPhase.COMPLETED, result=result)}
    pods = (pod(0),) if gone else PODS
    assert step_of(world(agents=agents, pods=pods), PLAN) == Complete(result)


def test_a_pod_that_succeeded_while_the_operator_was_away_completes_the_run() -> None:
    ended = pod(0, phase="Succeeded", running=False, ended_at=START + timedelta(seconds=30))
    agents = {"new": agent(1, AgentPhase.WAITING, 0)}
    step = step_of(world(agents=agents, pods=(ended, pod(1, "new"))), PLAN)
    assert isinstance(step, Complete)


UNREAD = Unread("pod-1", "gpt-1-a", "the answer of its agent cannot be read", 5.0)


def test_an_agent_whose_answer_cannot_be_read_is_named_while_it_is_waited_for() -> None:
    step = step_of(world(AgentPhase.RUNNING, None, unread=(UNREAD,)), PLAN)
    assert isinstance(step, Wait)
    assert step.reason == "AgentUnreadable"
    assert "pod gpt-1-a: the answer of its agent cannot be read" in step.message


def test_an_agent_whose_answer_cannot_be_read_is_not_waited_and_paid_for_for_ever() -> None:
    step = step_of(world(AgentPhase.RUNNING, None, unread=(replace(UNREAD, seconds=601.0),)), PLAN)
    assert isinstance(step, GiveUp)
    assert step.reason == "AgentUnreadable"
    assert "spec.startupDeadlineSeconds" in step.message


def test_an_agent_that_refuses_the_order_is_named_and_not_told_for_ever() -> None:
    behind = replace(UNREAD, why="its agent refuses the order with the status 401")
    given = world(AgentPhase.RUNNING, None, unread=(behind,))
    given = replace(given, agents={**given.agents, "pod-1": agent(1, AgentPhase.WAITING, 0)})
    step = step_of(given, PLAN)
    assert step == Tell(("pod-1",), "pod gpt-1-a: its agent refuses the order with the status 401")
    assert isinstance(step_of(replace(given, unread=(replace(behind, seconds=601.0),)), PLAN), GiveUp)
