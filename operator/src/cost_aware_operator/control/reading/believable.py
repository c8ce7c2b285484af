"""Which of the ranks' answers can be believed, and what they left in writing. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from datetime import datetime

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.observing.validity import Limits, why_refused
from cost_aware_operator.planning.presets import shape_of
from cost_aware_operator.sources.metrics_source import Answers, rank_name
from cost_aware_operator.workload.views import PodView
from cost_aware_trainer.contract import AgentPhase, ContractError, RunResult

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
