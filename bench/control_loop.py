"""What the operator's core costs: one decision and one scrape, by the number of pods.

    python bench/control_loop.py

Prints medians, and the ratio to the smallest job: the shape (linear in pods) is what counts, seconds depend on the machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.operator.factories import START, agent, child, facts, job, pod

from cost_aware_operator.control.policy.decide import decide
from cost_aware_operator.control.reading.run_record import RunRecord, to_data
from cost_aware_operator.observing.samples import RankSample, Scrape, parse_rank
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase, Metric, Phase

SIZES = (2, 16, 128, 1024)


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


def world(nodes: int):
    given = job(nodes={"min": nodes, "max": nodes}, batch={"global": nodes})
    pods = tuple(pod(i) for i in range(nodes))
    scrapes = tuple(Scrape(at, tuple(sample(i, at) for i in range(nodes))) for at in (10.0, 20.0, 30.0))
    record = RunRecord(attempt=1, attempt_at=START, members={p.index: p.uid for p in pods}, started_at=START)
    return facts(
        given,
        30.0,
        child=child(given),
        pods=pods,
        nodes={p.node: NodeView(p.node, "p3.2xlarge", f"zone-{p.index % 3}", False) for p in pods if p.node},
        agents={p.uid: agent(p.index, AgentPhase.RUNNING) for p in pods},
        samples={p.uid: (sample(p.index, 30.0),) for p in pods},
        scrapes=scrapes,
        record=record,
    )


def exposition() -> str:
    labels = 'namespace="n",job="j",attempt="1",rank="0"'
    labelled = {Metric.PHASE_SECONDS, Metric.LINK_LATENCY, Metric.LINK_BANDWIDTH, Metric.RECONFIGURATION_SECONDS}
    lines = [f"{m.value}{{{labels}}} 1.0" for m in Metric if m not in labelled]
    lines += [f'{Metric.PHASE_SECONDS.value}{{{labels},phase="{p.value}"}} 1.0' for p in Phase]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = exposition()
    print(f"parse one rank's metrics   {median_ms(lambda: parse_rank(text), 200):8.3f} ms")
    print(f"{'pods':>6} {'decide ms':>10} {'a pod, to 2':>12} {'record KiB':>11}")
    first = 0.0
    for nodes in SIZES:
        given = world(nodes)
        record = decide(given).record
        steady = replace(given, record=record)
        took = median_ms(lambda steady=steady: decide(steady), 50 if nodes < 1000 else 10)
        first = first or took / nodes
        size = sum(len(v) for v in to_data(record, None, None).values()) / 1024
        print(f"{nodes:>6} {took:>10.2f} {took / nodes / first:>12.2f} {size:>11.1f}")


if __name__ == "__main__":
    main()
