"""A job's status as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import JobState, JobStatus

_STYLES = {
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.REJECTED: "bold red",
    JobState.RUNNING: "green",
    JobState.RESTARTING: "yellow",
    JobState.SUSPENDED: "yellow",
}


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def one_line(key: JobKey, status: JobStatus) -> str:
    """The status in one line, for output that is not a terminal."""
    parts = [f"{key} {status.state.value}"]
    if status.progress is not None:
        parts.append(f"step {status.progress.step}/{status.progress.total_steps} ({status.progress.percent:.0f} %)")
        parts.append(f"loss {_number(status.progress.loss, '.3f')}")
        parts.append(f"held-out {_number(status.progress.heldout_loss, '.3f')}")
        if status.progress.tokens_per_second:
            parts.append(f"{status.progress.tokens_per_second:,.0f} tokens/s")
    if status.efficiency is not None:
        parts.append(f"efficiency {status.efficiency.current:.0%}")
    if status.cost is not None:
        parts.append(f"{status.cost.spent} spent")
        if status.cost.savings is not None:
            parts.append(f"${status.cost.savings.usd:,.4f} saved")
    if status.state is not JobState.RUNNING and status.message:
        parts.append(status.message)
    return " · ".join(parts)


def live(key: JobKey, status: JobStatus) -> RenderableType:
    """The status as a progress bar and a few lines, for a terminal."""
    progress, cost = status.progress, status.cost
    bar = Progress(
        TextColumn(f"{key}"),
        BarColumn(bar_width=40),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[eta]}"),
    )
    remaining = progress.estimated_remaining_seconds if progress is not None else None
    bar.add_task(
        "",
        total=100.0,
        completed=round(progress.percent) if progress is not None else 0,
        eta=f"{remaining:,.0f} s left" if remaining else "",
    )
    table = Table.grid(padding=(0, 2))
    table.add_row("state", Text(status.state.value, style=_STYLES.get(status.state, "")), status.message)
    if status.plan is not None:
        table.add_row(
            "plan",
            f"{status.plan.degrees}",
            f"data x tensor x pipeline on {status.plan.nodes} nodes, attempt {status.attempt}",
        )
    if progress is not None:
        table.add_row(
            "step",
            f"{progress.step} of {progress.total_steps}",
            f"{_number(progress.tokens_per_second, ',.0f')} tokens/s",
        )
        table.add_row(
            "loss", _number(progress.loss, ".4f"), f"held-out {_number(progress.heldout_loss, '.4f')} nats per token"
        )
    if status.efficiency is not None:
        e = status.efficiency
        table.add_row(
            "efficiency",
            f"{e.current:.0%}",
            f"communication {e.communication:.0%}, data {e.data:.0%}, checkpoint {e.checkpoint:.0%}, evaluation {e.evaluation:.0%}"
            + (f", MFU {e.mfu:.0%}" if e.mfu is not None else ""),
        )
    if status.goodput is not None:
        g = status.goodput
        table.add_row(
            "goodput",
            f"{g.productive:.0%}",
            f"of all paid time; restarts {g.restart:.0%}, lost work {g.lost_work:.0%}, idle {g.idle:.0%}",
        )
    if cost is not None:
        projected = f", {_number(cost.projected_usd, ',.4f')} projected" if cost.projected_usd is not None else ""
        if cost.savings is not None:
            table.add_row("saved", f"${cost.savings.usd:,.4f}", f"against {cost.savings.counterfactual}")
        table.add_row("dollars", cost.spent, f"{_number(cost.hourly_usd, ',.2f')} an hour{projected}")
    return Group(bar, table)


def summary(key: JobKey, status: JobStatus) -> str:
    """Summary of a finished job: what it did and cost, and where to look next."""
    lines = [f"{key}: {status.state.value}. {status.message}"]
    progress, cost = status.progress, status.cost
    if progress is not None:
        lines.append(f"  steps           {progress.step} of {progress.total_steps}, {progress.tokens:,} tokens")
        lines.append(f"  final loss      {_number(progress.loss, '.4f')} nats per token")
        lines.append(f"  held-out loss   {_number(progress.heldout_loss, '.4f')} nats per token")
        if progress.samples_checksum:
            lines.append(f"  samples         checksum {progress.samples_checksum}")
    if status.plan is not None:
        lines.append(f"  plan            {status.plan.degrees} (data x tensor x pipeline) on {status.plan.nodes} nodes")
    lines.append(f"  attempts        {status.attempt}")
    for change in status.adjustments:
        realised = f", ${change.realised_savings_usd:,.4g} realised" if change.realised_savings_usd is not None else ""
        lines.append(
            f"  {change.kind.lower():<15} {change.from_} -> {change.to}: ${change.predicted_savings_usd:,.4g} predicted{realised} "
            f"({change.outcome})"
        )
    if status.start_time is not None and status.completion_time is not None:
        lines.append(
            f"  duration        {(status.completion_time - status.start_time).total_seconds():.0f} s from the first attempt"
        )
    if cost is not None:
        lines.append(
            f"  dollars         {cost.spent} for {cost.pod_seconds:,.0f} pod-seconds ({cost.price_source}, {cost.price_as_of})"
        )
        for cause, usd in cost.by_cause.model_dump().items():
            share = usd / cost.accrued_usd if cost.accrued_usd else 0.0
            lines.append(f"    {cause:<15}${usd:,.4f}  {share:6.1%}")
        lines.append(f"    and about ${cost.transfer_usd:,.4f} for bytes between zones")
        lines.append(f"    ${cost.total_usd:,.4f} with storage and control plane, by block:")
        for block, usd in cost.by_block.model_dump().items():
            lines.append(f"    {block:<15}${usd:,.4f}  {usd / cost.total_usd if cost.total_usd else 0.0:6.1%}")
        if cost.savings is not None:
            lines.append(f"  saved           ${cost.savings.usd:,.4f} against {cost.savings.counterfactual}")
        if cost.per_million_tokens_usd is not None:
            lines.append(f"    ${cost.per_million_tokens_usd:,.4f} per million tokens")
    lines.append("  look next at")
    lines.append(f"    kubectl describe catj {key.name} -n {key.namespace}        conditions, plan, events")
    lines.append(f"    kubectl logs -n {key.namespace} -l costaware.dev/job={key.name} --tail=20")
    lines.append(f"    kubectl get catj -n {key.namespace} -o wide")
    return "\n".join(lines)
