"""`catj plan JOB.yaml`: nodes, degrees and cost of a job, with no GPU and no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cost_aware_operator.cli.commands import what_is_missing
from cost_aware_operator.cli.foresee.manifest import ManifestError, read_spec
from cost_aware_operator.cli.foresee.plan_table import print_plans
from cost_aware_operator.cli.screen import console
from cost_aware_operator.costs.checks import AnalysisError
from cost_aware_operator.costs.search.three_d import Ranking, ThreeDParallelCostAnalyzer
from cost_aware_operator.costs.tables.price_files import load_prices
from cost_aware_operator.costs.tables.prices import PriceBook, PriceError, shipped
from cost_aware_operator.planning import report
from cost_aware_operator.planning.space import PlanError, Space, space_of


def add_manifest(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all commands about a manifest share."""
    parser.add_argument("file", metavar="JOB.yaml", help="a CostAwareTrainingJob manifest; - reads standard input")
    parser.add_argument(
        "--prices",
        metavar="FILE",
        help="prices that override the shipped ones: our JSON, a SkyPilot catalog or an OpenCost custom-pricing CSV",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj plan`."""
    add_manifest(parser)
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many plans of different degrees (10)")
    parser.add_argument("--pareto", metavar="OUT.png", help="draw dollars against time of every feasible plan")


def run(arguments: argparse.Namespace) -> int:
    """Prints the ranking; returns the exit status."""
    return plan(arguments.file, arguments.output, arguments.top, arguments.pareto, arguments.prices)


def book_of(prices: str | None) -> PriceBook:
    """The shipped price book, under a file's prices where one is named.

    Raises:
        PriceError: see `load_prices`.
    """
    return shipped() if prices is None else load_prices(Path(prices))


def searched(file: str, prices: str | None) -> tuple[Space, Ranking]:
    """The ranking of a manifest's plans.

    Raises:
        ManifestError, PlanError, PriceError, AnalysisError: what is wrong, where, and what to write instead.
    """
    spec = read_spec(file)
    space = space_of(spec, book_of(prices))
    try:
        ranking = ThreeDParallelCostAnalyzer().search(space.work, space.offers, space.bounds, space.objective)
    except AnalysisError as error:
        raise PlanError("NoPlan", f"spec.{error}") from None
    if not len(ranking.columns):
        reason, message = report.nothing_fits(ranking)
        raise PlanError(reason, message or report.no_memory(space, ranking))
    return space, ranking


def complain(file: str, error: Exception) -> int:
    """Prints what is wrong with an input; returns the exit status."""
    for line in str(error).splitlines():
        print(f"catj: {file}: {line}", file=sys.stderr)
    return 2


def plan(file: str, output: str, top: int, pareto: str | None, prices: str | None) -> int:
    """Prints the ranking; returns the exit status."""
    if top < 1:
        return complain(file, ValueError(f"--top: {top} is less than 1: write 1 or more"))
    try:
        space, ranking = searched(file, prices)
        plans = report.ranked(ranking, top)
        answer = report.needs_more_than_one_node(space, ranking)
        if pareto is not None:
            from cost_aware_operator.cli.foresee.pareto import draw

            draw(ranking, pareto)
    except (ManifestError, PlanError, PriceError, AnalysisError, OSError) as error:
        return complain(file, error)
    except ModuleNotFoundError as error:
        return complain(file, ValueError(f"--pareto {what_is_missing(error)}"))
    document = _document(space, ranking, plans, answer)
    if output == "json":
        print(json.dumps(document, indent=2, allow_nan=False))
    elif output == "yaml":
        print(yaml.safe_dump(document, sort_keys=False, width=120), end="")
    else:
        print_plans(console(), space, ranking, plans, answer)
    return 0


def _document(space: Space, ranking: Ranking, plans: list[report.RankedPlan], answer: str) -> dict[str, Any]:
    columns = ranking.columns
    return {
        "answer": answer,
        "objective": space.objective.value,
        "feasible": len(columns),
        "combinations": ranking.combinations,
        "plans": [_entry(one) for one in plans],
        "pareto": [
            {
                "usd": round(float(columns.usd[row]), 4),
                "hours": round(float(columns.hours[row]), 6),
                "nodes": int(columns.nodes[row]),
                "instance_type": ranking.offer(row).name,
                "data": int(columns.data[row]),
                "tensor": int(columns.tensor[row]),
                "pipeline": int(columns.pipeline[row]),
            }
            for row in ranking.pareto()
        ],
        "ruled_out": report.ruled_out(ranking),
        "prices": {
            name: {"hourly_usd": p.hourly_usd, "source": p.source, "as_of": p.as_of} for name, p in space.prices.items()
        },
        "notes": list(space.notes),
    }


def _entry(one: report.RankedPlan) -> dict[str, Any]:
    layout = one.layout
    shares = one.cost.shares
    blocks = {
        name: {"usd": round(getattr(one.cost, f"{name}_usd"), 4), "share": round(shares[name], 6)} for name in shares
    }
    return {
        "rank": one.rank,
        "instance_type": one.offer,
        "nodes": one.nodes,
        "data": layout.data,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "micro_batch": layout.micro_batch,
        "sharding": layout.sharding.value,
        "recompute": layout.recompute.value,
        "schedule": one.schedule,
        "interleave": layout.interleave,
        "stage_layers": list(one.stage_layers),
        "placement": one.placement,
        "precision": layout.precision.value,
        "step_seconds": one.prediction.step_seconds,
        "memory_gib": one.prediction.memory_gib,
        "hourly_usd": one.hourly_usd,
        "hours": one.hours,
        "usd": one.usd,
        "efficiency": one.efficiency,
        "bubble": one.bubble_share,
        "communication": one.communication_share,
        "goodput": one.goodput,
        "tflops_per_gpu": one.prediction.tflops_per_gpu,
        "breakdown": asdict(one.prediction.breakdown),
        "memory_breakdown": asdict(one.prediction.memory),
        "cost": blocks,
        "why_not": one.why_not,
    }
