"""The whole policy of a reconcile, a chain of named checks: the first that has an answer decides. Pure; time comes with the facts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from cost_aware_operator.adjusting.changes import Kind, under_way
from cost_aware_operator.api.job import ANNOTATION_AGAIN
from cost_aware_operator.api.spec import OnExhausted
from cost_aware_operator.control.policy import attempts
from cost_aware_operator.control.policy.accounting import booked, budget_left_usd
from cost_aware_operator.control.policy.adjusting import failed_change, why_given_up
from cost_aware_operator.control.policy.checkpoint_interval import saves_seen
from cost_aware_operator.control.policy.decision import SUSPENDED_BY_ANOTHER, Decision, Outcome
from cost_aware_operator.control.policy.running import LAUNCH_SECONDS, decision_of, failed, run_on
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.planning.plan import Plan, Refusal, planning_key
from cost_aware_operator.workload.job import template_hash
from cost_aware_operator.workload.views import ChildJobView
from cost_aware_trainer.contract import AgentPhase

CLEARING_SECONDS = 3.0
"""How often to look while an object of a child's name is in the way: mostly a deleted job's, which is about to go."""
SOONEST_SECONDS = 0.1
"""Two looks at one job are no closer."""
BLOCKED_SECONDS = 15.0
"""How often a rejected job is looked at: what it lacks (a volume, a price) may have appeared without an event."""

Check = Callable[[Reading, RunRecord], Decision | None]
CheckOfPlan = Callable[[Reading, RunRecord, Plan], Decision | None]


def decide(reading: Reading) -> Decision:
    """The decision for one job: the record as this reading books it, then the first check of `CHAIN` that answers."""
    record = _accounted(reading)
    decision = _in_time_for_the_budget(reading, _first(CHAIN, reading, record))
    # What was planned anew must be stored before pods are made by it: once they run, the stored plan is the one in force.
    anew = decision.record.planned_for != reading.facts.record.planned_for
    return replace(decision, urgent=True) if anew else decision


def rejected(reading: Reading, record: RunRecord, refusal: Refusal) -> Decision:
    """No pod is started, for a reason that the manifest's owner can mend."""
    return decision_of(
        reading,
        record,
        Outcome.REJECTED,
        reason=refusal.reason,
        message=refusal.message,
        requeue_seconds=BLOCKED_SECONDS,
    )


def _first(checks: tuple[Check, ...], reading: Reading, record: RunRecord) -> Decision:
    for check in checks:
        decision = check(reading, record)
        if decision is not None:
            return decision
    raise LookupError("no check of the chain has an answer: its last one must always have one")


def _accounted(reading: Reading) -> RunRecord:
    """The record with what this reading adds: dollars, checkpoints, and the plan in force while the run goes on."""
    record, answer = reading.facts.record, reading.answer
    update = {"ledger": booked(reading), "newest_checkpoint": _newest_checkpoint(reading), "saves": saves_seen(reading)}
    if isinstance(answer, Plan) and record.ended_at is None:
        update |= {"plan": answer, "planned_for": planning_key(reading.facts.job.spec)}
    return record.model_copy(update=update)


def _newest_checkpoint(reading: Reading) -> int:
    """The newest step that a run is known to go on from; what ranks have resumed from was saved, if only in their nodes' memory."""
    facts = reading.facts
    seen = [step for s in reading.samples for step in (s.checkpoint_step, s.resumed_step) if step is not None]
    ended = [
        a.result.step for a in facts.agents.values() if a.result is not None and a.phase is AgentPhase.CHECKPOINTED
    ]
    return max([facts.record.newest_checkpoint, *seen, *ended])


def _in_time_for_the_budget(reading: Reading, decision: Decision) -> Decision:
    """Looks again at the moment the budget is spent, not at the next scrape: pods are stopped then."""
    hourly_usd, left_usd = reading.hourly_usd, budget_left_usd(reading, decision.record)
    if not hourly_usd or left_usd is None or left_usd <= 0 or decision.record.ended_at is not None:
        return decision
    seconds = max(left_usd / hourly_usd * 3600, SOONEST_SECONDS)
    if decision.requeue_seconds is not None and decision.requeue_seconds <= seconds:
        return decision
    return replace(decision, requeue_seconds=seconds)


