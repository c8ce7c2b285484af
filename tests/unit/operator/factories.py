"""Jobs, pods and facts for tests: everything has a sensible default, and a test writes down what it is about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.control.facts import Facts
from cost_aware_operator.control.record import RunRecord
from cost_aware_operator.costs.prices import shipped
from cost_aware_operator.workload.build import template_hash
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.views import ChildJobView, NodeView, PodView
from cost_aware_trainer.contract import AgentPhase, AgentStatus, RunResult

START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
BOOK = shipped()
SPEC: dict[str, Any] = {
    "trainer": {"config": {"steps": 100, "data": {"volume": "data"}}},
    "model": {"preset": "byte-gpt"},
    "batch": {"global": 32},
    "nodes": {"min": 2, "max": 2},
    "checkpoint": {"volume": "checkpoints"},
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        deeper = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if deeper else value
    return result


def job(status: dict[str, Any] | None = None, **spec: Any) -> TrainingJob:
    return TrainingJob.parse(
        {
            "metadata": {
                "name": "gpt",
                "namespace": "team",
                "uid": "11111111-2222-3333-4444-555555555555",
                "generation": 1,
                "creationTimestamp": START.isoformat(),
            },
            "spec": merged(SPEC, spec),
            "status": status or {},
        }
    )


def pod(index: int, uid: str | None = None, **over: Any) -> PodView:
    values: dict[str, Any] = {
        "name": f"gpt-{index}-{uid or 'a'}",
        "uid": uid or f"pod-{index}",
        "index": index,
        "ip": f"10.0.0.{index + 1}",
        "node": f"node-{index}",
        "phase": "Running",
        "created_at": START,
        "started_at": START,
        "ended_at": None,
        "deleting": False,
        "running": True,
    }
    return PodView(**(values | over))


def child(given: TrainingJob, **over: Any) -> ChildJobView:
    from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan

    plan = make_plan(PlanInput(given.spec, BOOK))
    assert isinstance(plan, Plan)
    values: dict[str, Any] = {
        "uid": "child",
        "suspended": False,
        "template_hash": template_hash(given, plan),
        "deleting": False,
        "complete": False,
        "failure": None,
        "started_at": START,
        "created_at": START,
    }
    return ChildJobView(**(values | over))


def agent(
    index: int, phase: AgentPhase, attempt: int = 1, result: RunResult | None = None, message: str = ""
) -> AgentStatus:
    return AgentStatus(
        version=1, pod=f"gpt-{index}", index=index, attempt=attempt, phase=phase, message=message, result=result
    )


def facts(given: TrainingJob | None = None, seconds: float = 60.0, **over: Any) -> Facts:
    given = given or job()
    values: dict[str, Any] = {
        "job": given,
        "now": START + timedelta(seconds=seconds),
        "child": None,
        "pods": (),
        "departed": (),
        "nodes": {f"node-{i}": NodeView(f"node-{i}", "p3.2xlarge", f"zone-{i}", False) for i in range(4)},
        "record": RunRecord(),
        "order": None,
        "result": None,
        "prices": BOOK,
        "defaults": PodDefaults(),
    }
    return Facts(**(values | over))
