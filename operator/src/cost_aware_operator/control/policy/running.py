"""A job whose pods are wanted: attempts are started and told, nodes are left, plans are adjusted. Pure."""

from __future__ import annotations

from dataclasses import replace

from cost_aware_operator.adjusting.changes import Kind, under_way
from cost_aware_operator.adjusting.situation import Verdict
from cost_aware_operator.control.policy import attempts
from cost_aware_operator.control.policy.adjusting import adjusted, complete
from cost_aware_operator.control.policy.checkpoint_interval import interval_for
from cost_aware_operator.control.policy.decision import Decision, Outcome
from cost_aware_operator.control.policy.disruption import disruptions
from cost_aware_operator.control.policy.shortage import gone_on_without
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.workload.order import carries_out, run_order
from cost_aware_trainer.contract import RunOrder, RunResult

LAUNCH_SECONDS = 1.0
"""How often while an attempt is being started or ends: every second of it is paid for."""
SHORT_SECONDS = 5.0
"""How often while pods wait for nodes."""
DRAINED_KEPT = 20
"""Nodes that are remembered as drained."""


def decision_of(
    reading: Reading,
    record: RunRecord,
    outcome: Outcome,
    *,
    plan: Plan | None = None,
    reason: str = "",
    message: str = "",
    verdict: Verdict | None = None,
    order: RunOrder | None = None,
    result: RunResult | None = None,
    want_pods: bool = False,
    replace_child: bool = False,
    tell: tuple[str, ...] = (),
    release: tuple[str, ...] = (),
    evict: tuple[str, ...] = (),
    delete_job: bool = False,
    urgent: bool = False,
    requeue_seconds: float | None = None,
) -> Decision:
    """A decision with what follows from record and plan: the number of pods, and whether the record must be saved now."""
    facts = reading.facts
    # a pod that has just ended cannot be found out about again
    ended = bool(facts.departed) or any(p.ended_at is not None for p in (*facts.pods, *facts.former))
    return Decision(
        record=record,
        order=order or facts.order,
        result=result or facts.result,
        outcome=outcome,
        plan=plan,
        reason=reason,
        message=message,
        verdict=verdict,
        want_pods=want_pods,
        pods=_pods(record, plan) if plan is not None and want_pods else None,
        replace_child=replace_child,
        tell=tell,
        release=release,
        evict=evict,
        delete_job=delete_job,
        urgent=urgent or ended,
        requeue_seconds=requeue_seconds,
    )


def _pods(record: RunRecord, plan: Plan) -> int | None:
    """Pods that the Job shall have: those of the plan, and while a change to fewer is under way those that are to be drained too.

    A Job that is made anew has its pods from the beginning, and the one before it keeps its own until it is suspended.
    """
    last = under_way(record.changes)
    if last is not None and last.kind is Kind.MOVE:
        return None
    if last is not None and last.kind is not Kind.SHRINK:
        return max(last.origin.nodes, last.target.nodes)
    return plan.nodes


def failed(reading: Reading, record: RunRecord, plan: Plan, reason: str, message: str) -> Decision:
    """The run has failed for good."""
    ended = record.model_copy(update={"ended_at": reading.facts.now, "failed": (reason, message)})
    return decision_of(
        reading,
        ended,
        Outcome.FAILED,
        plan=plan,
        reason=reason,
        message=message,
        urgent=True,
        requeue_seconds=LAUNCH_SECONDS,
    )


def run_on(reading: Reading, record: RunRecord, plan: Plan) -> Decision:
    """The next step of the newest attempt, whatever it is."""
    match attempts.next_step(reading.facts, record, plan):
        case attempts.GiveUp(reason, message):
            return failed(reading, record, plan, reason, message)
        case attempts.Complete(result):
            return _completed(reading, record, plan, result)
        case attempts.Start(members, why):
            return _started(reading, record, plan, members, why)
        case attempts.Tell(uids, why):
            said = f"telling the agents; {why}" if why else "telling the agents"
            return _launching(reading, record, plan, said, tell=uids)
        case attempts.Wait(reason, message):
            return _waiting(reading, record, plan, reason, message)
    # a user's own program may tell no steps: that torchrun runs is all that can be known
    bundled = reading.facts.job.spec.trainer.config is not None
    if bundled and not any(s.steps > 0 for s in reading.samples_of(record.attempt)):
        return _launching(reading, record, plan, "ranks are starting")
    return _training(reading, record, plan)


def _launching(
    reading: Reading, record: RunRecord, plan: Plan, message: str, *, tell: tuple[str, ...] = ()
) -> Decision:
    return decision_of(
        reading,
        record,
        Outcome.LAUNCHING,
        plan=plan,
        message=message,
        want_pods=True,
        tell=tell,
        requeue_seconds=LAUNCH_SECONDS,
    )


