"""Which of the ranks' answers can be believed, and what they left in writing. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from datetime import datetime

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.observing.validity import Limits, why_refused
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.sources.metrics_source import AgentAnswers, Answers, rank_name
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import AgentPhase, AgentStatus, ContractError, RunResult

ATTEMPTS_AHEAD = 1000
"""How far an agent's attempt may be beyond the newest that is known here: a record that was lost forgets attempts. Without a bound,
a pod could have numbers given out that no API server takes."""
Samples = Mapping[str, tuple[RankSample, ...]]


def believed(
    job: TrainingJob, pods: Iterable[PodView], answers: Answers, before: Samples, attempt: int, now: datetime
) -> tuple[dict[str, tuple[RankSample, ...]], dict[str, str]]:
    """The samples that can be true, by pod uid; and for every other rank why it has none, by its name.

    `before` holds the samples that were believed last, `attempt` the newest number that was given out.
    """
    known = {s.rank: s for samples in before.values() for s in samples}
    plan = job.status.plan
    per_node = plan.ranks // plan.nodes if plan is not None else 1
    fresh: dict[str, tuple[RankSample, ...]] = {}
    unheard = dict(answers.unheard)
    by_uid = {pod.uid: pod for pod in pods}
    for uid, samples in answers.samples.items():
        pod = by_uid.get(uid)
        if pod is None:
            continue
        taken = set[int]()
        for place, sample in enumerate(samples):
            first = pod.index * per_node
            expected = (
                sample.rank if first <= sample.rank < first + per_node and sample.rank not in taken else first + place
            )
            why = why_refused(sample, _limits(job, pod, expected, attempt, now), known.get(expected))
            if why:
                unheard[rank_name(expected, pod)] = f"its metrics cannot be true: {why}"
                continue
            taken.add(sample.rank)
            fresh[uid] = (*fresh.get(uid, ()), sample)
    return fresh, unheard


def believed_agents(
    job: TrainingJob, pods: Iterable[PodView], answers: AgentAnswers, newest: int
) -> tuple[dict[str, AgentStatus], dict[str, str]]:
    """The agents' answers that can be true, by pod uid; and for every other pod with an answer why that is not believed.

    `newest` is the newest attempt that was given out, as far as the record and the status know.
    """
    by_uid = {pod.uid: pod for pod in pods}
    unread = {uid: why for uid, why in answers.unread.items() if uid in by_uid}
    found: dict[str, AgentStatus] = {}
    for uid, status in answers.statuses.items():
        why = _why_not(job, by_uid[uid], status, newest) if uid in by_uid else ""
        if why:
            unread[uid] = f"the answer of its agent cannot be true: {why}"
        elif uid in by_uid:
            found[uid] = status
    return found, unread


def _why_not(job: TrainingJob, pod: PodView, status: AgentStatus, newest: int) -> str:
    """Why an agent's answer cannot be true; empty if it can."""
    if status.index != pod.index:
        return f"it is of the pod of index {status.index}"
    if not 0 <= status.attempt <= newest + ATTEMPTS_AHEAD:
        return f"its attempt is {status.attempt}, and {newest} is the newest that was given out"
    config, result = job.spec.trainer.config, status.result
    if result is None:
        return ""
    last = config.steps if config is not None else None
    if min(result.step, result.total_steps, result.samples) < 0 or result.save_seconds < 0:
        return "its result has a number below 0"
    if last is not None and max(result.step, result.total_steps) > last:
        return f"its result has a step beyond the last, {last}"
    return ""


def left_result(pods: Iterable[PodView]) -> RunResult | None:
    """What a complete run came to, in the last message of a pod that ended well; None where none left a result.

    A user's own program may have written there whatever it liked.
    """
    for pod in pods:
        if pod.succeeded and pod.last_message:
            with contextlib.suppress(ContractError):
                result = RunResult.from_json(pod.last_message)
                if result.outcome is AgentPhase.COMPLETED and result.total_steps:
                    return result
    return None


def _limits(job: TrainingJob, pod: PodView, rank: int, attempt: int, now: datetime) -> Limits:
    config, model = job.spec.trainer.config, job.spec.model
    bundled = config is not None and model is not None
    return Limits(
        rank=rank,
        attempt=attempt,
        alive_seconds=max(0.0, (now - (pod.started_at or pod.created_at)).total_seconds()),
        total_steps=config.steps if config is not None else None,
        tokens_per_step=job.spec.batch.global_ * shape_of(model).sequence_length
        if bundled and model is not None
        else None,
    )
