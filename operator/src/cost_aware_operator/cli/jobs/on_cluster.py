"""What commands about jobs on a cluster share."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

from rich.console import Console

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import JobStatus
from cost_aware_operator.engines.cluster import ApiError, Cluster
from cost_aware_operator.engines.kubernetes.client import connect, default_namespace
from cost_aware_operator.engines.kubernetes.user import KubernetesUser

EXIT_FAILED, EXIT_REJECTED, EXIT_MISSING, EXIT_TIMEOUT = 1, 2, 3, 4


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a job."""
    parser.add_argument("name", help="the job's name")
    parser.add_argument("-n", "--namespace", help="its namespace (default: the kubeconfig's)")


def key_of(arguments: argparse.Namespace) -> JobKey:
    """The job that the arguments name."""
    return JobKey(arguments.namespace or default_namespace(), arguments.name)


async def status_of(cluster: Cluster, key: JobKey) -> JobStatus | None:
    """A job's status; None where there is no such job."""
    document = await cluster.training_job(key)
    return None if document is None else JobStatus.model_validate(document.get("status") or {})


def say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def on_cluster(work: Callable[[Cluster, Console], Awaitable[int]]) -> int:
    """Does work with the cluster of the kubeconfig; returns its exit status, or that of a cluster that does not answer."""
    return as_user(lambda cluster: work(cluster, Console()))


def as_user(work: Callable[[KubernetesUser], Awaitable[int]]) -> int:
    """Does a person's work on the cluster of the kubeconfig; returns its exit status, or that of a refusal."""

    async def connected() -> int:
        try:
            api = await connect()
            try:
                return await work(KubernetesUser(api))
            finally:
                await api.close()
        except ApiError as error:
            print(f"catj: {error}", file=sys.stderr)
            return EXIT_MISSING

    return asyncio.run(connected())
