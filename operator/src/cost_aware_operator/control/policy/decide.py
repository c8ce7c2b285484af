"""The whole policy of a reconcile: from facts to a decision. Pure; time comes with the facts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from cost_aware_operator.adjusting.changes import Kind
from cost_aware_operator.api.spec import OnExhausted
from cost_aware_operator.control.policy import attempts
from cost_aware_operator.control.policy.accounting import booked, budget_left_usd, current_samples, paid_hourly_usd
from cost_aware_operator.control.policy.adjusting import adjusted, complete, failed_change, under_way, why_given_up
from cost_aware_operator.control.policy.checkpoint_interval import interval_for, saves_seen
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.policy.disruption import disruptions
from cost_aware_operator.control.policy.shortage import gone_on_without
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.status.outcome import Outcome, Situation, tell_story
from cost_aware_operator.planning.plan import Plan, PlanInput, Refusal, make_plan, planning_key, repriced
from cost_aware_operator.workload.job import template_hash
from cost_aware_operator.workload.order import carries_out, run_order
from cost_aware_trainer.contract import AgentPhase, RunOrder

LAUNCH_SECONDS = 1.0
"""How often while an attempt is being started or ends: every second of it is paid for."""
SHORT_SECONDS = 5.0
"""How often while pods wait for nodes."""
CLEARING_SECONDS = 3.0
"""How often while an object of a child's name is in the way: mostly it is a deleted job's and about to go."""
DRAINED_KEPT = 20
"""Nodes that are remembered as drained."""
SOONEST_SECONDS = 0.1
"""Two looks at one job are no closer."""
BLOCKED_SECONDS = 15.0
"""How often a rejected job is looked at: what it lacks (a volume, a price) may have appeared without an event."""


def decide(facts: Facts) -> Decision:
    """The decision for one job."""
    decision = _in_time_for_the_budget(facts, _decided(facts))
    # What was planned anew must be stored before pods are made by it: once they run, the stored plan is the one in force.
    anew = decision.record.planned_for != facts.record.planned_for
    return replace(decision, urgent=True) if anew else decision


def _in_time_for_the_budget(facts: Facts, decision: Decision) -> Decision:
    """Looks again at the moment the budget is spent, not at the next scrape: pods are stopped then."""
    hourly_usd, left = paid_hourly_usd(facts), budget_left_usd(replace(facts, record=decision.record))
    if not hourly_usd or left is None or left <= 0 or decision.record.ended_at is not None:
        return decision
    seconds = max(left / hourly_usd * 3600, SOONEST_SECONDS)
    if decision.requeue_seconds is not None and decision.requeue_seconds <= seconds:
        return decision
    return replace(decision, requeue_seconds=seconds)


def _decided(facts: Facts) -> Decision:
    record = facts.record.model_copy(update={"ledger": booked(facts), "newest_checkpoint": _newest_checkpoint(facts)})
    facts = replace(facts, record=record)
    record = record.model_copy(update={"saves": saves_seen(facts)})
    facts = replace(facts, record=record)
    answer = _plan_or_refusal(facts)
    if isinstance(answer, Plan) and record.ended_at is None:
        record = record.model_copy(update={"plan": answer, "planned_for": planning_key(facts.job.spec)})
        facts = replace(facts, record=record)
    if facts.obstacle:
        return replace(
            rejected(facts, Refusal("NameTaken", facts.obstacle)), keep_off=True, requeue_seconds=CLEARING_SECONDS
        )
    if record.ended_at is not None:
        return _finished(facts, answer)
    if isinstance(answer, Refusal):
        return rejected(facts, answer)
    if facts.missing_claims and facts.child is None:
        return rejected(facts, _missing(facts))
    if facts.child is not None and facts.child.failure is not None:
        return _failed(facts, answer, *facts.child.failure)
    if isinstance(attempts.completed(facts, answer), attempts.Complete):
        # before budget and suspension: what is done is done
        return _running(facts, answer)
    budget, left = facts.job.spec.budget, budget_left_usd(facts)
    if budget is not None and left is not None and left <= 0:
        if budget.on_exhausted is OnExhausted.FAIL:
            return _failed(facts, answer, "BudgetExhausted", f"the budget of ${budget.total_usd:,.2f} is spent")
        return _stopped(facts, answer, Outcome.BUDGET_EXHAUSTED)
    if facts.job.spec.suspend:
        return _stopped(facts, answer, Outcome.SUSPENDED)
    facts, answer = _fallen_back(facts, answer)
    if facts.child is not None and (
        facts.child.deleting or facts.child.template_hash != template_hash(facts.job, answer)
    ):
        return _anew(facts, answer)
    return _running(facts, answer)


def _anew(facts: Facts, plan: Plan) -> Decision:
    """The manifest was changed while suspended, or a node is left: a Job's template cannot change, so the Job is made anew.

    Pods that run checkpoint and end first, so that no two attempts are ever at work.
    """
    deleting = facts.child is not None and facts.child.deleting
    if not deleting and any(p.ended_at is None for p in facts.pods):
        last = under_way(facts.record)
        why = "pods save and end; they are made anew" + (f": {last.reason}" if last is not None else "")
        situation = Situation(Outcome.RESTARTING, plan=plan, reason="Replacing", message=why)
        return _decision(facts, situation, requeue_seconds=LAUNCH_SECONDS)
    return _decision(facts, Situation(Outcome.STARTING, plan=plan), replace_child=True, requeue_seconds=LAUNCH_SECONDS)


def _plan_or_refusal(facts: Facts) -> Plan | Refusal:
    """The plan in force while pods run by it or nothing was asked for that it does not answer; else a new one.

    So neither an upgrade of the operator nor a new price moves a running job; what does is the manifest.
    """
    spec, record, child = facts.job.spec, facts.record, facts.child
    given = PlanInput(spec, facts.prices, facts.defaults.resources)
    # while pods are made anew, the Job is suspended or away for a moment
    moving = under_way(record) is not None and not spec.suspend and record.planned_for == planning_key(spec)
    running = (child is not None and not child.suspended) or moving
    if record.plan is not None and (running or record.ended_at is not None):
        return repriced(record.plan, given)
    answer = make_plan(given)
    if not isinstance(answer, Plan) or record.plan is None:
        return answer
    if record.planned_for == planning_key(spec):
        return repriced(record.plan, given)
    # a node that was slow stays left, whatever else is asked for
    return replace(answer, excluded_nodes=record.plan.excluded_nodes)


def _newest_checkpoint(facts: Facts) -> int:
    """The newest step that a run is known to go on from; what ranks have resumed from was saved, if only in their nodes' memory."""
    samples = current_samples(facts)
    seen = [step for s in samples for step in (s.checkpoint_step, s.resumed_step) if step is not None]
    ended = [
        a.result.step for a in facts.agents.values() if a.result is not None and a.phase is AgentPhase.CHECKPOINTED
    ]
    return max([facts.record.newest_checkpoint, *seen, *ended])


