"""Plans of `catj plan` as tables: with all columns where there is room, else with those that are compared first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from cost_aware_operator.cli.screen import is_narrow
from cost_aware_operator.costs.search.three_d import Ranking
from cost_aware_operator.planning import report
from cost_aware_operator.planning.space import Space


def print_plans(
    console: Console, space: Space, ranking: Ranking, plans: Sequence[report.RankedPlan], answer: str
) -> None:
    """Prints the answer to the first question, the plans, and what they rest on."""
    console.print("Do you need more than one node?", style="bold")
    console.print(Padding(answer, (0, 0, 1, 2)), highlight=False, markup=False)
    best = "fewest dollars" if space.objective.value == "Cost" else "least time"
    title = f"{len(ranking.columns):,} of {ranking.combinations:,} plans are feasible; {best} first"
    if is_narrow(console):
        _print_narrow(console, title, plans)
    else:
        console.print(_wide(title, plans))
    cost = plans[0].cost
    blocks = (f"{name} ${getattr(cost, f'{name}_usd'):,.2f} ({share:.0%})" for name, share in cost.shares.items())
    for line in (
        f"The best plan's dollars: {', '.join(blocks)}",
        *(f"Ruled out: {line}" for line in report.ruled_out(ranking)),
        *(
            f"Price: {name} ${p.hourly_usd:,.4f} a node-hour ({p.source}, {p.as_of})"
            for name, p in space.prices.items()
        ),
        *(f"Note: {note}" for note in space.notes),
    ):
        console.print(line, highlight=False, markup=False)


def _wide(title: str, plans: Sequence[report.RankedPlan]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("#", "nodes", "d x t x p", "micro", "sharding", "recompute", "schedule"):
        table.add_column(name, no_wrap=True)
    for name in ("step s", "GiB", "$/h", "hours", "dollars", "effic.", "bubble", "comm."):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold", min_width=24)
    for one in plans:
        layout = one.layout
        table.add_row(
            str(one.rank),
            f"{one.nodes} x {one.offer}",
            one.degrees,
            str(layout.micro_batch),
            layout.sharding.value,
            layout.recompute.value,
            one.schedule,
            f"{one.prediction.step_seconds:,.3g}",
            f"{one.prediction.memory_gib:,.1f}",
            f"{one.hourly_usd:,.2f}",
            f"{one.hours:,.2f}",
            f"{one.usd:,.2f}",
            f"{one.efficiency:.0%}",
            f"{one.bubble_share:.0%}",
            f"{one.communication_share:.0%}",
            one.why_not or "the best",
        )
    return table


def _print_narrow(console: Console, title: str, plans: Sequence[report.RankedPlan]) -> None:
    """Prints a table of what is compared first, and below it each plan's other choices and why it is not the best."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in ("#", "nodes", "d x t x p", "micro"):
        table.add_column(name, overflow="fold")
    for name in ("step s", "GiB", "hours", "dollars"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in plans:
        table.add_row(
            str(one.rank),
            f"{one.nodes} x {one.offer}",
            one.degrees,
            str(one.layout.micro_batch),
            f"{one.prediction.step_seconds:,.3g}",
            f"{one.prediction.memory_gib:,.1f}",
            f"{one.hours:,.2f}",
            f"{one.usd:,.2f}",
        )
    console.print(table)
    console.print()
    for one in plans:
        layout = one.layout
        choices = ", ".join(
            word
            for word in (
                layout.sharding.value,
                f"recompute {layout.recompute.value}",
                one.schedule if one.schedule != "-" else "",
                f"efficiency {one.efficiency:.0%}",
            )
            if word
        )
        text = f"{one.rank}  {choices}: {one.why_not or 'the best'}"
        console.print(Padding(text, (0, 0, 0, 1)), highlight=False, markup=False)
    console.print()
