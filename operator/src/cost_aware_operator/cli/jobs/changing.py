"""`catj suspend`, `resume` and `delete`: what a person does with a job that is there."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.cli.jobs.on_cluster import EXIT_MISSING, add_job, as_user, key_of
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.user import UserCluster

Change = Callable[[UserCluster, JobKey], Awaitable[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the three commands."""
    add_job(parser)


def run(arguments: argparse.Namespace) -> int:
    """Changes the job; returns the exit status."""
    return as_user(lambda cluster: change(cluster, key_of(arguments), arguments.verb))


async def change(cluster: UserCluster, key: JobKey, verb: str) -> int:
    """Does what the verb says to a job, and says so; returns the exit status."""
    try:
        print(f"{key}: {await _CHANGES[verb](cluster, key)}")
    except ApiError as error:
        if error.status != 404:
            raise
        print(f"{key}: there is no such job")
        return EXIT_MISSING
    return 0


async def _suspend(cluster: UserCluster, key: JobKey) -> str:
    await cluster.set_suspended(key, suspended=True)
    return "is being suspended: its pods save a checkpoint and end; `catj resume` goes on from it"


async def _resume(cluster: UserCluster, key: JobKey) -> str:
    await cluster.set_suspended(key, suspended=False)
    return "goes on from its newest checkpoint"


async def _delete(cluster: UserCluster, key: JobKey) -> str:
    await cluster.remove(key)
    return "is deleted; its checkpoints stay on the volume, and its bill in `catj costs --closed`"


_CHANGES: dict[str, Change] = {"suspend": _suspend, "resume": _resume, "delete": _delete}