def _missing(facts: Facts) -> Refusal:
    claim = facts.missing_claims[0]
    return Refusal(
        "VolumeMissing",
        f"{claim.field}: there is no PersistentVolumeClaim {claim.name!r} in namespace {facts.job.key.namespace!r}: "
        "create it, or write the name of one that exists",
    )


def rejected(facts: Facts, refusal: Refusal) -> Decision:
    """No pod is started."""
    situation = Situation(Outcome.REJECTED, reason=refusal.reason, message=refusal.message)
    return _decision(facts, situation, requeue_seconds=BLOCKED_SECONDS)


def _stopped(facts: Facts, plan: Plan, outcome: Outcome) -> Decision:
    """Suspended by its owner or by its budget: the Job controller ends the pods, the agents checkpoint first."""
    ending = any(p.ended_at is None for p in facts.pods)
    # what tells a resumed run from one that failed must not be forgotten
    urgent = not facts.record.stopped
    facts = replace(facts, record=facts.record.model_copy(update={"stopped": True}))
    requeue = LAUNCH_SECONDS if ending else None
    return _decision(facts, Situation(outcome, plan=plan), urgent=urgent, requeue_seconds=requeue)


def _failed(facts: Facts, plan: Plan | None, reason: str, message: str) -> Decision:
    record = facts.record.model_copy(update={"ended_at": facts.now, "failed": (reason, message)})
    situation = Situation(Outcome.FAILED, plan=plan, reason=reason, message=message)
    facts = replace(facts, record=record)
    return _decision(facts, situation, urgent=True, requeue_seconds=LAUNCH_SECONDS)


