"""`catj explain JOB.yaml`: the arithmetic of one plan, line by line, with formulas and sources."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cost_aware_operator.cli.foresee.manifest import ManifestError
from cost_aware_operator.cli.foresee.plan import add_manifest, complain, searched
from cost_aware_operator.cli.screen import console, is_narrow
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
    screen = console()
    layout = chosen.layout
    head = (
        f"Plan {rank}: {chosen.nodes} x {chosen.offer}, data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}, "
        f"micro-batch {layout.micro_batch}, {layout.sharding}, {layout.recompute} recompute, {layout.precision}"
    )
    screen.print(head, style="bold", highlight=False)
    if chosen.why_not:
        screen.print(f"Not the best: {chosen.why_not}", highlight=False)
    for section in sections:
        _print(screen, section)
    for name, price in space.prices.items():
        if name == chosen.offer:
            screen.print(f"Price of {name}: {price.source}, as of {price.as_of}", highlight=False)
    return 0


def _print(screen: Console, section: Section) -> None:
    """Prints a section as a table, or, where there is no room for four columns, with formula and source below each value."""
    screen.print()
    if not is_narrow(screen):
        table = Table(title=section.title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(min_width=30)
        table.add_column(justify="right", min_width=16)
        table.add_column(overflow="fold")
        table.add_column(style="dim", overflow="fold")
        for line in section.lines:
            table.add_row(line.what, line.value, line.how, line.source)
        screen.print(table, highlight=False)
        return
    screen.print(section.title, style="bold", highlight=False, markup=False)
    for line in section.lines:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(overflow="fold", ratio=1)
        table.add_column(justify="right", overflow="fold")
        table.add_row(Text(line.what), Text(line.value))
        screen.print(table, highlight=False)
        for text in (line.how, line.source):
            if text:
                screen.print(Padding(Text(text, style="dim", overflow="fold"), (0, 0, 0, 4)), highlight=False)
