"""`catj watch NAME`: follows a job until it ends."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console
from rich.live import Live

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import JobState
from cost_aware_operator.cli.jobs.on_cluster import (
    EXIT_FAILED,
    EXIT_MISSING,
    EXIT_REJECTED,
    EXIT_TIMEOUT,
    add_job,
    key_of,
    on_cluster,
    say,
    status_of,
)
from cost_aware_operator.cli.jobs.views import live, one_line, summary
from cost_aware_operator.engines.cluster import Cluster

LINE_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj watch`."""
    parser.add_argument(
        "--timeout", type=float, default=float("inf"), metavar="SECONDS", help="give up watching after this long"
    )
    add_job(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follows the job; returns the exit status."""
    return on_cluster(lambda cluster, console: watch(cluster, key_of(arguments), arguments.timeout, console))


async def watch(cluster: Cluster, key: JobKey, timeout_seconds: float, console: Console) -> int:
    """Shows a job until it ends or the time is over; returns the exit status.

    Raises:
        ApiError: the API server refused or could not be reached.
    """
    loop = asyncio.get_running_loop()
    began, said_at, said = loop.time(), float("-inf"), ""
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while loop.time() - began < timeout_seconds:
            status = await status_of(cluster, key)
            if status is None:
                say(console, f"{key}: there is no such job")
                return EXIT_MISSING
            if status.state in (JobState.SUCCEEDED, JobState.FAILED):
                screen.update("", refresh=True)
                say(console, summary(key, status))
                return 0 if status.state is JobState.SUCCEEDED else EXIT_FAILED
            if status.state is JobState.REJECTED:
                say(console, one_line(key, status))
                return EXIT_REJECTED
            if console.is_terminal:
                screen.update(live(key, status), refresh=True)
            elif (line := one_line(key, status)) != said and loop.time() - said_at >= LINE_SECONDS:
                say(console, line)
                said, said_at = line, loop.time()
            await asyncio.sleep(1.0)
    say(console, f"{key}: not finished after {timeout_seconds:.0f} s")
    return EXIT_TIMEOUT