def _with_plan(check: CheckOfPlan) -> Check:
    """A check of jobs that have a plan; it has no answer for others."""

    @functools.wraps(check)
    def narrowed(reading: Reading, record: RunRecord) -> Decision | None:
        return check(reading, record, record.plan) if record.plan is not None else None

    return narrowed


def name_taken(reading: Reading, record: RunRecord) -> Decision | None:
    """An object of a child's name belongs to somebody else: nothing is touched."""
    if not reading.facts.obstacle:
        return None
    decision = rejected(reading, record, Refusal("NameTaken", reading.facts.obstacle))
    return replace(decision, keep_off=True, requeue_seconds=CLEARING_SECONDS)


def finished(reading: Reading, record: RunRecord) -> Decision | None:
    """The run has ended: let the pods go, close the books, and delete the job when its time has come."""
    if record.ended_at is None:
        return None
    facts = reading.facts
    alive = [p for p in facts.pods if p.ended_at is None]
    outcome = Outcome.FAILED if record.failed is not None else Outcome.FINISHING if alive else Outcome.SUCCEEDED
    reason, message = record.failed or ("", "")
    ttl_seconds = facts.job.spec.ttl_seconds_after_finished
    requeue = LAUNCH_SECONDS if alive else None
    delete = False
    if ttl_seconds is not None and not alive:
        left_seconds = (record.ended_at + timedelta(seconds=ttl_seconds) - facts.now).total_seconds()
        delete, requeue = left_seconds <= 0, max(left_seconds, 0.1)
    return decision_of(
        reading,
        record,
        outcome,
        plan=reading.answer if isinstance(reading.answer, Plan) else None,
        reason=reason,
        message=message,
        want_pods=record.failed is None,
        release=tuple(p.uid for p in alive if p.usable) if record.failed is None else (),
        delete_job=delete,
        requeue_seconds=requeue,
    )


def refused(reading: Reading, record: RunRecord) -> Decision | None:
    """There is no plan: say what to write instead."""
    return rejected(reading, record, reading.answer) if isinstance(reading.answer, Refusal) else None


def already_trained(reading: Reading, record: RunRecord) -> Decision | None:
    """An earlier job of this name did the same to its end and was deleted in its time: nobody asked for it to be paid twice."""
    facts = reading.facts
    bill = facts.done_before
    if bill is None or record.attempt > 0 or facts.child is not None or facts.job.trains_again:
        return None
    message = (
        f"a job of this name (uid {bill.uid}) trained the same to its end for ${bill.ledger.accrued_usd:,.2f}, and was deleted when "
        f"ttlSecondsAfterFinished was over; its checkpoints are in {bill.folder}. It is not trained and paid again without a word: "
        f'take the manifest out of what applies it, or say so by the annotation {ANNOTATION_AGAIN}: "true"'
    )
    return rejected(reading, record, Refusal("AlreadyTrained", message))


def volume_missing(reading: Reading, record: RunRecord) -> Decision | None:
    """A volume that the manifest names is not there, and no pod waits for it yet."""
    facts = reading.facts
    if not facts.missing_claims or facts.child is not None:
        return None
    claim = facts.missing_claims[0]
    message = (
        f"{claim.field}: there is no PersistentVolumeClaim {claim.name!r} in namespace {facts.job.key.namespace!r}: "
        "create it, or write the name of one that exists"
    )
    return rejected(reading, record, Refusal("VolumeMissing", message))


def folder_in_use(reading: Reading, record: RunRecord) -> Decision | None:
    """Another job that lives writes its checkpoints where this one would, and this one has not begun."""
    facts = reading.facts
    if not facts.folder_taken or facts.child is not None:
        return None
    return rejected(reading, record, Refusal("FolderInUse", facts.folder_taken))


