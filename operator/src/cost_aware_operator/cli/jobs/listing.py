"""`catj list`: jobs, their state, progress and dollars."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import yaml
from pydantic import ValidationError
from rich.table import Table

from cost_aware_operator.api.status import JobStatus
from cost_aware_operator.cli.jobs.on_cluster import as_user, say
from cost_aware_operator.cli.screen import console

NARROW = ("job", "state", "step", "loss", "$")
"""Columns that an 80-column terminal has room for."""
WIDE = ("job", "state", "plan", "nodes", "step", "%", "loss", "effic.", "$/h", "$", "saved", "age", "message")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj list`."""
    parser.add_argument("-n", "--namespace", help="jobs of this namespace (default: of all)")
    parser.add_argument("-o", "--output", choices=("table", "wide", "json", "yaml"), default="table")


def run(arguments: argparse.Namespace) -> int:
    """Prints the jobs; returns the exit status."""

    async def work(cluster: Any) -> int:
        documents = await cluster.jobs(arguments.namespace)
        if arguments.output in ("json", "yaml"):
            print(text_of(documents, arguments.output), end="")
        else:
            print_jobs(documents, wide=arguments.output == "wide", now=datetime.now(UTC))
        return 0

    return as_user(work)


def text_of(documents: Sequence[dict[str, Any]], form: str) -> str:
    """A list of the documents as the Kubernetes API has them, in JSON or YAML."""
    whole = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
    return json.dumps(whole, indent=2) + "\n" if form == "json" else yaml.safe_dump(whole, sort_keys=False)


def print_jobs(documents: Sequence[dict[str, Any]], *, wide: bool, now: datetime) -> None:
    """Prints a table of jobs: as many columns as there is room for, or all if asked for."""
    screen = console()
    if not documents:
        say(screen, "there are no jobs")
        return
    names = WIDE if wide or screen.width >= 150 else NARROW
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in names:
        right = name in ("step", "%", "loss", "effic.", "$/h", "$", "saved", "age")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for document in documents:
        cells = _cells(document, now)
        table.add_row(*(cells[name] for name in names))
    screen.print(table, highlight=False, markup=False, crop=not wide)


def _cells(document: dict[str, Any], now: datetime) -> dict[str, str]:
    metadata = document["metadata"]
    cells = dict.fromkeys(WIDE, "-") | {"job": f"{metadata['namespace']}/{metadata['name']}", "message": ""}
    made = datetime.fromisoformat(metadata["creationTimestamp"])
    cells["age"] = age_of((now - made).total_seconds())
    try:
        status = JobStatus.model_validate(document.get("status") or {})
    except ValidationError:
        return cells | {"state": "?", "message": "its status is of another version"}
    cells |= {"state": status.state.value, "message": status.message}
    if status.plan is not None:
        cells |= {"plan": str(status.plan.degrees), "nodes": str(status.plan.nodes)}
    if status.progress is not None:
        progress = status.progress
        cells |= {"step": f"{progress.step:,}/{progress.total_steps:,}", "%": f"{progress.percent:.0f}"}
        cells["loss"] = "-" if progress.loss is None else f"{progress.loss:.4f}"
    if status.efficiency is not None:
        cells["effic."] = f"{status.efficiency.current:.0%}"
    if status.cost is not None:
        cells["$"] = status.cost.spent.removeprefix("$")
        cells["$/h"] = "-" if status.cost.hourly_usd is None else f"{status.cost.hourly_usd:,.2f}"
        if status.cost.savings is not None:
            cells["saved"] = f"{status.cost.savings.usd:,.4f}"
    return cells


def age_of(seconds: float) -> str:
    """A time span in its largest unit: 45s, 12m, 7h, 3d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
