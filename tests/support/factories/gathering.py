"""A gatherer on a clock, a cluster and ranks that say what they are told to say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, cast

from tests.support.factories.facts import START, decide, facts, job

from cost_aware_operator.control.reading.gather import Gatherer
from cost_aware_operator.control.reading.nodes import CachedNodes
from cost_aware_operator.sources.metrics_source import Answers
from cost_aware_operator.workload.defaults import PodDefaults


@dataclass
class Clock:
    seconds: float = 100.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


@dataclass
class Source:
    """Says what it is told to say."""

    answers: Answers = field(default_factory=Answers)

    async def samples(self, *_: Any) -> Answers:
        return self.answers


@dataclass
class Api:
    """A cluster of two nodes that counts how often it is asked."""

    asked: list[str] = field(default_factory=list)

    async def node(self, name: str) -> dict[str, Any]:
        self.asked.append(name)
        return {"metadata": {"name": name}}

    async def nodes(self, _: Any) -> list[dict[str, Any]]:
        self.asked.append("all")
        return [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]


GIVEN = replace(job(), status=decide(facts()).status)


class Defaults:
    def value(self) -> PodDefaults:
        return PodDefaults()


def gatherer(source: Source, clock: Clock, api: Api | None = None) -> Gatherer:
    nodes = CachedNodes(cast("Any", api or Api()), clock)
    nothing = cast("Any", None)
    return Gatherer(nothing, nothing, source, nodes, nothing, cast("Any", Defaults()), nothing, clock)