def _finished(facts: Facts, answer: Plan | Refusal) -> Decision:
    """Let the pods go, close the books, and delete the job when its time has come."""
    plan = answer if isinstance(answer, Plan) else None
    alive = [p for p in facts.pods if p.ended_at is None]
    ended_at = facts.record.ended_at or facts.now
    if facts.record.failed is not None:
        situation = Situation(Outcome.FAILED, plan=plan, reason=facts.record.failed[0], message=facts.record.failed[1])
    else:
        situation = Situation(Outcome.FINISHING if alive else Outcome.SUCCEEDED, plan=plan)
    ttl = facts.job.spec.ttl_seconds_after_finished
    requeue = LAUNCH_SECONDS if alive else None
    delete = False
    if ttl is not None and not alive:
        left = (ended_at + timedelta(seconds=ttl) - facts.now).total_seconds()
        delete, requeue = left <= 0, max(left, 0.1)
    return _decision(
        facts,
        situation,
        want_pods=facts.record.failed is None,
        release=tuple(p.uid for p in alive if p.usable) if facts.record.failed is None else (),
        delete_job=delete,
        requeue_seconds=requeue,
    )


def _fallen_back(facts: Facts, plan: Plan) -> tuple[Facts, Plan]:
    """The facts under the old plan, where a change did not start."""
    last = under_way(facts.record)
    # pods that are to be made anew do not all end at once, and those that are left lose their peers, as those of nodes that are gone
    ending = last is not None and last.kind in (Kind.MOVE, Kind.SHRINK) and facts.record.attempt < last.attempt
    why = ("" if ending else attempts.why_ended(facts)) or why_given_up(facts)
    record = failed_change(facts, why) if why else None
    if record is None or record.plan is None:
        return facts, plan
    return replace(facts, record=record), record.plan


def _pods(facts: Facts, plan: Plan) -> int | None:
    """Pods that the Job shall have: those of the plan, and while a change to fewer is under way those that are to be drained too.

    A Job that is made anew has its pods from the beginning, and the one before it keeps its own until it is suspended.
    """
    last = under_way(facts.record)
    if last is not None and last.kind is Kind.MOVE:
        return None
    if last is not None and last.kind is not Kind.SHRINK:
        return max(last.origin.nodes, last.target.nodes)
    return plan.nodes


def _running(facts: Facts, plan: Plan) -> Decision:
    step = attempts.next_step(facts, plan)
    match step:
        case attempts.GiveUp(reason, message):
            return _failed(facts, plan, reason, message)
        case attempts.Complete(result):
            record = complete(facts).model_copy(update={"ended_at": facts.now})
            facts, plan = replace(facts, record=record, result=result), record.plan or plan
            releasable = tuple(p.uid for p in facts.pods if p.usable)
            return _decision(
                facts,
                Situation(Outcome.FINISHING, plan=plan),
                want_pods=True,
                release=releasable,
                urgent=True,
                requeue_seconds=LAUNCH_SECONDS,
            )
        case attempts.Start(members, why):
            facts, order = _begun(facts, plan, members)
            situation = Situation(Outcome.LAUNCHING, plan=plan, message=why)
            return _decision(
                replace(facts, order=order),
                situation,
                want_pods=True,
                tell=tuple(members.values()),
                urgent=True,
                requeue_seconds=LAUNCH_SECONDS,
            )
        case attempts.Tell(uids):
            situation = Situation(Outcome.LAUNCHING, plan=plan, message="telling the agents")
            return _decision(facts, situation, want_pods=True, tell=uids, requeue_seconds=LAUNCH_SECONDS)
        case attempts.Wait(reason, message):
            return _waiting(facts, plan, reason, message)
    # a user's own program may tell no steps: that torchrun runs is all that can be known
    stepping = facts.job.spec.trainer.config is None or any(s.steps > 0 for s in current_samples(facts))
    if not stepping:
        situation = Situation(Outcome.LAUNCHING, plan=plan, message="ranks are starting")
        return _decision(facts, situation, want_pods=True, requeue_seconds=LAUNCH_SECONDS)
    return _training(facts, plan)


def _waiting(facts: Facts, plan: Plan, reason: str, message: str) -> Decision:
    """Pods are missing, or a retry is due later. Where nodes are gone: is it time to go on without them?"""
    outcome = Outcome.RESTARTING if facts.record.attempt > 0 else Outcome.STARTING
    record, verdict = gone_on_without(facts, plan)
    changed = record.changes != facts.record.changes
    situation = Situation(outcome, plan=record.plan or plan, reason=reason, message=message, verdict=verdict)
    facts = replace(facts, record=record)
    # each look at other plans is a search; a pod that finds a node after all is an event
    requeue = SHORT_SECONDS if verdict is not None and not changed else LAUNCH_SECONDS
    return _decision(facts, situation, want_pods=True, urgent=changed, requeue_seconds=requeue)


