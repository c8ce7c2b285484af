"""What is gathered of ranks and nodes: lies are left out and remembered since when, nodes are asked for rarely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from tests.support.factories.adjusting import PIPELINE, change
from tests.support.factories.facts import pod, sample
from tests.support.factories.gathering import GIVEN, Api, Clock, Source, gatherer

from cost_aware_operator.adjusting.changes import Kind
from cost_aware_operator.control.reading.believable import left_result
from cost_aware_operator.control.reading.memory import Memory
from cost_aware_operator.control.reading.nodes import NODE_SECONDS, OWN_NODE_SECONDS, CachedNodes
from cost_aware_operator.control.reading.run_record import RunRecord
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.sources.metrics_source import Answers
from cost_aware_operator.workload.views import NodeView
from cost_aware_trainer.contract import AgentPhase, RunResult

PODS = (pod(0), pod(1))


def answers(*samples: RankSample, age: float = 0.0) -> Answers:
    return Answers({f"pod-{s.rank}": (s,) for s in samples}, {}, age)


async def scraped(memory: Memory, clock: Clock, said: Answers) -> None:
    await gatherer(Source(said), clock).scrape(GIVEN, PODS, memory, 1)


async def test_a_lie_leaves_the_last_sample_that_was_believed_and_is_remembered_since_it_began() -> None:
    memory, clock = Memory("u"), Clock()
    await scraped(memory, clock, answers(sample(0, 40), sample(1, 40)))
    clock.seconds = 105.0
    await scraped(memory, clock, answers(sample(0, 45), sample(1, 3)))
    clock.seconds = 110.0
    await scraped(memory, clock, answers(sample(0, 50), sample(1, 4)))
    assert memory.samples["pod-1"][0].steps == 40
    assert memory.samples["pod-0"][0].steps == 50
    assert [len(s.ranks) for s in memory.scrapes] == [2, 1, 1]
    ((rank, (since, why)),) = memory.unheard.items()
    assert (rank, since) == ("rank 1 (pod gpt-1-a)", 105.0)
    assert "steps went back from 40 to 4" in why
    await scraped(memory, clock, answers(sample(0, 55), sample(1, 55)))
    assert memory.unheard == {}


async def test_a_sample_counts_from_when_it_was_true() -> None:
    memory = Memory("u")
    await scraped(memory, Clock(100.0), answers(sample(0, 40), sample(1, 40), age=12.5))
    assert memory.scrapes[-1].at == 87.5


async def test_an_endpoint_that_says_it_is_another_rank_is_not_believed() -> None:
    memory = Memory("u")
    await scraped(memory, Clock(), Answers({"pod-0": (sample(1, 40),), "pod-1": (sample(1, 40),)}))
    assert set(memory.samples) == {"pod-1"}
    assert "calls itself rank 1" in memory.unheard["rank 0 (pod gpt-0-a)"][1]


async def test_nodes_are_asked_for_no_more_often_than_their_news_is_needed() -> None:
    api, clock = Api(), Clock()
    nodes = CachedNodes(cast("Any", api), clock)
    for seconds in (0.0, OWN_NODE_SECONDS - 1, OWN_NODE_SECONDS + 1):
        clock.seconds = seconds
        await nodes.get("a")
    assert api.asked == ["a", "a"]
    api.asked.clear()
    for seconds in (0.0, NODE_SECONDS - 1, NODE_SECONDS + 1):
        clock.seconds = seconds
        assert len(await nodes.all(()) or ()) == 2
    assert api.asked == ["all", "all"]


async def test_all_nodes_are_asked_for_only_while_a_rank_is_slow_or_a_node_cordoned_or_lost() -> None:
    api, clock, memory = Api(), Clock(), Memory("u")
    calm = NodeView("a", None, None, False)
    gathering = gatherer(Source(), clock, api)
    assert await gathering.cluster_nodes(GIVEN, RunRecord(), memory, [calm]) is None
    assert api.asked == []
    found = await gathering.cluster_nodes(GIVEN, RunRecord(), memory, [replace(calm, unschedulable=True)])
    assert found is not None
    assert api.asked == ["all"]
    clock.seconds += NODE_SECONDS + 1
    plan = GIVEN.status.plan
    assert plan is not None
    now = replace(PIPELINE, nodes=plan.nodes)
    lost = change(kind=Kind.SHRINK, origin=replace(now, nodes=plan.nodes + 1), target=now)
    assert await gathering.cluster_nodes(GIVEN, RunRecord(changes=(lost,)), memory, [calm]) is not None
    assert api.asked == ["all", "all"]


LEFT = RunResult(outcome=AgentPhase.COMPLETED, step=9, total_steps=9, loss=1.5, samples_checksum="0" * 16)


@pytest.mark.parametrize("junk", ["", "bye", "[]", '{"outcome": "completed"}', '{"step": 9}', "\ufffd{"])
def test_a_result_that_a_pod_left_is_read_beside_whatever_others_wrote_there(junk: str) -> None:
    said = [pod(0, phase="Succeeded", last_message=junk), pod(1, phase="Succeeded", last_message=LEFT.to_json())]
    assert left_result(said) == LEFT
    assert left_result(said[:1]) is None


def test_what_a_pod_left_that_did_not_end_well_or_complete_is_no_result() -> None:
    assert left_result([pod(0, phase="Failed", last_message=LEFT.to_json())]) is None
    early = replace(LEFT, outcome=AgentPhase.CHECKPOINTED, step=5)
    assert left_result([pod(0, phase="Succeeded", last_message=early.to_json())]) is None
