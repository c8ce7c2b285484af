"""Scrapes of runs in which some ranks work longer than others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.support.factories.adjusting import planned
from tests.support.factories.facts import BOOK, START, agent, child, decide, facts, job, pod

from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.observing.samples import RankSample, Scrape
from cost_aware_operator.observing.stragglers import StageWorks, stragglers
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_operator.workload.order import run_order
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase, Phase


def scrapes(works: list[list[float]], attempt: int = 1) -> list[Scrape]:
    """Ten seconds and ten steps between two: by interval, the share of a second's step in which each rank computes."""
    count = len(works[0])
    found, total = [Scrape(0.0, tuple(_sample(r, 0, 0.0, attempt) for r in range(count)))], [0.0] * count
    for n, interval in enumerate(works, 1):
        total = [before + 10 * work for before, work in zip(total, interval, strict=True)]
        found.append(Scrape(10.0 * n, tuple(_sample(r, 10 * n, total[r], attempt) for r in range(count))))
    return found


def _sample(rank: int, steps: int, worked: float, attempt: int) -> RankSample:
    phases = {Phase.COMPUTE: worked, Phase.STRAGGLER_WAIT: steps - worked}
    return RankSample(
        rank, attempt, step=steps, total_steps=100_000, steps=steps, tokens=steps, step_seconds=steps, phase_seconds=phases,
        resumed_step=0,
    )  # fmt: skip


def named(works: list[list[float]], stage_ranks: int, estimates: StageWorks = ()) -> list[int]:
    return [s.rank for s in stragglers(scrapes(works), stage_ranks, estimates)]


PLAN, _ = planned(
    parallelism={"data": 4, "tensor": 1, "pipeline": 1}, nodes={"min": 4, "max": 4, "instanceTypes": ["p3.2xlarge"]}
)


GIVEN = job(nodes={"instanceTypes": ["p3.2xlarge"]}, efficiency={"windowSeconds": 20, "cooldownSeconds": 0},
            trainer={"config": {"steps": 100_000}}, template={"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}})  # fmt: skip


NODES = {f"node-{i}": NodeView(f"node-{i}", "p3.2xlarge", None, False) for i in range(3)}


def trained(record: RunRecord, **over: Any) -> Facts:
    """Two pods, the second of which computes twice as long; a third node is free."""
    seen = scrapes([[0.4, 0.8]] * 4, record.attempt)
    values: dict[str, Any] = {
        "pods": (pod(0), pod(1)), "child": child(GIVEN), "record": record, "scrapes": seen, "nodes": NODES,
        "agents": {f"pod-{i}": agent(i, AgentPhase.RUNNING, record.attempt) for i in range(2)},
        "samples": {f"pod-{i}": (seen[-1].ranks[i],) for i in range(2)},
        "cluster_nodes": tuple(NODES.values()),
    }  # fmt: skip
    plan = make_plan(PlanInput(GIVEN.spec, BOOK))
    assert isinstance(plan, Plan)
    return facts(GIVEN, 60.0, **({"order": run_order(GIVEN, plan, record.attempt)} | values | over))


FIRST = RunRecord(attempt=1, attempt_at=START, members={0: "pod-0", 1: "pod-1"}, started_at=START)


def step(given: Facts, decision: Decision, **over: Any) -> tuple[Facts, Decision]:
    """The next reconcile, with what the one before wrote down."""
    after = replace(given, record=decision.record, order=decision.order, now=given.now + timedelta(seconds=5), **over)
    return after, decide(after)
