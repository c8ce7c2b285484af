"""Metrics that cannot be true: dropped with a reason, told, and never the ground of a decision or of a dollar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.factories.facts import BOOK, START, agent, child, decide, facts, job, pod
from tests.support.factories.samples import sample as plain

from cost_aware_operator.api.conditions import find
from cost_aware_operator.api.status import ConditionStatus, ConditionType
from cost_aware_operator.control.reading.believable import believed, believed_agents
from cost_aware_operator.control.reading.facts import Facts, Unheard
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.observing.samples import RankSample, Scrape, ScrapeError, parse_rank
from cost_aware_operator.observing.validity import Limits, why_refused
from cost_aware_operator.planning.plan import Plan, PlanInput, make_plan
from cost_aware_operator.sources.metrics_source import AgentAnswers, Answers
from cost_aware_operator.workload.order import run_order
from cost_aware_trainer.contract import AgentPhase, Phase, RunResult

LIMITS = Limits(rank=1, attempt=3, alive_seconds=100.0, total_steps=1000, tokens_per_step=4096)
GOOD = RankSample(
    1, 3, step=40, total_steps=1000, steps=40, tokens=40 * 4096, step_seconds=80.0, model_flops=1e18, memory_bytes=2e9,
    checkpoint_step=30, resumed_step=0, phase_seconds={Phase.COMPUTE: 60.0, Phase.COMMUNICATION: 20.0},
)  # fmt: skip


def test_metrics_that_can_be_true_are_believed() -> None:
    assert why_refused(GOOD, LIMITS) == ""
    earlier = replace(GOOD, steps=39, tokens=39 * 4096)
    assert why_refused(GOOD, LIMITS, earlier) == ""
    assert why_refused(replace(GOOD, attempt=2, steps=1, tokens=4096), LIMITS, GOOD) == "", (
        "another attempt counts from zero"
    )


LIES: list[tuple[dict[str, Any], str]] = [
    ({"steps": float("nan")}, "steps is nan"),
    ({"tokens": -5.0}, "tokens is -5"),
    ({"step_seconds": float("inf")}, "step_seconds is inf"),
    ({"memory_bytes": 1e30}, "memory_bytes is 1e+30"),
    ({"phase_seconds": {Phase.COMPUTE: -1.0}}, "phase compute is -1"),
    ({"phase_seconds": {Phase.COMPUTE: 1e6}}, "s of steps in a pod that is 100 s old"),
    ({"tokens": 1e12}, "tokens in 40 steps"),
    ({"step": 5000}, "a step beyond the last"),
    ({"checkpoint_step": 10**9}, "a step beyond the last"),
    ({"total_steps": 7}, "total_steps is 7 and not 1,000"),
    ({"rank": 0}, "calls itself rank 0"),
    ({"attempt": 9}, "attempt 9, and 3 is the newest"),
    ({"steps": 39.0}, "steps went back from 40 to 39"),
    ({"phase_seconds": {Phase.COMPUTE: 60.0, Phase.COMMUNICATION: 19.0}}, "phase communication went back"),
]


@pytest.mark.parametrize(("over", "why"), LIES, ids=[why.replace(" ", "-") for _, why in LIES])
def test_a_lie_is_refused_with_its_figure(over: dict[str, Any], why: str) -> None:
    assert why in why_refused(replace(GOOD, **over), LIMITS, GOOD)


@settings(max_examples=200)
@given(
    text=st.one_of(
        st.text(max_size=400), st.from_regex(r"(catj_rank_[a-z_]+(\{[^\n]*\})? [^ \n]{1,12}\n){1,5}", fullmatch=True)
    )
)
def test_whatever_an_endpoint_says_is_a_sample_or_refused_and_never_an_accident(text: str) -> None:
    try:
        read = parse_rank(text)
    except ScrapeError:
        return
    why_refused(read, LIMITS, GOOD)


GIVEN = job(nodes={"instanceTypes": ["p3.2xlarge"], "min": 1, "max": 4}, parallelism={"data": 2, "tensor": 1, "pipeline": 1},
            efficiency={"windowSeconds": 20, "cooldownSeconds": 0}, trainer={"config": {"steps": 100_000}},
            template={"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}})  # fmt: skip


def exposition(rank: int, over: dict[str, str], steps: int) -> str:
    """A rank's metrics as text; `over` replaces the value of a series."""
    values = {
        "catj_rank_step": str(steps), "catj_rank_total_steps": "100000", "catj_rank_steps_total": str(steps),
        "catj_rank_tokens_total": str(steps * 100), "catj_rank_step_seconds_total": str(steps),
        "catj_rank_resumed_step": "0", "compute": str(steps * 0.3), "communication": str(steps * 0.7),
    } | over  # fmt: skip
    labels = f'namespace="team",job="gpt",attempt="1",rank="{rank}"'
    lines = [
        f"{name}{{{labels}}} {value}"
        if name.startswith("catj")
        else f'catj_rank_phase_seconds_total{{{labels},phase="{name}"}} {value}'
        for name, value in values.items()
    ]
    return "\n".join(lines) + "\n"


