"""Which jobs write their checkpoints to one folder, by their manifests."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.workload.names import checkpoint_folder


@dataclass(frozen=True)
class LivingJob:
    """A job that is known and has not ended."""

    job: TrainingJob
    """The job."""
    has_begun: bool
    """Whether it has had an attempt."""


def folder_of(job: TrainingJob) -> tuple[str, str, str]:
    """Namespace, claim and folder of a job's checkpoints, however the folder is spelled."""
    folder = posixpath.normpath(checkpoint_folder(job))
    return job.key.namespace, job.spec.checkpoint.volume, folder


def folder_taken(mine: LivingJob, others: Iterable[LivingJob]) -> str:
    """Says that another living job has this one's folder; empty where none has.

    Of two jobs the one that has begun has it, or else the one that was made first.
    """
    folder, rank = folder_of(mine.job), (not mine.has_begun, mine.job.created_at, mine.job.uid)
    for other in others:
        is_before = (not other.has_begun, other.job.created_at, other.job.uid) < rank
        if other.job.uid != mine.job.uid and is_before and folder_of(other.job) == folder:
            return (
                f"spec.checkpoint.folder: {folder[2].removeprefix('/checkpoints/')!r} on volume {folder[1]!r} is the folder of job "
                f"{other.job.key.name!r}, which has not ended: write another folder, or delete that job first to go on with its run"
            )
    return ""
