"""The command line: `catj watch|status|costs` of jobs on a cluster; `catj plan|explain JOB.yaml`, `catj predict FILE.json` without."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import JobState, JobStatus
from cost_aware_operator.cli import simulate
from cost_aware_operator.cli.costs import add_arguments as add_costs
from cost_aware_operator.cli.costs import costs
from cost_aware_operator.cli.explain import explain
from cost_aware_operator.cli.plan import add_arguments, plan
from cost_aware_operator.cli.predict import predict
from cost_aware_operator.cli.simulate import add_simulation
from cost_aware_operator.cli.views import live, one_line, summary
from cost_aware_operator.engines.cluster import ApiError, Cluster
from cost_aware_operator.engines.kubernetes.client import KubernetesCluster, connect, default_namespace

EXIT_FAILED, EXIT_REJECTED, EXIT_MISSING, EXIT_TIMEOUT = 1, 2, 3, 4
LINE_SECONDS = 5.0


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    result = argparse.ArgumentParser(prog="catj", description="CostAwareTrainingJobs at a glance.")
    verbs = result.add_subparsers(dest="verb", required=True)
    watch = verbs.add_parser("watch", help="follow a job until it ends, then say what it did and cost")
    watch.add_argument(
        "--timeout", type=float, default=float("inf"), metavar="SECONDS", help="give up watching after this long"
    )
    status = verbs.add_parser("status", help="one job's state, progress, efficiency and dollars, now")
    for verb in (watch, status):
        verb.add_argument("name", help="the job's name")
        verb.add_argument("-n", "--namespace", help="its namespace (default: the kubeconfig's)")
    billed = verbs.add_parser("costs", help="bills of jobs, also of those that are gone; their backup")
    add_costs(billed)
    foresee = verbs.add_parser("predict", help="step time and memory of model layouts, with no GPU and no cluster")
    foresee.add_argument(
        "file", metavar="FILE.json", help="a list of objects {model, hardware, layout}; - reads standard input"
    )
    planned = verbs.add_parser("plan", help="what a manifest should run on, in which degrees, and what it will cost")
    add_arguments(planned)
    planned.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    planned.add_argument("--top", type=int, default=10, metavar="N", help="how many plans of different degrees (10)")
    planned.add_argument("--pareto", metavar="OUT.png", help="draw dollars against time of every feasible plan")
    explained = verbs.add_parser("explain", help="the arithmetic of one plan, line by line, with formulas and sources")
    add_arguments(explained)
    explained.add_argument("--rank", type=int, default=1, metavar="N", help="which plan of `catj plan` (1, the best)")
    simulated = verbs.add_parser(
        "simulate", help="what the adjuster would do with a job, on machines that differ from the tables"
    )
    add_simulation(simulated)
    return result


async def _status(cluster: Cluster, key: JobKey) -> JobStatus | None:
    document = await cluster.training_job(key)
    return None if document is None else JobStatus.model_validate(document.get("status") or {})


async def _watch(cluster: Cluster, key: JobKey, timeout_seconds: float, console: Console) -> int:
    loop = asyncio.get_running_loop()
    began, said_at, said = loop.time(), float("-inf"), ""
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while loop.time() - began < timeout_seconds:
            status = await _status(cluster, key)
            if status is None:
                console.print(f"{key}: there is no such job", highlight=False, markup=False)
                return EXIT_MISSING
            if status.state in (JobState.SUCCEEDED, JobState.FAILED):
                screen.update("", refresh=True)
                console.print(summary(key, status), highlight=False, markup=False, soft_wrap=True)
                return 0 if status.state is JobState.SUCCEEDED else EXIT_FAILED
            if status.state is JobState.REJECTED:
                console.print(one_line(key, status), highlight=False, markup=False)
                return EXIT_REJECTED
            if console.is_terminal:
                screen.update(live(key, status), refresh=True)
            elif (line := one_line(key, status)) != said and loop.time() - said_at >= LINE_SECONDS:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
                said, said_at = line, loop.time()
            await asyncio.sleep(1.0)
    console.print(f"{key}: not finished after {timeout_seconds:.0f} s", highlight=False, markup=False)
    return EXIT_TIMEOUT


async def _show(cluster: Cluster, key: JobKey, console: Console) -> int:
    status = await _status(cluster, key)
    if status is None:
        console.print(f"{key}: there is no such job", highlight=False, markup=False)
        return EXIT_MISSING
    console.print(live(key, status) if console.is_terminal else one_line(key, status), highlight=False, markup=False)
    return 0


async def _run(arguments: argparse.Namespace) -> int:
    console = Console()
    try:
        api = await connect()
    except ApiError as error:
        console.print(f"catj: {error}", highlight=False, markup=False)
        return EXIT_MISSING
    try:
        cluster = KubernetesCluster(api)
        if arguments.verb == "costs":
            return await costs(cluster, arguments, console)
        key = JobKey(arguments.namespace or default_namespace(), arguments.name)
        if arguments.verb == "watch":
            return await _watch(cluster, key, arguments.timeout, console)
        return await _show(cluster, key, console)
    except ApiError as error:
        console.print(f"catj: {error}", highlight=False, markup=False)
        return EXIT_MISSING
    finally:
        await api.close()


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point."""
    arguments = parser().parse_args(argv)
    if arguments.verb == "predict":
        sys.exit(predict(arguments.file))
    if arguments.verb == "plan":
        sys.exit(plan(arguments.file, arguments.output, arguments.top, arguments.pareto, arguments.prices))
    if arguments.verb == "simulate":
        sys.exit(simulate.run(arguments))
    if arguments.verb == "explain":
        sys.exit(explain(arguments.file, arguments.rank, arguments.prices))
    try:
        sys.exit(asyncio.run(_run(arguments)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
