"""Attempts: when to start one, when to wait, when the run is complete, and when to give up. Pure.

An attempt is one torchrun launch over all pods. It needs every pod up at once; a pod that was replaced, or ranks that ended
before the last step, make the attempt over, and the next number is given out when all pods are up again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from cost_aware_operator.adjusting.changes import described
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.run_record import KEY_ORDER, RunRecord
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.workload.order import carries_out
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import AgentPhase, AgentStatus, RunResult

FRUITLESS_LIMIT = 5
"""Attempts in a row without a new checkpoint, after which the run is given up: something ends it every time."""
LONG_ATTEMPT = timedelta(minutes=30)
"""An attempt that lived this long was not fruitless, whether or not its checkpoints could be seen."""
MOST_NAMED = 4
"""Pods that a message names."""
RETRY_SECONDS = (0, 5, 15, 30, 60)
"""How long to wait before the next attempt, by the number of fruitless ones before it."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet."""

    reason: str
    """One CamelCase word."""
    message: str
    """What is waited for."""


@dataclass(frozen=True)
class Start:
    """All pods are up and the next attempt can begin."""

    members: dict[int, str]
    """Uids of the pods that take part, by index."""
    why: str
    """Why a new attempt begins."""


@dataclass(frozen=True)
class Tell:
    """The newest attempt stands, and some agents have not heard of it."""

    uids: tuple[str, ...]
    """Uids of their pods."""
    why: str = ""
    """Why some of them refuse it; empty while none does."""


@dataclass(frozen=True)
class Steady:
    """The newest attempt runs."""


@dataclass(frozen=True)
class Complete:
    """The last step is done and saved."""

    result: RunResult | None
    """What the run came to; None where no agent could tell."""


@dataclass(frozen=True)
class GiveUp:
    """Trying again cannot help."""

    reason: str
    """One CamelCase word."""
    message: str
    """What went wrong, and what may help."""


Step = Wait | Start | Tell | Steady | Complete | GiveUp


def next_step(facts: Facts, record: RunRecord, plan: Plan) -> Step:
    """The next step of the newest attempt. The first check that has an answer decides."""
    for check in (completed, _invalid, _fruitless, _unreadable, _absent, _changed, _untold, _replaced, _ended):
        step = check(facts, record, plan)
        if step is not None:
            return step
    return Steady()


def _current(facts: Facts) -> list[tuple[PodView, AgentStatus]]:
    """Usable pods whose agents answered, by index."""
    pairs = [(pod, facts.agents[pod.uid]) for pod in facts.pods if pod.usable and pod.uid in facts.agents]
    return sorted(pairs, key=lambda pair: pair[0].index)