def _training(facts: Facts, plan: Plan) -> Decision:
    """Ranks take steps: does a node end under them? Is another plan worth changing to?"""
    moved = {d.pod.node or "": d.pod.uid for d in disruptions(facts, plan) if d.evict}
    if not moved.items() <= facts.record.drained.items():
        drained = dict([*facts.record.drained.items(), *moved.items()][-DRAINED_KEPT:])
        facts = replace(facts, record=facts.record.model_copy(update={"drained": drained}))
        situation = Situation(Outcome.RUNNING, plan=plan)
        decision = _decision(facts, situation, want_pods=True, urgent=True, requeue_seconds=LAUNCH_SECONDS)
        return replace(decision, evict=tuple(moved.values()))
    record, verdict = adjusted(facts, plan)
    changed = record.changes != facts.record.changes
    begun = record.plan != facts.record.plan
    facts = replace(facts, record=record)
    situation = Situation(Outcome.RUNNING, plan=record.plan or plan, verdict=verdict)
    requeue = LAUNCH_SECONDS if begun else facts.scrape_interval_seconds
    decision = _decision(facts, situation, want_pods=True, urgent=changed, requeue_seconds=requeue)
    # what was asked for before and has not come about is asked for again
    return replace(decision, evict=tuple(moved.values()))


def _begun(facts: Facts, plan: Plan, members: dict[int, str]) -> tuple[Facts, RunOrder]:
    """The next attempt: its number is greater than any that was ever given out."""
    old = facts.record
    attempt = max([old.attempt, facts.job.status.attempt, *(a.attempt for a in facts.agents.values())]) + 1
    # ranks that are asked to go on otherwise did not fail, and can save before they do
    last = under_way(old)
    shrunk = last is not None and last.kind is Kind.SHRINK
    planned = (
        old.attempt > 0 and not shrunk and facts.order is not None and not carries_out(facts.job, facts.order, plan)
    )
    moved = last is not None and last.kind is Kind.MOVE
    interval, why = interval_for(facts, plan, goes_on=planned)
    failed = old.attempt > 0 and not (planned or moved or old.stopped)
    record = old.model_copy(
        update={
            "interruptions": old.interruptions + failed,
            "stopped": False,
            "interval_reason": why,
            "attempt": attempt,
            "attempt_at": facts.now,
            "members": members,
            "started_at": old.started_at or facts.now,
            "attempt_checkpoint": old.newest_checkpoint,
            "fruitless": _fruitless(facts, planned=planned or moved or shrunk),
        }
    )
    return replace(facts, record=record), run_order(facts.job, plan, attempt, drain=planned, interval_seconds=interval)


def _fruitless(facts: Facts, *, planned: bool) -> int:
    """Attempts in a row that got the run nowhere; one that is ended on purpose does not count."""
    if planned:
        return facts.record.fruitless
    return 0 if facts.record.attempt == 0 or attempts.fruitful(facts) else facts.record.fruitless + 1


def _decision(
    facts: Facts,
    situation: Situation,
    *,
    want_pods: bool = False,
    replace_child: bool = False,
    tell: tuple[str, ...] = (),
    release: tuple[str, ...] = (),
    delete_job: bool = False,
    urgent: bool = False,
    requeue_seconds: float | None = None,
) -> Decision:
    status, events = tell_story(facts, situation)
    return Decision(
        record=facts.record,
        order=facts.order,
        result=facts.result,
        status=status,
        plan=situation.plan,
        want_pods=want_pods,
        pods=_pods(facts, situation.plan) if situation.plan is not None and want_pods else None,
        replace_child=replace_child,
        tell=tell,
        release=release,
        delete_job=delete_job,
        events=events,
        urgent=urgent or _pods_changed(facts),
        requeue_seconds=requeue_seconds,
    )


def _pods_changed(facts: Facts) -> bool:
    """Whether the ledger holds something that cannot be found out again: a pod that has just ended."""
    return bool(facts.departed) or any(p.ended_at is not None for p in facts.pods)
