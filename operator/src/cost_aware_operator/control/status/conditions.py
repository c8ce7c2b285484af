"""Conditions of a job: rows of (type, status, reason, message), each from a reading and what was decided. Pure."""

from __future__ import annotations

from cost_aware_operator.adjusting.changes import ChangeOutcome, Kind
from cost_aware_operator.adjusting.situation import Action
from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.status import ConditionStatus, ConditionType
from cost_aware_operator.control.policy.decision import Decision, Outcome
from cost_aware_operator.control.policy.disruption import disruptions
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.status.fields import straggler_status
from cost_aware_operator.control.status.message import message_of
from cost_aware_operator.observing.samples import WEIGHT_MOVING

WARNED_SHARE = 0.8
"""Share of the budget beyond which a warning says that the rest is running out."""
UNHEARD_SECONDS = 15.0
"""Seconds that a rank may be without metrics before it is told: a busy machine misses a scrape now and then."""
_TOLD_ONLY_WHEN_TRUE = (
    ConditionType.SUSPENDED,
    ConditionType.BUDGET_EXHAUSTED,
    ConditionType.SUCCEEDED,
    ConditionType.FAILED,
)

Row = tuple[ConditionType, ConditionStatus, str, str]


def condition_rows(reading: Reading, decision: Decision) -> list[Row]:
    """The conditions that this reconcile has something to say about; the others stay as they were."""
    return [row for rows in ROWS for row in rows(reading, decision)]


def _planned(reading: Reading, decision: Decision) -> list[Row]:
    if decision.outcome is Outcome.REJECTED:
        return [(ConditionType.PLANNED, ConditionStatus.FALSE, decision.reason, decision.message)]
    if decision.plan is None:
        return []
    return [(ConditionType.PLANNED, ConditionStatus.TRUE, "Feasible", decision.plan.explanation)]


def _priced(reading: Reading, decision: Decision) -> list[Row]:
    unpriced = [p for p in reading.facts.pods if p.node is not None and p.uid not in reading.prices]
    if unpriced:
        node = reading.facts.nodes.get(unpriced[0].node or "")
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
    priced = [reading.prices[p.uid] for p in reading.facts.pods if p.uid in reading.prices]
    if priced:
        first = priced[0]
        message = f"${first.hourly_usd:,.4g} a node-hour ({first.source}, as of {first.as_of})"
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.TRUE, "PriceFound", message)]
    if decision.outcome is Outcome.REJECTED and decision.reason == "UnknownInstanceType":
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.FALSE, decision.reason, decision.message)]
    if decision.plan is not None and decision.plan.hourly_usd is not None:
        message = (
            f"${decision.plan.hourly_usd:,.4g} an hour for {decision.plan.nodes} nodes, from spec.nodes.instanceTypes"
        )
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.TRUE, "PriceFound", message)]
    if find(reading.facts.job.status.conditions, ConditionType.PRICE_KNOWN) is None:
        message = "known when the pods are on nodes, from the nodes' labels"
        return [(ConditionType.PRICE_KNOWN, ConditionStatus.UNKNOWN, "NotScheduled", message)]
    return []


def _trains(reading: Reading, decision: Decision) -> list[Row]:
    running = decision.outcome in (Outcome.RUNNING, Outcome.FINISHING)
    status = ConditionStatus.TRUE if running else ConditionStatus.FALSE
    waiting = decision.outcome in (Outcome.STARTING, Outcome.RESTARTING) and decision.reason
    reason = decision.reason if waiting else decision.outcome.value
    return [(ConditionType.RUNNING, status, reason, message_of(reading, decision))]


def _efficient(reading: Reading, decision: Decision) -> list[Row]:
    observation = reading.observation
    if observation is None:
        return []
    threshold = reading.facts.job.spec.efficiency.threshold
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


def _observed(reading: Reading, decision: Decision) -> list[Row]:
    """Ranks that say nothing, or what cannot be true, once they have done so for a while."""
    if decision.outcome is not Outcome.RUNNING:
        return []
    if reading.facts.job.spec.trainer.config is None and not reading.facts.samples:
        return []  # a program of the user's own need not tell anything
    missing = [u for u in reading.facts.unheard if u.seconds >= UNHEARD_SECONDS]
    if missing:
        said = "; ".join(f"{u.rank}: {u.why}" for u in missing[:4]) + (
            f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
        )
        message = f"no change is decided without the metrics of every rank: {said}"
        return [(ConditionType.OBSERVED, ConditionStatus.FALSE, "MetricsMissing", message[:1024])]
    if find(reading.facts.job.status.conditions, ConditionType.OBSERVED) is None or reading.facts.unheard:
        return []
    return [(ConditionType.OBSERVED, ConditionStatus.TRUE, "MetricsRead", "the metrics of every rank are read")]


def _disrupted(reading: Reading, decision: Decision) -> list[Row]:
    """Nodes that end under the pods, and what is done about it."""
    if decision.outcome is not Outcome.RUNNING or decision.plan is None:
        return []
    found = disruptions(reading.facts, decision.record, decision.plan)
    if found:
        message = "; ".join(d.message for d in found[:4])
        return [(ConditionType.DISRUPTED, ConditionStatus.TRUE, found[0].reason, message[:1024])]
    before = find(reading.facts.job.status.conditions, ConditionType.DISRUPTED)
    if before is None:
        return []
    return [(ConditionType.DISRUPTED, ConditionStatus.FALSE, "NoDisruption", "no node under a pod is about to end")]