def completed(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    """Whether the last step is done: an agent says so, or a pod ended well while the operator was away."""
    done = [a for _, a in _current(facts) if a.phase is AgentPhase.COMPLETED and a.attempt == record.attempt]
    if done:
        return Complete(next((a.result for a in done if a.result is not None), None))
    if any(pod.succeeded for pod in facts.pods) or (facts.child is not None and facts.child.complete):
        # agents end well only after the last step; the operator was away when it happened
        return Complete(facts.result)
    return None


def _invalid(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    for pod, agent in _current(facts):
        if agent.phase is AgentPhase.INVALID and agent.attempt == record.attempt:
            return GiveUp("InvalidRun", f"pod {pod.name}: {_said(agent)}")
    return None


def fruitful(facts: Facts, record: RunRecord) -> bool:
    """Whether the newest attempt got the run on: it added a checkpoint, or lived long where none can be seen."""
    lived = facts.now - record.attempt_at if record.attempt_at is not None else timedelta(0)
    return record.newest_checkpoint > record.attempt_checkpoint or lived >= LONG_ATTEMPT


def _fruitless(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    in_a_row = record.fruitless + 1
    if (
        in_a_row < FRUITLESS_LIMIT
        or fruitful(facts, record)
        or not (_ended_badly(facts, record) or _lost_a_pod(facts, record))
    ):
        return None
    last = next((f"pod {p.name}: {_said(a)}" for p, a in _current(facts) if a.phase is AgentPhase.FAILED), "")
    return GiveUp(
        "RestartsExhausted",
        f"{in_a_row} attempts in a row ended without a new checkpoint; the last: {last or 'pods were lost'}. "
        "Read the pods' logs; a shorter checkpoint.intervalSeconds helps where pods live briefly",
    )


def _lost_a_pod(facts: Facts, record: RunRecord) -> bool:
    """Whether a pod of the newest attempt is another one now. A user's own program may save where nobody sees it: not counted."""
    if facts.job.spec.trainer.config is None:
        return False
    return any(record.members.get(p.index) not in (None, p.uid) for p, _ in _current(facts))


def _unreadable(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    """Agents that cannot be worked with, for longer than a start may take: their pods are paid for, and nothing will come of it."""
    limit = facts.job.spec.startup_deadline_seconds
    lasting = [one for one in facts.unread if one.seconds >= limit]
    if not lasting:
        return None
    said = "; ".join(f"pod {one.pod}: {one.why}" for one in lasting[:MOST_NAMED])
    return GiveUp(
        "AgentUnreadable",
        f"{said}. It has been so for spec.startupDeadlineSeconds ({limit}). Write an image in spec.template.image whose "
        "cost_aware_trainer is of this operator's version",
    )


def _absent(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    present = {pod.index for pod, _ in _current(facts)}
    missing = sorted(set(range(plan.nodes)) - present)
    if not missing:
        return None
    problems = [
        f"pod {p.name}: {p.problem}" for p in facts.pods if p.index in missing and p.problem and p.ended_at is None
    ]
    unread = [one for one in facts.unread if one.uid in {p.uid for p in facts.pods if p.index in missing}]
    problems += [f"pod {one.pod}: {one.why}" for one in unread[:MOST_NAMED]]
    image = any(p.image_problem for p in facts.pods if p.index in missing)
    reason = "ImagePullFailing" if image else "AgentUnreadable" if unread else "WaitingForPods"
    said = "; ".join(problems) or f"{len(present)} of {plan.nodes} pods are up"
    if not problems and not facts.pods and facts.child is not None:
        said += f"; if that lasts, `kubectl describe job {facts.job.key.name} -n {facts.job.key.namespace}` says why"
    deadline = _startup_deadline(facts, record)
    if deadline is None:
        return Wait(reason, said)
    if facts.now >= deadline:
        return GiveUp(
            "StartupDeadlineExceeded",
            f"not all pods started within spec.startupDeadlineSeconds ({facts.job.spec.startup_deadline_seconds}): {said}"
            + (". Write an image that exists in spec.template.image" if image else ""),
        )
    return Wait(reason, f"{said}; the job fails if this lasts until {deadline.isoformat(timespec='seconds')}")


def _startup_deadline(facts: Facts, record: RunRecord) -> datetime | None:
    """Deadline of the first start; None later: a run that has trained waits for capacity as long as its owner lets it."""
    if record.attempt > 0 or facts.child is None:
        return None
    begun = facts.child.started_at or facts.child.created_at
    return begun + timedelta(seconds=facts.job.spec.startup_deadline_seconds)


def _members(facts: Facts, plan: Plan) -> dict[int, str]:
    """The pods that a plan runs on; those of higher index are about to go."""
    return {pod.index: pod.uid for pod, _ in _current(facts) if pod.index < plan.nodes}


def _changed(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    """Another plan is in force than the newest attempt was ordered for."""
    if record.attempt == 0 or facts.order is None or carries_out(facts.job, facts.order, plan):
        return None
    return Start(_members(facts, plan), f"going on as {described(plan)}")


def _untold(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    """Pods of the newest attempt that have not heard of it: the operator died while telling them."""
    members = _members(facts, plan)
    if record.attempt == 0 or members != record.members:
        return None
    told = set(members.values())
    behind = tuple(p.uid for p, agent in _current(facts) if p.uid in told and agent.attempt < record.attempt)
    if behind and KEY_ORDER in facts.unknown_fields:
        # an order of a newer operator: nobody can be told of it here
        return Start(members, "the order of the attempt before cannot be read")
    refusing = [f"pod {one.pod}: {one.why}" for one in facts.unread if one.uid in behind]
    return Tell(behind, "; ".join(refusing[:MOST_NAMED])) if behind else None


def _replaced(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    members = _members(facts, plan)
    if members == record.members:
        return None
    if record.attempt == 0:
        return Start(members, "all pods are up")
    changed = [p.name for p, _ in _current(facts) if p.index in members and record.members.get(p.index) != p.uid]
    return _after_pause(facts, record, members, f"{', '.join(changed)} replaced a pod that was lost")


def _ended(facts: Facts, record: RunRecord, plan: Plan) -> Step | None:
    if not _ended_badly(facts, record):
        return None
    ended = [(p, a) for p, a in _current(facts) if a.phase in (AgentPhase.FAILED, AgentPhase.CHECKPOINTED)]
    why = "; ".join(f"pod {p.name}: {_said(a)}" for p, a in ended)
    return _after_pause(facts, record, _members(facts, plan), why)


def _ended_badly(facts: Facts, record: RunRecord) -> bool:
    over = (AgentPhase.FAILED, AgentPhase.CHECKPOINTED)
    return any(a.phase in over and a.attempt == record.attempt for _, a in _current(facts))


def why_ended(facts: Facts, record: RunRecord) -> str:
    """The agents' words on the end of the newest attempt, if it failed or cannot work; else empty."""
    bad = (AgentPhase.FAILED, AgentPhase.INVALID)
    ended = [(p, a) for p, a in _current(facts) if a.phase in bad and a.attempt == record.attempt]
    return "; ".join(f"pod {p.name}: {_said(a)}" for p, a in ended)


def _after_pause(facts: Facts, record: RunRecord, members: dict[int, str], why: str) -> Step:
    pause = RETRY_SECONDS[min(record.fruitless, len(RETRY_SECONDS) - 1)]
    begun = record.attempt_at
    if begun is not None and pause and facts.now < begun + timedelta(seconds=pause):
        return Wait("WaitingToRetry", f"{why}; the next attempt begins {pause} s after the last one began")
    return Start(members, why)


def _said(agent: AgentStatus) -> str:
    """An agent's own words in one line; a traceback is cut to the exception that ends it."""
    text = (agent.result.message if agent.result is not None else "") or agent.message or agent.phase.value
    text = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if re.search(r"\b\w*(Error|Exception|Interrupt)\b.*:|killed|signal", line)]
    return (exceptions or lines or [text])[-1][:500]
