"""What the adjuster saves on the cluster: the same run, static and dynamic, from a bad plan and from the best one.

python bench/savings.py [--runs N] [--only TEXT]     (needs make install; writes bench/results/savings.json)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from devtools.cluster import LAST_WORKER, Cluster, Space, manifest, script

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kvHeads": 2, "ffn": 344, "sequenceLength": 128, "vocabulary": 256}
EFFICIENCY = {"threshold": 0.9, "windowSeconds": 10, "cooldownSeconds": 30}
NAMESPACE = "catj-savings"


@dataclass(frozen=True)
class Scenario:
    """A job as somebody might submit it, and the link between its nodes."""

    name: str
    degrees: tuple[int, int, int]
    nodes: tuple[int, int]
    rate: str
    steps: int
    slow_cpus: str = "off"
    together: bool = False
    """Whether both runs share the machine at the same time: what else it does then slows both."""


SCENARIOS = (
    Scenario("pipeline over a slow link", (1, 1, 2), (1, 2), "20mbit", 200),
    Scenario("too many nodes for its size", (2, 1, 1), (1, 2), "20mbit", 100),
    Scenario("a straggler node", (2, 1, 1), (1, 2), "off", 300, slow_cpus="0.2"),
    # a difference of 1 % is less than that between two equal runs one after the other on a machine with other users; and pods'
    # lives are known to whole seconds, of which 1 % must be several
    Scenario("already the best plan", (1, 1, 1), (1, 2), "off", 2500, together=True),
)


def document(scenario: Scenario, name: str, policy: str) -> dict[str, Any]:
    """The job's manifest."""
    degrees = dict(zip(("data", "tensor", "pipeline"), scenario.degrees, strict=True))
    nodes = {"min": scenario.nodes[0], "max": scenario.nodes[1], "instanceTypes": ["p3.2xlarge"]}
    return manifest(
        name,
        model=MODEL,
        batch={"global": 8},
        nodes=nodes,
        parallelism=degrees,
        # at a rate where rounding does not grow: other degrees sum in another order
        trainer={"config": {"steps": scenario.steps, "learningRate": 0.001, "warmupSteps": 50}},
        efficiency={**EFFICIENCY, "policy": policy},
    )


def run(space: Space, scenario: Scenario, policies: dict[str, str]) -> list[dict[str, Any]]:
    """Jobs by name and policy, one after the other or together, to their ends."""
    found = []
    if scenario.together:
        for name, policy in policies.items():
            space.submit(document(scenario, name, policy))
        return [end(space, name) for name in policies]
    for name, policy in policies.items():
        space.submit(document(scenario, name, policy))
        found.append(end(space, name))
    return found


def end(space: Space, name: str) -> dict[str, Any]:
    """One job's final status and its losses."""
    status = space.wait_finished(name, seconds=1500)
    if status["state"] != "Succeeded":
        raise SystemExit(f"{name}: {status['state']}: {status['message']}")
    losses = [entry["loss"] for _, entry in sorted(space.weights_made_by(name).items())]
    return {"status": status, "loss": losses[-1], "samples": status["progress"]["samplesChecksum"]}


def compare(space: Space, scenario: Scenario, number: int) -> dict[str, Any]:
    """Static and dynamic; of two that run together, each is the first to be submitted in turn."""
    slug = scenario.name.replace(" ", "-")[:20]
    script("shape", scenario.rate)
    script("slow", LAST_WORKER, scenario.slow_cpus)
    try:
        policies = {f"static-{slug}-{number}": "Off", f"dynamic-{slug}-{number}": "Act"}
        in_turn = dict(reversed(policies.items())) if scenario.together and number % 2 else policies
        done = dict(zip(in_turn, run(space, scenario, in_turn), strict=True))
        static, dynamic = (done[name] for name in policies)
    finally:
        script("shape", "off")
        script("slow", LAST_WORKER, "off")
    changes = dynamic["status"].get("adjustments", [])
    seconds = {k: v["status"]["cost"]["podSeconds"] for k, v in (("static", static), ("dynamic", dynamic))}
    return {
        "scenario": scenario.name,
        "run": number + 1,
        "static_usd": static["status"]["cost"]["accruedUSD"],
        "dynamic_usd": dynamic["status"]["cost"]["accruedUSD"],
        "static_loss": static["loss"],
        "dynamic_loss": dynamic["loss"],
        "same_samples": static["samples"] == dynamic["samples"],
        "static_pod_seconds": seconds["static"],
        "dynamic_pod_seconds": seconds["dynamic"],
        "decisions": [f"{c['kind']}: {c['from']} -> {c['to']} ({c['outcome']})" for c in changes],
        "downtime_seconds": sum(c.get("downtimeSeconds") or 0.0 for c in changes),
    }


def write(found: list[dict[str, Any]], chosen: list[Scenario]) -> None:
    """Keeps what is measured so far, as all of it takes an hour, beside what was measured of other scenarios before."""
    path = ROOT / "bench/results/savings.json"
    path.parent.mkdir(exist_ok=True)
    names = {scenario.name for scenario in chosen}
    before = json.loads(path.read_text()) if path.exists() else []
    kept = [one for one in before if one["scenario"] not in names]
    path.write_text(json.dumps([*kept, *found], indent=2) + "\n")


def main() -> None:
    """Prints the table and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="scenarios whose name has this in it; what savings.json has of others stays"
    )
    options = parser.parse_args()
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    cluster = Cluster.connect()
    script("volumes", NAMESPACE)
    found = []
    try:
        space = Space(cluster, NAMESPACE)
        for number in range(options.runs):
            for scenario in chosen:
                print(f"▸ {scenario.name}, run {number + 1} of {options.runs}", file=sys.stderr)
                found.append(compare(space, scenario, number))
                print(json.dumps(found[-1]), file=sys.stderr)
                write(found, chosen)
    finally:
        script("forget", NAMESPACE)
    table = Table()
    for column in ("scenario", "static $", "dynamic $", "saved", "losses", "decisions", "downtime s"):
        table.add_column(column)
    for one in found:
        saved = 1 - one["dynamic_usd"] / one["static_usd"]
        losses = f"{one['static_loss']:.4f} {one['dynamic_loss']:.4f}"
        decisions = "\n".join(one["decisions"]) or "none"
        table.add_row(
            one["scenario"],
            f"{one['static_usd']:.4f}",
            f"{one['dynamic_usd']:.4f}",
            f"{saved:.0%}",
            losses,
            decisions,
            f"{one['downtime_seconds']:.1f}",
        )
    console = Console(width=170)
    console.print(table)
    for scenario in chosen:
        rows = [one for one in found if one["scenario"] == scenario.name]
        saved = statistics.median(1 - one["dynamic_usd"] / one["static_usd"] for one in rows)
        apart = max(abs(one["dynamic_loss"] - one["static_loss"]) for one in rows)
        agree = "agree on every decision" if len({tuple(one["decisions"]) for one in rows}) == 1 else "DISAGREE"
        console.print(
            f"{scenario.name}: {len(rows)} runs {agree}; median {saved:.1%} saved; losses at most {apart:.2g} apart",
            highlight=False,
        )


if __name__ == "__main__":
    main()
