"""Telling a user what happens: status, conditions and events from the facts and what was decided. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cost_aware_operator.adjusting.changes import ChangeOutcome, Kind
from cost_aware_operator.adjusting.situation import Action, Verdict
from cost_aware_operator.api.conditions import find, merged
from cost_aware_operator.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    JobState,
    JobStatus,
    StragglerStatus,
)
from cost_aware_operator.control.policy.accounting import price_of
from cost_aware_operator.control.policy.adjusting import under_way
from cost_aware_operator.control.policy.decision import Event
from cost_aware_operator.control.policy.disruption import disruptions
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.status.fields import (
    adjustment_status,
    checkpoint_status,
    cost_status,
    efficiency_status,
    goodput_status,
    measured_status,
    plan_status,
    progress_status,
    straggler_status,
)
from cost_aware_operator.observing.samples import WEIGHT_MOVING, Observation, observe
from cost_aware_operator.planning.plan import Plan

WARNED_SHARE = 0.8
"""Of the budget, beyond which it is told that the rest is running out."""


class Outcome(StrEnum):
    """What a job is doing, as decided; the value is the reason of the condition Running."""

    REJECTED = "Rejected"
    STARTING = "Starting"
    LAUNCHING = "Launching"
    RUNNING = "Training"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    FINISHING = "Finishing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True)
class Situation:
    """An outcome with its details; `reason` and `message` come from whoever found it."""

    outcome: Outcome
    plan: Plan | None = None
    reason: str = ""
    message: str = ""
    verdict: Verdict | None = None


_STATES = {
    Outcome.REJECTED: JobState.REJECTED,
    Outcome.STARTING: JobState.STARTING,
    Outcome.LAUNCHING: JobState.STARTING,
    Outcome.RUNNING: JobState.RUNNING,
    Outcome.RESTARTING: JobState.RESTARTING,
    Outcome.SUSPENDED: JobState.SUSPENDED,
    Outcome.BUDGET_EXHAUSTED: JobState.SUSPENDED,
    Outcome.FINISHING: JobState.RUNNING,
    Outcome.SUCCEEDED: JobState.SUCCEEDED,
    Outcome.FAILED: JobState.FAILED,
}
_TOLD_ONLY_WHEN_TRUE = (
    ConditionType.SUSPENDED,
    ConditionType.BUDGET_EXHAUSTED,
    ConditionType.SUCCEEDED,
    ConditionType.FAILED,
)
_BAD_WHEN_TRUE = (
    ConditionType.BUDGET_EXHAUSTED,
    ConditionType.FAILED,
    ConditionType.STRAGGLING,
    ConditionType.DISRUPTED,
)
_BAD_WHEN_FALSE = (ConditionType.PLANNED, ConditionType.PRICE_KNOWN, ConditionType.EFFICIENT, ConditionType.OBSERVED)
UNHEARD_SECONDS = 15.0
"""For so long a rank may be without metrics before it is told: a busy machine misses a scrape now and then."""

Row = tuple[ConditionType, ConditionStatus, str, str]


def tell_story(facts: Facts, situation: Situation) -> tuple[JobStatus, tuple[Event, ...]]:
    """The status to write, and the events for what has changed since the one before."""
    old = facts.job.status
    observation = observe(facts.scrapes)
    progress = progress_status(facts, observation)
    last = under_way(facts.record)
    # until the change that was just ordered is carried out, what is measured is the plan before it
    ran = last.origin if last is not None and facts.record.attempt < last.attempt else situation.plan
    slow = straggler_status(facts, ran) if situation.outcome is Outcome.RUNNING else old.stragglers
    rows = [
        *_planned(situation),
        *_priced(facts, situation),
        *_running(facts, situation),
        *_efficient(facts, observation),
        *_observed(facts, situation),
        *_disrupted(facts, situation),
        *_adjusting(facts, situation),
        *_straggling(facts, situation, slow),
        *_ends(facts, situation),
    ]
    conditions = merged(old.conditions, rows, facts.job.generation, facts.now)
    status = JobStatus(
        state=_state(facts, situation),
        message=_message(facts, situation)[:1024],
        observed_generation=facts.job.generation,
        attempt=max(facts.record.attempt, old.attempt),
        start_time=facts.record.started_at,
        completion_time=facts.record.ended_at,
        plan=plan_status(situation.plan, measured_status(facts, situation.plan))
        if situation.plan is not None
        else old.plan,
        adjustments=tuple(map(adjustment_status, facts.record.changes)),
        progress=progress,
        efficiency=efficiency_status(facts, situation.plan, observation) or old.efficiency,
        stragglers=slow,
        checkpoint=checkpoint_status(facts),
        goodput=goodput_status(facts),
        cost=cost_status(facts, situation.plan, progress),
        conditions=conditions,
    )
    return status, _events(old.conditions, conditions)


def _state(facts: Facts, situation: Situation) -> JobState:
    if situation.outcome is Outcome.LAUNCHING and facts.record.attempt > 1:
        return JobState.RESTARTING
    return _STATES[situation.outcome]


UNSEEN = (
    "the program serves no catj_rank_* metrics, so it has no progress, no efficiency and no samples trained exactly once here; "
    "cost_aware_trainer.TrainingSession adds them"
)
"""What a torchrun script that knows nothing of us does without."""


def _message(facts: Facts, situation: Situation) -> str:
    attempt = facts.record.attempt
    match situation.outcome:
        case Outcome.RUNNING if facts.job.spec.trainer.config is None and not facts.samples:
            return f"attempt {attempt} runs; {UNSEEN}"
        case Outcome.RUNNING:
            return f"attempt {attempt} trains"
        case Outcome.LAUNCHING:
            return f"attempt {attempt}: {situation.message or 'ranks are starting'}"
        case Outcome.SUSPENDED:
            return "suspended; set spec.suspend to false to go on from the newest checkpoint"
        case Outcome.BUDGET_EXHAUSTED:
            return "the budget is spent; raise spec.budget.totalUSD to go on from the newest checkpoint"
        case Outcome.FINISHING:
            return "the last step is done; pods are being let go"
        case Outcome.SUCCEEDED:
            return f"all {facts.result.total_steps} steps are done" if facts.result is not None else "done"
    return situation.message


def _planned(situation: Situation) -> list[Row]:
    if situation.outcome is Outcome.REJECTED:
        return [(ConditionType.PLANNED, ConditionStatus.FALSE, situation.reason, situation.message)]
    if situation.plan is None:
        return []
    return [(ConditionType.PLANNED, ConditionStatus.TRUE, "Feasible", situation.plan.explanation)]


def _priced(facts: Facts, situation: Situation) -> list[Row]:
    unpriced = [p for p in facts.pods if p.node is not None and price_of(facts, p) is None]
    if unpriced:
        node = facts.nodes.get(unpriced[0].node or "")
        kind = node.instance_type if node is not None else None
        if node is None:
            what = (
                "the operator may not read the node, and spec.nodes.instanceTypes does not name the one type it can be"
            )
        else:
            what = f"instance type {kind!r} is not in the price book" if kind else "the node has no instance-type label"
        message = (
            f"pod {unpriced[0].name} runs on node {unpriced[0].node}: {what}. Its time is counted in "
            "status.cost.unpricedPodSeconds, not in dollars: give the price in the operator's price ConfigMap"
            + ("" if kind or node is None else ", or label the node node.kubernetes.io/instance-type")
        )
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.FALSE, "NoPrice", message)]
    priced = [price for p in facts.pods if (price := price_of(facts, p)) is not None]
    if priced:
        first = priced[0]
        message = f"${first.hourly_usd:,.4g} a node-hour ({first.source}, as of {first.as_of})"
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.TRUE, "PriceFound", message)]
    if situation.outcome is Outcome.REJECTED and situation.reason == "UnknownInstanceType":
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.FALSE, situation.reason, situation.message)]
    if situation.plan is not None and situation.plan.hourly_usd is not None:
        message = (
            f"${situation.plan.hourly_usd:,.4g} an hour for {situation.plan.nodes} nodes, from spec.nodes.instanceTypes"
        )
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.TRUE, "PriceFound", message)]
    if find(facts.job.status.conditions, ConditionType.PRICE_KNOWN) is None:
        message = "known when the pods are on nodes, from the nodes' labels"
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.UNKNOWN, "NotScheduled", message)]
    return []


def _running(facts: Facts, situation: Situation) -> list[Row]:
    running = situation.outcome in (Outcome.RUNNING, Outcome.FINISHING)
    status = ConditionStatus.TRUE if running else ConditionStatus.FALSE
    waiting = situation.outcome in (Outcome.STARTING, Outcome.RESTARTING) and situation.reason
    reason = situation.reason if waiting else situation.outcome.value
    return [(ConditionType.RUNNING, status, reason, _message(facts, situation))]


def _efficient(facts: Facts, observation: Observation | None) -> list[Row]:
    if observation is None:
        return []
    threshold = facts.job.spec.efficiency.threshold
    largest = max(
        (p for p in observation.shares), key=lambda p: observation.shares[p] if p not in WEIGHT_MOVING else -1.0
    )
    message = (
        f"{observation.efficiency:.0%} of the ranks' time moves the weights (threshold {threshold:.0%}); the largest "
        f"other share is {largest.value} with {observation.shares[largest]:.0%}"
    )
    if observation.efficiency >= threshold:
        return [(ConditionType.EFFICIENT, ConditionStatus.TRUE, "AboveThreshold", message)]
    return [(ConditionType.EFFICIENT, ConditionStatus.FALSE, "BelowThreshold", message)]


def _observed(facts: Facts, situation: Situation) -> list[Row]:
    """Ranks that say nothing, or what cannot be true, once they have done so for a while."""
    if situation.outcome is not Outcome.RUNNING:
        return []
    if facts.job.spec.trainer.config is None and not facts.samples:
        return []  # a program of the user's own need not tell anything
    missing = [u for u in facts.unheard if u.seconds >= UNHEARD_SECONDS]
    if missing:
        said = "; ".join(f"{u.rank}: {u.why}" for u in missing[:4]) + (
            f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
        )
        message = f"no change is decided without the metrics of every rank: {said}"
        return [(ConditionType.OBSERVED, ConditionStatus.FALSE, "MetricsMissing", message[:1024])]
    if find(facts.job.status.conditions, ConditionType.OBSERVED) is None or facts.unheard:
        return []
    return [(ConditionType.OBSERVED, ConditionStatus.TRUE, "MetricsRead", "the metrics of every rank are read")]


def _disrupted(facts: Facts, situation: Situation) -> list[Row]:
    """Nodes that end under the pods, and what is done about it."""
    if situation.outcome is not Outcome.RUNNING or situation.plan is None:
        return []
    found = disruptions(facts, situation.plan)
    if found:
        message = "; ".join(d.message for d in found[:4])
        return [(ConditionType.DISRUPTED, ConditionStatus.TRUE, found[0].reason, message[:1024])]
    before = find(facts.job.status.conditions, ConditionType.DISRUPTED)
    if before is None:
        return []
    return [(ConditionType.DISRUPTED, ConditionStatus.FALSE, "NoDisruption", "no node under a pod is about to end")]


def _adjusting(facts: Facts, situation: Situation) -> list[Row]:
    """What the adjuster does, or why it does nothing."""
    last = facts.record.changes[-1] if facts.record.changes else None
    if last is not None and last.outcome is ChangeOutcome.IN_PROGRESS:
        reason = "RollingBack" if last.is_rollback else last.kind.value
        return [(ConditionType.ADJUSTING, ConditionStatus.TRUE, reason, last.reason[:1024])]
    if situation.verdict is not None:
        recommended = situation.verdict.action is Action.RECOMMEND
        reason = "Recommended" if recommended else situation.verdict.reason
        message = (
            f"efficiency.policy is Recommend: {situation.verdict.message}" if recommended else situation.verdict.message
        )
        return [(ConditionType.ADJUSTING, ConditionStatus.FALSE, reason, message[:1024])]
    if find(facts.job.status.conditions, ConditionType.ADJUSTING) is None:
        return []
    return [(ConditionType.ADJUSTING, ConditionStatus.FALSE, "NotTraining", "the ranks take no steps")]


def _straggling(facts: Facts, situation: Situation, slow: tuple[StragglerStatus, ...]) -> list[Row]:
    """Who holds up the others, and what is done about it; while the ranks take no steps, what was known stays."""
    if situation.outcome is not Outcome.RUNNING:
        return []
    if not slow:
        before = find(facts.job.status.conditions, ConditionType.STRAGGLING)
        nobody = "every rank computes about as fast as its peers"
        return [] if before is None else [(ConditionType.STRAGGLING, ConditionStatus.FALSE, "NoStraggler", nobody)]
    verdict = situation.verdict
    about = verdict.of_slow_node if verdict is not None else None
    if verdict is not None and verdict.reason == Kind.MOVE.value:
        about = verdict
    named = "; ".join(
        f"rank {s.rank} (pod {s.pod}, node {s.node}) takes {s.slowdown:.2f} times its peers' time" for s in slow[:4]
    )
    message = f"{named}. {about.message}" if about is not None else named
    return [
        (
            ConditionType.STRAGGLING,
            ConditionStatus.TRUE,
            about.reason if about is not None else "SlowNode",
            message[:1024],
        )
    ]


def _ends(facts: Facts, situation: Situation) -> list[Row]:
    now_true: dict[ConditionType, tuple[str, str]] = {}
    if situation.outcome is Outcome.SUSPENDED:
        now_true[ConditionType.SUSPENDED] = ("SuspendedByOwner", _message(facts, situation))
    elif situation.outcome is Outcome.BUDGET_EXHAUSTED:
        spent = (
            f"${facts.record.ledger.accrued_usd:,.2f} of the budget's dollars are spent; {_message(facts, situation)}"
        )
        now_true[ConditionType.SUSPENDED] = ("BudgetExhausted", spent)
        now_true[ConditionType.BUDGET_EXHAUSTED] = ("BudgetExhausted", spent)
    elif situation.outcome is Outcome.SUCCEEDED:
        now_true[ConditionType.SUCCEEDED] = ("Completed", _message(facts, situation))
    elif situation.outcome is Outcome.FAILED:
        now_true[ConditionType.FAILED] = (situation.reason, situation.message)
        if situation.reason == "BudgetExhausted":
            now_true[ConditionType.BUDGET_EXHAUSTED] = ("BudgetExhausted", situation.message)
    rows: list[Row] = []
    for kind in _TOLD_ONLY_WHEN_TRUE:
        if kind in now_true:
            rows.append((kind, ConditionStatus.TRUE, *now_true[kind]))
        elif kind is ConditionType.BUDGET_EXHAUSTED and (nearly := _nearly_spent(facts)):
            rows.append((kind, ConditionStatus.FALSE, "NearlySpent", nearly))
        elif (before := find(facts.job.status.conditions, kind)) is not None and before.status is ConditionStatus.TRUE:
            rows.append((kind, ConditionStatus.FALSE, "Resumed", "no longer so"))
    return rows


def _nearly_spent(facts: Facts) -> str:
    """What to say when most of the budget is gone and the run goes on; empty before."""
    budget = facts.job.spec.budget
    total = budget.total_usd if budget is not None else None
    accrued = facts.record.ledger.accrued_usd
    if total is None or facts.record.ended_at is not None or accrued < WARNED_SHARE * total:
        return ""
    return f"more than {WARNED_SHARE:.0%} of spec.budget.totalUSD (${total:,.2f}) is spent; at 100 % the run checkpoints and stops"


def _events(old: tuple[Condition, ...], new: tuple[Condition, ...]) -> tuple[Event, ...]:
    """One event for each condition whose status or reason is another than before."""
    events = []
    for condition in new:
        before = find(old, condition.type)
        if before is not None and (before.status, before.reason) == (condition.status, condition.reason):
            continue
        if condition.status is ConditionStatus.UNKNOWN:
            continue
        holds = condition.status is ConditionStatus.TRUE
        warning = (holds and condition.type in _BAD_WHEN_TRUE) or (not holds and condition.type in _BAD_WHEN_FALSE)
        warning = warning or condition.reason in ("ImagePullFailing", "NearlySpent")
        events.append(
            Event(warning, condition.reason, f"{condition.type.value}={condition.status.value}: {condition.message}")
        )
    return tuple(events)
