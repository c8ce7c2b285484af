"""`catj simulate JOB.yaml`: what the adjuster would do with a job on machines that differ from the tables."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from rich.box import HEAVY_HEAD
from rich.table import Table

from cost_aware_operator.adjusting.changes import described
from cost_aware_operator.adjusting.simulate import Absence, SimulatedRun, World, gone, simulate
from cost_aware_operator.adjusting.situation import AdjustSettings
from cost_aware_operator.api.spec import AdjustPolicy, JobSpec
from cost_aware_operator.cli.foresee.manifest import ManifestError, read_spec
from cost_aware_operator.cli.foresee.plan import add_manifest, book_of, complain
from cost_aware_operator.cli.screen import console, is_narrow
from cost_aware_operator.costs.tables.prices import PriceError
from cost_aware_operator.planning.plan import Plan, PlanInput, Refusal, adjusting_space, make_plan

RANGES = (
    ("compute", 1e-3, 1e3), ("network", 1e-3, 1e3), ("noise", 0.0, 1.0), ("straggler", 1.0, 1e3), ("spare-nodes", 0, 1e4),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj simulate`, which describe the simulated world."""
    add_manifest(parser)
    parser.add_argument(
        "--compute", type=float, default=1.0, metavar="X", help="arithmetic at so many times the listed rate"
    )
    parser.add_argument(
        "--network", type=float, default=1.0, metavar="X", help="the network at so many times the listed rate"
    )
    parser.add_argument("--noise", type=float, default=0.02, metavar="SHARE", help="spread of a measured window (0.02)")
    parser.add_argument(
        "--straggler", type=float, default=1.0, metavar="X", help="one node takes so many times as long as the others"
    )
    parser.add_argument(
        "--spare-nodes", type=int, default=0, metavar="N", help="nodes beyond those that the run starts on"
    )
    parser.add_argument(
        "--spot",
        type=absence,
        action="append",
        default=[],
        metavar="NODES:FROM:TO",
        help="so many nodes are gone between two seconds of the run; may be given again",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise")


def absence(text: str) -> Absence:
    """Reads NODES:FROM:TO.

    Raises:
        ArgumentTypeError: it is something else.
    """
    try:
        nodes, begin, end = text.split(":")
        found = Absence(int(nodes), float(begin), float(end))
    except ValueError:
        found = Absence(0, 0.0, 0.0)
    if found.nodes < 1 or not 0 <= found.begin_seconds < found.end_seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NODES:FROM:TO: write for example 1:3600:7200, one node gone from second 3600 to 7200"
        )
    return found


def run(arguments: argparse.Namespace) -> int:
    """Prints the run with and without the adjuster; returns the exit status."""
    file = arguments.file
    for name, least, most in RANGES:
        value = getattr(arguments, name.replace("-", "_"))
        if not least <= value <= most:
            return complain(
                file,
                ValueError(
                    f"--{name}: {value} is not from {least:g} to {most:g}: write {min(max(value, least), most):g}"
                ),
            )
    try:
        spec = read_spec(file)
        given = PlanInput(spec, book_of(arguments.prices))
        plan, space = make_plan(given), adjusting_space(given)
    except (ManifestError, PriceError) as error:
        return complain(file, error)
    if isinstance(plan, Refusal):
        return complain(file, ValueError(plan.message))
    if space is None:
        return complain(
            file, ValueError("spec.model, spec.nodes.instanceTypes: are needed for a prediction: write both")
        )
    world = World(
        arguments.compute,
        arguments.network,
        arguments.noise,
        straggler=arguments.straggler,
        spare_nodes=arguments.spare_nodes,
        gone=lambda seconds: gone(arguments.spot, seconds),
    )
    budget = spec.budget.total_usd if spec.budget is not None else None
    off, act = (replace(settings_of(spec), policy=policy) for policy in (AdjustPolicy.OFF, AdjustPolicy.ACT))
    try:
        static, acting = (simulate(space, plan, given, world, arguments.seed, budget) for given in (off, act))
    except ValueError as error:
        return complain(file, error)
    _print(plan, static, acting)
    return 0


def settings_of(spec: JobSpec) -> AdjustSettings:
    """Settings of the adjuster from the manifest's `efficiency`."""
    given = spec.efficiency
    window, cooldown = float(given.window_seconds), float(given.cooldown_seconds)
    return AdjustSettings(given.policy, given.threshold, window, cooldown, given.minimum_savings_usd)


def _print(plan: Plan, static: SimulatedRun, acting: SimulatedRun) -> None:
    screen = console()
    screen.print(f"Submitted: {described(plan)}", highlight=False)
    narrow = is_narrow(screen)
    table = Table(box=None if narrow else HEAVY_HEAD)
    for name in ("", "dollars", "hours", "steps left", "changes", "downtime s", *([] if narrow else ["ends as"])):
        table.add_column(name, justify="left" if name in ("", "ends as") else "right")
    runs = (("as submitted", static), ("with the adjuster", acting))
    for name, one in runs:
        table.add_row(
            name,
            f"{one.usd:,.2f}",
            f"{one.seconds / 3600:,.2f}",
            f"{one.steps_left:,}",
            str(len(one.changes)),
            f"{one.downtime_seconds:.0f}",
            *([] if narrow else [described(one.plan)]),
        )
    screen.print(table)
    for name, one in runs if narrow else ():
        screen.print(f"  {name} it ends as {described(one.plan)}", highlight=False)
    if static.steps_left or acting.steps_left:
        screen.print("The budget is spent before the last step: raise it, or compare the steps that are left.")
    saved = 1 - acting.usd / static.usd
    screen.print(f"{'Saves' if saved >= 0 else 'Loses'} {abs(saved):.1%} of ${static.usd:,.2f}", highlight=False)
    for seconds, verdict in acting.verdicts:
        screen.print(
            f"{seconds:>9,.0f} s  {verdict.action} {verdict.reason}: {verdict.message}", highlight=False, markup=False
        )
