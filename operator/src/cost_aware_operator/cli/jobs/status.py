"""`catj status NAME`: one job, now."""

from __future__ import annotations

import argparse

import yaml
from rich.console import Console

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.cli.jobs.on_cluster import EXIT_MISSING, add_job, key_of, on_cluster, say, status_of
from cost_aware_operator.cli.jobs.views import live, one_line
from cost_aware_operator.engines.cluster import Cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj status`."""
    add_job(parser)
    parser.add_argument("-o", "--output", choices=("text", "json", "yaml"), default="text")


def run(arguments: argparse.Namespace) -> int:
    """Shows the job; returns the exit status."""
    return on_cluster(lambda cluster, console: show(cluster, key_of(arguments), console, arguments.output))


async def show(cluster: Cluster, key: JobKey, console: Console, output: str) -> int:
    """Shows a job once, in a form; returns the exit status.

    Raises:
        ApiError: the API server refused or could not be reached.
    """
    status = await status_of(cluster, key)
    if status is None:
        say(console, f"{key}: there is no such job")
        return EXIT_MISSING
    if output == "json":
        print(status.model_dump_json(by_alias=True, exclude_none=True, indent=2))
    elif output == "yaml":
        document = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        print(yaml.safe_dump(document, sort_keys=False), end="")
    elif console.is_terminal:
        console.print(live(key, status), highlight=False)
    else:
        say(console, one_line(key, status))
    return 0