@_with_plan
def pods_failed(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """The Job controller has given the Job up."""
    child = reading.facts.child
    return failed(reading, record, plan, *child.failure) if child is not None and child.failure is not None else None


@_with_plan
def completed(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """The last step is done. Before budget and suspension: what is done is done."""
    done = isinstance(attempts.completed(reading.facts, record, plan), attempts.Complete)
    return run_on(reading, record, plan) if done else None


@_with_plan
def budget_exhausted(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """The budget is spent: stop gracefully, or fail, as its owner wrote."""
    budget, left_usd = reading.facts.job.spec.budget, budget_left_usd(reading, record)
    if budget is None or left_usd is None or left_usd > 0:
        return None
    if budget.on_exhausted is OnExhausted.FAIL:
        return failed(reading, record, plan, "BudgetExhausted", f"the budget of ${budget.total_usd:,.2f} is spent")
    return _stopped(reading, record, plan, Outcome.BUDGET_EXHAUSTED)


@_with_plan
def suspended(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """The owner has suspended the job."""
    return _stopped(reading, record, plan, Outcome.SUSPENDED) if reading.facts.job.spec.suspend else None


@_with_plan
def change_failed(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """A change that was ordered does not come about: the run goes on under the plan before it."""
    facts, last = reading.facts, under_way(record.changes)
    # pods that are to be made anew do not all end at once, and those that are left lose their peers, as those of nodes that are gone
    ending = last is not None and last.kind in (Kind.MOVE, Kind.SHRINK) and record.attempt < last.attempt
    why = ("" if ending else attempts.why_ended(facts, record)) or why_given_up(facts, record)
    back = failed_change(record, why) if why else None
    return _first((pods_outdated, held, running), reading, back) if back is not None and back.plan is not None else None


@_with_plan
def pods_outdated(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """The manifest was changed while suspended, or a node is left: a Job's template cannot change, so the Job is made anew.

    Pods that run checkpoint and end first, so that no two attempts are ever at work.
    """
    facts = reading.facts
    child = facts.child
    outdated = child is not None and child.template_hash != template_hash(facts.job, plan)
    if child is None or not (child.deleting or outdated or _token_outdated(facts, child)):
        return None
    if child.deleting or all(p.ended_at is not None for p in facts.pods):
        return decision_of(
            reading, record, Outcome.STARTING, plan=plan, replace_child=True, requeue_seconds=LAUNCH_SECONDS
        )
    last = under_way(record.changes)
    why = "pods save and end; they are made anew" + (f": {last.reason}" if last is not None else "")
    return decision_of(
        reading,
        record,
        Outcome.RESTARTING,
        plan=plan,
        reason="Replacing",
        message=why,
        requeue_seconds=LAUNCH_SECONDS,
    )


def _token_outdated(facts: Facts, child: ChildJobView) -> bool:
    """Whether the Job's pods have a token that cannot be derived any more, or could have one of a newer key without ending any."""
    version = child.token.key_version if child.token is not None else 1
    if version not in facts.key_versions:
        return True
    idle = child.suspended and all(p.ended_at is not None for p in facts.pods)
    return idle and version != max(facts.key_versions)


@_with_plan
def held(reading: Reading, record: RunRecord, plan: Plan) -> Decision | None:
    """Somebody else, a queue for example, has suspended the Job: the run waits until they resume it."""
    child = reading.facts.child
    if child is None or not child.held_by:
        return None
    message = (
        f"{child.held_by} has suspended Job {reading.facts.job.key.name!r}; the run goes on from its newest checkpoint when "
        "that is taken back (spec.suspend of the Job)"
    )
    stopped = _stopped(reading, record, plan, Outcome.SUSPENDED)
    return replace(stopped, reason=SUSPENDED_BY_ANOTHER, message=message)


@_with_plan
def running(reading: Reading, record: RunRecord, plan: Plan) -> Decision:
    """Pods are up or about to be: start attempts, let them train, adjust."""
    return run_on(reading, record, plan)


CHAIN: tuple[Check, ...] = (
    name_taken,
    finished,
    refused,
    already_trained,
    volume_missing,
    folder_in_use,
    pods_failed,
    completed,
    budget_exhausted,
    suspended,
    change_failed,
    pods_outdated,
    held,
    running,
)
"""The policy in order. A job without a plan goes no further than `refused`."""


def _stopped(reading: Reading, record: RunRecord, plan: Plan, outcome: Outcome) -> Decision:
    """Suspended by its owner or by its budget: the Job controller ends the pods, the agents checkpoint first."""
    ending = any(p.ended_at is None for p in reading.facts.pods)
    return decision_of(
        reading,
        record.model_copy(update={"stopped": True}),
        outcome,
        plan=plan,
        # what tells a resumed run from one that failed must not be forgotten
        urgent=not record.stopped,
        requeue_seconds=LAUNCH_SECONDS if ending else None,
    )
