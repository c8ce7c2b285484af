"""Jobs, pods and facts for tests: everything has a sensible default, and a test writes down what it is about."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.job import TrainingJob
from cost_aware_operator.api.status import ConditionType, JobStatus
from cost_aware_operator.app.telemetry import Telemetry
from cost_aware_operator.control.policy import decide as policy
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.control.status.events import Event
from cost_aware_operator.control.status.outcome import told
from cost_aware_operator.costs.tables.prices import PriceBook, shipped
from cost_aware_operator.ledger.ledger import Cause, LedgerState
from cost_aware_operator.observing.samples import RankSample, Scrape
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.job import template_hash
from cost_aware_operator.workload.views import ChildJobView, NodeView, PodView
from cost_aware_trainer.contract import AgentPhase, AgentStatus, Phase, RunResult

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


MEMBERS = {0: "pod-0", 1: "pod-1"}
RECORD = RunRecord(attempt=1, attempt_at=START, members=MEMBERS, started_at=START)
RUNNING = {"pod-0": agent(0, AgentPhase.RUNNING), "pod-1": agent(1, AgentPhase.RUNNING)}
SPENT = RECORD.model_copy(update={"ledger": LedgerState(usd={Cause.PRODUCTIVE: 5.0})})
RESULT = RunResult(
    outcome=AgentPhase.COMPLETED, step=100, total_steps=100, loss=1.5, heldout_loss=1.6, samples_checksum="ab"
)
DONE = {u: agent(i, AgentPhase.COMPLETED, result=RESULT) for i, u in MEMBERS.items()}


def sample(rank: int, seconds: float, compute: float = 0.9, **over: Any) -> RankSample:
    values: dict[str, Any] = {
        "rank": rank,
        "attempt": 1,
        "step": int(seconds),
        "total_steps": 100,
        "steps": seconds,
        "tokens": seconds * 100,
        "step_seconds": seconds,
        "loss": 2.5,
        "resumed_step": 0,
        "phase_seconds": {Phase.COMPUTE: seconds * compute, Phase.COMMUNICATION: seconds * (1 - compute)},
    }
    return RankSample(**(values | over))


def running(compute: float = 0.9, **over: Any):
    samples = {f"pod-{i}": (sample(i, 40, compute),) for i in range(2)}
    scrapes = (
        Scrape(20.0, (sample(0, 20, compute), sample(1, 20, compute))),
        Scrape(40.0, (sample(0, 40, compute), sample(1, 40, compute))),
    )
    given = over.pop("given", None) or job()
    values = {"child": child(given), "pods": (pod(0), pod(1)), "agents": RUNNING, "record": RECORD}
    return facts(given, 40.0, **(values | {"samples": samples, "scrapes": scrapes} | over))


@dataclass(frozen=True)
class Decided:
    """What a reconcile does of some facts: the decision, and what is told of it."""

    decision: Decision
    status: JobStatus
    events: tuple[Event, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decision, name)


def decide(given: Facts) -> Decided:
    reading = Reading(given)
    decision = policy.decide(reading)
    answer = told(reading, decision)
    return Decided(decision, answer.status, answer.events)


def condition(decision, kind: ConditionType):
    found = find(decision.status.conditions, kind)
    assert found is not None, f"{kind} is not set"
    return found


def refused(**over: Any) -> Facts:
    """Pods that run under their plan, for a manifest whose instance type has gone from the prices since."""
    planned = running(given=job(nodes={"instanceTypes": ["p3.2xlarge"]}))
    first = decide(planned)
    given = job(first.status.to_document(), nodes={"instanceTypes": ["p3.2xlarge"]}, **over.pop("spec", {}))
    known = {name: i for name, i in BOOK.instances.items() if name != "p3.2xlarge"}
    values = {"child": planned.child, "prices": PriceBook(known), "record": first.record}
    return running(given=given, **(values | over))


def publish(telemetry: Telemetry, given: Facts) -> None:
    telemetry.published(given.job, decide(given).status)