def scraped(lies: list[dict[str, str]]) -> Facts:
    """Two pods over a slow link, rank 1 of which lies at some of the scrapes: through the real parser and checks."""
    pods = (pod(0), pod(1))
    plan = make_plan(PlanInput(GIVEN.spec, BOOK))
    assert isinstance(plan, Plan)
    planned = decide(facts(GIVEN)).status
    given = replace(GIVEN, status=planned)
    record = RunRecord(attempt=1, attempt_at=START, members={0: "pod-0", 1: "pod-1"}, started_at=START)
    known: dict[str, tuple[RankSample, ...]] = {}
    scrapes, unheard = [], dict[str, str]()
    for number, lie in enumerate(lies, 1):
        samples: dict[str, tuple[RankSample, ...]] = {}
        silent = dict[str, str]()
        for rank in range(2):
            try:
                samples[f"pod-{rank}"] = (parse_rank(exposition(rank, lie if rank else {}, 10 * number)),)
            except ScrapeError as error:
                silent[f"rank {rank}"] = str(error)
        now = facts(given, 10.0 * number).now
        fresh, unheard = believed(given, pods, Answers(samples, silent), known, 1, now)
        known |= fresh
        scrapes.append(Scrape(10.0 * number, tuple(s for one in fresh.values() for s in one)))
    return facts(
        given, 10.0 * len(lies), pods=pods, child=child(GIVEN), record=record, scrapes=tuple(scrapes), samples=known,
        agents={f"pod-{i}": agent(i, AgentPhase.RUNNING) for i in range(2)}, order=run_order(given, plan, 1),
        unheard=tuple(Unheard(rank, why, 20.0) for rank, why in unheard.items()),
    )  # fmt: skip


def test_the_same_run_without_lies_is_changed() -> None:
    assert decide(scraped([{}] * 4)).record.changes, "else what follows would prove nothing"


NAMES = st.sampled_from(["catj_rank_step", "catj_rank_steps_total", "catj_rank_tokens_total", "catj_rank_step_seconds_total",
                         "catj_rank_total_steps", "compute", "communication"])  # fmt: skip
FALSE = st.sampled_from(["NaN", "-1", "+Inf", "-Inf", "1e300", "1e19", "-0.5", "x"])


@settings(max_examples=80)
@given(name=NAMES, value=FALSE)
def test_no_decision_and_no_dollar_comes_of_a_lie(name: str, value: str) -> None:
    lying = scraped([{}, {}, {}, {name: value}])
    decision = decide(lying)
    assert decision.record.changes == ()
    honest = decide(replace(lying, samples={}, scrapes=())).record.ledger
    assert decision.record.ledger.accrued_usd == pytest.approx(honest.accrued_usd)
    assert all(0 <= usd <= 1 for usd in decision.record.ledger.usd.values())
    condition = find(decision.status.conditions, ConditionType.OBSERVED)
    assert condition is not None
    assert condition.status is ConditionStatus.FALSE
    assert "rank 1" in condition.message


def test_a_counter_that_goes_back_is_named_with_rank_pod_and_figures() -> None:
    decision = decide(scraped([{}, {}, {}, {"catj_rank_steps_total": "3"}]))
    condition = find(decision.status.conditions, ConditionType.OBSERVED)
    assert condition is not None
    assert "rank 1 (pod gpt-1-a): its metrics cannot be true: steps went back from 30 to 3" in condition.message
    assert decision.record.changes == ()


def test_a_missed_scrape_is_not_told_and_a_rank_that_speaks_again_is() -> None:
    missed = replace(scraped([{}] * 4), unheard=(Unheard("rank 1", "no answer", 5.0),))
    assert find(decide(missed).status.conditions, ConditionType.OBSERVED) is None
    told = decide(replace(missed, unheard=(Unheard("rank 1", "no answer", 16.0),)))
    again = replace(missed, job=replace(missed.job, status=told.status), unheard=())
    condition = find(decide(again).status.conditions, ConditionType.OBSERVED)
    assert condition is not None
    assert condition.status is ConditionStatus.TRUE


def test_samples_of_the_tests_here_are_those_of_the_trainer() -> None:
    assert why_refused(plain(1, 50.0, 3), replace(LIMITS, total_steps=None)) == ""


def answered(**over: Any) -> AgentAnswers:
    return AgentAnswers({"pod-0": replace(agent(0, AgentPhase.RUNNING), **over)})


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"attempt": 2**62}, "its attempt is 4611686018427387904, and 3 is the newest"),
        ({"attempt": 1004}, "its attempt is 1004"),
        ({"attempt": -1}, "its attempt is -1"),
        ({"index": 1}, "it is of the pod of index 1"),
        ({"result": RunResult(outcome=AgentPhase.CHECKPOINTED, step=101)}, "a step beyond the last, 100"),
        ({"result": RunResult(outcome=AgentPhase.CHECKPOINTED, step=-1)}, "a number below 0"),
    ],
)
def test_an_agent_s_answer_that_cannot_be_true_is_not_believed(over: dict[str, Any], says: str) -> None:
    found, unread = believed_agents(job(), [pod(0)], answered(**over), 3)
    assert not found
    assert says in unread["pod-0"]


def test_an_agent_of_an_attempt_that_the_record_has_forgotten_is_believed() -> None:
    found, unread = believed_agents(job(), [pod(0)], answered(attempt=900), 0)
    assert found["pod-0"].attempt == 900
    assert not unread
