"""`catj events NAME`: what happened to a job, the oldest first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cost_aware_operator.cli.jobs.listing import text_of
from cost_aware_operator.cli.jobs.on_cluster import EXIT_MISSING, add_job, as_user, key_of
from cost_aware_operator.cli.screen import console, is_narrow
from cost_aware_operator.engines.user import UserCluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj events`."""
    add_job(parser)
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")


def run(arguments: argparse.Namespace) -> int:
    """Prints the events; returns the exit status."""

    async def work(cluster: UserCluster) -> int:
        key = key_of(arguments)
        found = await cluster.events(key)
        if not found and await cluster.job(key) is None:
            print(f"{key}: there is no such job")
            return EXIT_MISSING
        if arguments.output == "table":
            print_events(found)
        else:
            print(text_of(found, arguments.output), end="")
        return 0

    return as_user(work)


def print_events(events: Sequence[dict[str, Any]]) -> None:
    """Prints events with time, reason and message; on a narrow screen the message stands below."""
    screen = console()
    if is_narrow(screen):
        for event in events:
            screen.print(Text(f"{_time(event)}  {event['reason']}", style=_style(event)))
            screen.print(Padding(Text(str(event["message"])), (0, 0, 0, 4)))
        return
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("time", "reason"):
        table.add_column(name, no_wrap=True)
    table.add_column("message", overflow="fold")
    for event in events:
        table.add_row(_time(event), Text(event["reason"], style=_style(event)), Text(str(event["message"])))
    screen.print(table)


def _time(event: dict[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event["metadata"].get("creationTimestamp") or "-")


def _style(event: dict[str, Any]) -> str:
    return "yellow" if event.get("type") == "Warning" else ""
