"""`catj explain JOB.yaml`: the arithmetic of one plan, line by line, with formulas and sources."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from cost_aware_operator.cli.manifest import ManifestError
from cost_aware_operator.cli.plan import WIDE, add_manifest, complain, searched
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.tables.prices import PriceError
from cost_aware_operator.planning import report
from cost_aware_operator.planning.arithmetic import Section, arithmetic
from cost_aware_operator.planning.space import PlanError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj explain`."""
    add_manifest(parser)
    parser.add_argument("--rank", type=int, default=1, metavar="N", help="which plan of `catj plan` (1, the best)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the arithmetic; returns the exit status."""
    return explain(arguments.file, arguments.rank, arguments.prices)


def explain(file: str, rank: int, prices: str | None) -> int:
    """Prints the arithmetic of the plan at a rank of the ranking; returns the exit status."""
    if rank < 1:
        return complain(file, ValueError(f"--rank: {rank} is less than 1: write 1 for the best plan"))
    try:
        space, ranking = searched(file, prices)
        plans = report.ranked(ranking, rank)
        if len(plans) < rank:
            raise PlanError("NoPlan", f"--rank: there are {len(plans)} plans of different degrees: write {len(plans)}")
        chosen = plans[rank - 1]
        sections = arithmetic(ranking, chosen)
    except (ManifestError, PlanError, PriceError, AnalysisError) as error:
        return complain(file, error)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    layout = chosen.layout
    head = (
        f"Plan {rank}: {chosen.nodes} x {chosen.offer}, data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}, "
        f"micro-batch {layout.micro_batch}, {layout.sharding}, {layout.recompute} recompute, {layout.precision}"
    )
    console.print(head, style="bold", highlight=False)
    if chosen.why_not:
        console.print(f"Not the best: {chosen.why_not}", highlight=False)
    for section in sections:
        _print(console, section)
    for name, price in space.prices.items():
        if name == chosen.offer:
            console.print(f"Price of {name}: {price.source}, as of {price.as_of}", highlight=False)
    return 0


def _print(console: Console, section: Section) -> None:
    table = Table(title=section.title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(min_width=30)
    table.add_column(justify="right", min_width=16)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for line in section.lines:
        table.add_row(line.what, line.value, line.how, line.source)
    console.print()
    console.print(table, highlight=False)