def _completed(reading: Reading, record: RunRecord, plan: Plan, result: RunResult | None) -> Decision:
    """The last step is done: the pods are let go."""
    done = complete(reading, record).model_copy(update={"ended_at": reading.facts.now})
    decision = decision_of(
        reading,
        done,
        Outcome.FINISHING,
        plan=done.plan or plan,
        want_pods=True,
        release=tuple(p.uid for p in reading.facts.pods if p.usable),
        urgent=True,
        requeue_seconds=LAUNCH_SECONDS,
    )
    return replace(decision, result=result)


def _started(reading: Reading, record: RunRecord, plan: Plan, members: dict[int, str], why: str) -> Decision:
    """The next attempt begins."""
    begun, order = _begun(reading, record, plan, members)
    return decision_of(
        reading,
        begun,
        Outcome.LAUNCHING,
        plan=plan,
        message=why,
        order=order,
        want_pods=True,
        tell=tuple(members.values()),
        urgent=True,
        requeue_seconds=LAUNCH_SECONDS,
    )


def _begun(reading: Reading, record: RunRecord, plan: Plan, members: dict[int, str]) -> tuple[RunRecord, RunOrder]:
    """Record and order of the next attempt: its number is greater than any that was ever given out."""
    facts = reading.facts
    attempt = max([record.attempt, facts.job.status.attempt, *(a.attempt for a in facts.agents.values())]) + 1
    # ranks that are asked to go on otherwise did not fail, and can save before they do
    last = under_way(record.changes)
    shrunk = last is not None and last.kind is Kind.SHRINK
    changed = facts.order is not None and not carries_out(facts.job, facts.order, plan)
    planned = record.attempt > 0 and not shrunk and changed
    moved = last is not None and last.kind is Kind.MOVE
    interval, why = interval_for(reading, record, plan, goes_on=planned)
    failed_before = record.attempt > 0 and not (planned or moved or record.stopped)
    begun = record.model_copy(
        update={
            "interruptions": record.interruptions + failed_before,
            "stopped": False,
            "interval_reason": why,
            "attempt": attempt,
            "attempt_at": facts.now,
            "members": members,
            "started_at": record.started_at or facts.now,
            "attempt_checkpoint": record.newest_checkpoint,
            "fruitless": _fruitless(facts, record, planned=planned or moved or shrunk),
        }
    )
    return begun, run_order(facts.job, plan, attempt, drain=planned, interval_seconds=interval)


def _fruitless(facts: Facts, record: RunRecord, *, planned: bool) -> int:
    """Attempts in a row that got the run nowhere; one that is ended on purpose does not count."""
    if planned:
        return record.fruitless
    return 0 if record.attempt == 0 or attempts.fruitful(facts, record) else record.fruitless + 1


def _waiting(reading: Reading, record: RunRecord, plan: Plan, reason: str, message: str) -> Decision:
    """Pods are missing, or a retry is due later. If nodes are gone: is it time to go on without them?"""
    after, verdict = gone_on_without(reading, record, plan)
    changed = after.changes != record.changes
    # each look at other plans is a search; a pod that finds a node after all is an event
    requeue = SHORT_SECONDS if verdict is not None and not changed else LAUNCH_SECONDS
    return decision_of(
        reading,
        after,
        Outcome.RESTARTING if record.attempt > 0 else Outcome.STARTING,
        plan=after.plan or plan,
        reason=reason,
        message=message,
        verdict=verdict,
        want_pods=True,
        urgent=changed,
        requeue_seconds=requeue,
    )


def _training(reading: Reading, record: RunRecord, plan: Plan) -> Decision:
    """Ranks take steps: does a node end under them? Is another plan worth changing to?"""
    moved = {d.pod.node or "": d.pod.uid for d in disruptions(reading.facts, record, plan) if d.evict}
    if not moved.items() <= record.drained.items():
        drained = dict([*record.drained.items(), *moved.items()][-DRAINED_KEPT:])
        return decision_of(
            reading,
            record.model_copy(update={"drained": drained}),
            Outcome.RUNNING,
            plan=plan,
            want_pods=True,
            evict=tuple(moved.values()),
            urgent=True,
            requeue_seconds=LAUNCH_SECONDS,
        )
    after, verdict = adjusted(reading, record, plan)
    return decision_of(
        reading,
        after,
        Outcome.RUNNING,
        plan=after.plan or plan,
        verdict=verdict,
        want_pods=True,
        # what was asked for before and has not come about is asked for again
        evict=tuple(moved.values()),
        urgent=after.changes != record.changes,
        requeue_seconds=LAUNCH_SECONDS if after.plan != record.plan else reading.facts.scrape_interval_seconds,
    )