def _adjusting(reading: Reading, decision: Decision) -> list[Row]:
    """What the adjuster does, or why it does nothing."""
    last = decision.record.changes[-1] if decision.record.changes else None
    if last is not None and last.outcome is ChangeOutcome.IN_PROGRESS:
        reason = "RollingBack" if last.is_rollback else last.kind.value
        return [(ConditionType.ADJUSTING, ConditionStatus.TRUE, reason, last.reason[:1024])]
    if decision.verdict is not None:
        recommended = decision.verdict.action is Action.RECOMMEND
        reason = "Recommended" if recommended else decision.verdict.reason
        message = (
            f"efficiency.policy is Recommend: {decision.verdict.message}" if recommended else decision.verdict.message
        )
        return [(ConditionType.ADJUSTING, ConditionStatus.FALSE, reason, message[:1024])]
    if find(reading.facts.job.status.conditions, ConditionType.ADJUSTING) is None:
        return []
    return [(ConditionType.ADJUSTING, ConditionStatus.FALSE, "NotTraining", "the ranks take no steps")]


def _straggling(reading: Reading, decision: Decision) -> list[Row]:
    """Who holds up the others, and what is done about it; while the ranks take no steps, what was known stays."""
    if decision.outcome is not Outcome.RUNNING:
        return []
    slow = straggler_status(reading)
    if not slow:
        before = find(reading.facts.job.status.conditions, ConditionType.STRAGGLING)
        nobody = "every rank computes about as fast as its peers"
        return [] if before is None else [(ConditionType.STRAGGLING, ConditionStatus.FALSE, "NoStraggler", nobody)]
    verdict = decision.verdict
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


def _ends(reading: Reading, decision: Decision) -> list[Row]:
    now_true: dict[ConditionType, tuple[str, str]] = {}
    if decision.outcome is Outcome.SUSPENDED:
        now_true[ConditionType.SUSPENDED] = (decision.reason or "SuspendedByOwner", message_of(reading, decision))
    elif decision.outcome is Outcome.BUDGET_EXHAUSTED:
        spent = f"${decision.record.ledger.accrued_usd:,.2f} of the budget's dollars are spent; {message_of(reading, decision)}"
        now_true[ConditionType.SUSPENDED] = ("BudgetExhausted", spent)
        now_true[ConditionType.BUDGET_EXHAUSTED] = ("BudgetExhausted", spent)
    elif decision.outcome is Outcome.SUCCEEDED:
        now_true[ConditionType.SUCCEEDED] = ("Completed", message_of(reading, decision))
    elif decision.outcome is Outcome.FAILED:
        now_true[ConditionType.FAILED] = (decision.reason, decision.message)
        if decision.reason == "BudgetExhausted":
            now_true[ConditionType.BUDGET_EXHAUSTED] = ("BudgetExhausted", decision.message)
    rows: list[Row] = []
    for kind in _TOLD_ONLY_WHEN_TRUE:
        if kind in now_true:
            rows.append((kind, ConditionStatus.TRUE, *now_true[kind]))
        elif kind is ConditionType.BUDGET_EXHAUSTED and (nearly := _nearly_spent(reading, decision)):
            rows.append((kind, ConditionStatus.FALSE, "NearlySpent", nearly))
        elif (
            before := find(reading.facts.job.status.conditions, kind)
        ) is not None and before.status is ConditionStatus.TRUE:
            rows.append((kind, ConditionStatus.FALSE, "Resumed", "no longer so"))
    return rows


def _booked(reading: Reading, decision: Decision) -> list[Row]:
    """Whether the books can be kept as they should; told once something is wrong."""
    facts = reading.facts
    if facts.clock_problem:
        return [(ConditionType.BOOKED, ConditionStatus.FALSE, "ClockOff", facts.clock_problem)]
    if facts.unknown_fields:
        names = ", ".join(facts.unknown_fields[:4]) + (", …" if len(facts.unknown_fields) > 4 else "")
        message = (
            f"the run's record has what this operator does not know, and keeps: {names}. A newer operator wrote it: upgrade this "
            "one, or go on without what it says"
        )
        return [(ConditionType.BOOKED, ConditionStatus.FALSE, "FieldsUnknown", message[:1024])]
    if find(facts.job.status.conditions, ConditionType.BOOKED) is None:
        return []
    return [(ConditionType.BOOKED, ConditionStatus.TRUE, "BooksKept", "every second of the pods is booked")]


def _nearly_spent(reading: Reading, decision: Decision) -> str:
    """What to say when most of the budget is gone and the run goes on; empty before."""
    budget = reading.facts.job.spec.budget
    total = budget.total_usd if budget is not None else None
    accrued = decision.record.ledger.accrued_usd
    if total is None or decision.record.ended_at is not None or accrued < WARNED_SHARE * total:
        return ""
    return f"more than {WARNED_SHARE:.0%} of spec.budget.totalUSD (${total:,.2f}) is spent; at 100 % the run checkpoints and stops"


ROWS = (_planned, _priced, _trains, _efficient, _observed, _disrupted, _adjusting, _straggling, _booked, _ends)
