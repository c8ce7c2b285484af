"""What the operator's core costs: one decision and one scrape, by the number of pods.

    python bench/control_loop.py [--largest PODS]

Prints medians, and the ratio to the smallest job: the shape (linear in pods) is what counts, seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.control.policy.decide import decide
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord, to_data
from cost_aware_operator.control.status.outcome import told
from cost_aware_operator.costs.tables.prices import shipped
from cost_aware_operator.observing.samples import RankSample, Scrape, parse_rank
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.job import template_hash
from cost_aware_operator.workload.views import ChildJobView, NodeView, PodView
from cost_aware_trainer.contract import AgentPhase, AgentStatus, Metric, Phase

ROOT = Path(__file__).resolve().parents[1]
START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SIZES = (2, 16, 128, 1024)


def reconciled(facts: Facts) -> RunRecord:
    """Everything of a reconcile that is no input or output; what it remembers."""
    reading = Reading(facts)
    decision = decide(reading)
    told(reading, decision)
    return decision.record


def median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def sample(rank: int, seconds: float) -> RankSample:
    phases = {phase: seconds / len(Phase) for phase in Phase}
    return RankSample(rank, 1, step=int(seconds), total_steps=10**6, steps=seconds, tokens=seconds, step_seconds=seconds,
                      resumed_step=0, phase_seconds=phases)  # fmt: skip


def world(nodes: int) -> Facts:
    """The example's run on so many nodes, half a minute after its start: every pod runs and was scraped three times."""
    document = yaml.safe_load((ROOT / "examples/byte-gpt.yaml").read_text())
    document["metadata"] |= {"namespace": "team", "uid": "uid", "generation": 1, "creationTimestamp": START.isoformat()}
    del document["spec"]["budget"]
    document["spec"] |= {"batch": {"global": nodes}, "nodes": {"min": nodes, "max": nodes}}
    job, prices = TrainingJob.parse(document), shipped()
    plan = make_plan(PlanInput(job.spec, prices))
    assert isinstance(plan, Plan), plan
    pods = tuple(
        PodView(f"gpt-{i}", f"pod-{i}", i, f"10.0.{i // 256}.{i % 256}", f"node-{i}", "Running", START, START, None,
                deleting=False, running=True)
        for i in range(nodes)
    )  # fmt: skip
    return Facts(
        job=job,
        now=START + timedelta(seconds=30),
        child=ChildJobView("child", False, template_hash(job, plan), False, False, None, START, START),
        pods=pods,
        departed=(),
        nodes={
            f"node-{p.index}": NodeView(f"node-{p.index}", "p3.2xlarge", f"zone-{p.index % 3}", False) for p in pods
        },
        record=RunRecord(attempt=1, attempt_at=START, members={p.index: p.uid for p in pods}, started_at=START),
        order=None,
        result=None,
        prices=prices,
        defaults=PodDefaults(),
        agents={
            p.uid: AgentStatus(version=1, pod=p.name, index=p.index, attempt=1, phase=AgentPhase.RUNNING) for p in pods
        },
        samples={p.uid: (sample(p.index, 30.0),) for p in pods},
        scrapes=tuple(Scrape(at, tuple(sample(i, at) for i in range(nodes))) for at in (10.0, 20.0, 30.0)),
    )


def exposition() -> str:
    labels = 'namespace="n",job="j",attempt="1",rank="0"'
    labelled = {Metric.PHASE_SECONDS, Metric.LINK_LATENCY, Metric.LINK_BANDWIDTH, Metric.RECONFIGURATION_SECONDS}
    lines = [f"{m.value}{{{labels}}} 1.0" for m in Metric if m not in labelled]
    lines += [f'{Metric.PHASE_SECONDS.value}{{{labels},phase="{p.value}"}} 1.0' for p in Phase]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=max(SIZES), metavar="PODS")
    largest = parser.parse_args().largest
    text = exposition()
    print(f"parse one rank's metrics   {median_ms(lambda: parse_rank(text), 200):8.3f} ms")
    print(f"{'pods':>6} {'decide ms':>10} {'a pod, to 2':>12} {'record KiB':>11}")
    first = 0.0
    for nodes in (size for size in SIZES if size <= largest):
        given = world(nodes)
        record = reconciled(given)
        steady = replace(given, record=record)
        took = median_ms(lambda steady=steady: reconciled(steady), 50 if nodes < 1000 else 10)
        first = first or took / nodes
        size = sum(len(v) for v in to_data(record, None, None).values()) / 1024
        print(f"{nodes:>6} {took:>10.2f} {took / nodes / first:>12.2f} {size:>11.1f}")


if __name__ == "__main__":
    main()
