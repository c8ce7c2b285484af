"""A Reconciler over a store in memory, agents and ranks that say what a case tells them to, and a record of all it does.

A case is a folder: `input.yaml` has the steps, `expected.yaml` what the operator did in each. A step is, in this order:

    keys           keys of the operator's that are added, as text; `keys_gone` names those that are taken away
    new_operator   true: everything that the operator remembered is lost
    advance        seconds that pass
    patch, delete  what somebody else changes; `kind` and `name` say of which object; a pod's deletion may be `watched`
    put            objects that somebody makes, over one of `bases.yaml` each; `$now` in them is the time
    agents         answers of the agents, by pod; null is silence. They stay until they are changed
    ranks          `training` or `samples`, by pod, as lists; they stay as well
    refuse         calls that the API server refuses: verb, kind, status, message, times
    between        what somebody else changes right before a call: verb, kind, and `put`, `patch` or `delete`
    times          how often to reconcile, each after `advance`; what is recorded is the last

A case that is `after` another one begins with all of that one's steps.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.control.loop.reconcile import Reconciler
from cost_aware_operator.control.reading.bills import Bills
from cost_aware_operator.control.reading.gather import Gatherer
from cost_aware_operator.control.reading.memory import Memories
from cost_aware_operator.control.reading.nodes import CachedNodes
from cost_aware_operator.engines.cluster import ApiError, ConflictError
from cost_aware_operator.engines.local.admission import Rules
from cost_aware_operator.engines.local.cluster import LocalCluster
from cost_aware_operator.engines.local.fields import merge_patched
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore, Write
from cost_aware_operator.observing.samples import RankSample
from cost_aware_operator.sources.files import defaults_file, price_file
from cost_aware_operator.sources.metrics_source import AgentAnswers, Answers
from cost_aware_operator.workload.secret import KeyRing
from cost_aware_operator.workload.views import PodView, pod_view
from cost_aware_trainer.contract import AgentStatus, ContractError, Phase, Release, RunOrder

START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
KEY = JobKey("team", "gpt")
KEYS = {"key": base64.b64encode(b"a key of the tests").decode()}
Document = dict[str, Any]


def merged(base: Any, over: Mapping[str, Any]) -> Document:
    return merge_patched(base or {}, over)


@dataclass
class Clock:
    seconds: float = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


@dataclass
class ScriptedAgents:
    """Agents that answer what they were told to answer, and write down what they hear."""

    record: Callable[[Document], None]
    answers: dict[str, Document | None] = field(default_factory=dict)

    async def statuses(self, pods: Iterable[PodView]) -> AgentAnswers:
        found, unread = {}, {}
        for pod in pods:
            answer = self.answers.get(pod.name)
            if pod.usable and answer is not None:
                try:
                    found[pod.uid] = AgentStatus.from_document(
                        {"version": 1, "pod": pod.name, "index": pod.index, **answer}
                    )
                except ContractError:
                    unread[pod.uid] = "the answer of its agent cannot be read"
        return AgentAnswers(found, unread)

    async def ends(self, pods: Iterable[PodView]) -> dict[str, datetime]:
        return {}

    async def order(self, pods: Iterable[PodView], order: RunOrder, token: str) -> dict[str, str]:
        self.record({"order": [p.name for p in pods], "message": json.loads(order.to_json()), "token": token})
        return {}

    async def release(self, pods: Iterable[PodView], release: Release, token: str) -> None:
        self.record({"release": [p.name for p in pods], "message": json.loads(release.to_json()), "token": token})


@dataclass
class ScriptedRanks:
    """Ranks that train at a rate that a case gives, or say what it makes them say."""

    clock: Clock
    training: Document = field(default_factory=dict)
    since: float = 0.0
    said: dict[str, list[Document]] = field(default_factory=dict)

    def told(self, script: Document) -> None:
        if "training" in script:
            self.training, self.since = script["training"] or {}, self.clock.seconds
        self.said = script.get("samples", {})

    async def samples(self, _: JobKey, pods: Iterable[PodView], ranks_per_node: int) -> Answers:
        found = {}
        for pod in pods:
            said = self.said.get(pod.name)
            if said is not None:
                found[pod.uid] = tuple(_sample(one) for one in said)
            elif self.training and pod.usable:
                ranks = range(pod.index * ranks_per_node, (pod.index + 1) * ranks_per_node)
                found[pod.uid] = tuple(self._trains(rank) for rank in ranks)
        return Answers(found)

    def _trains(self, rank: int) -> RankSample:
        given = dict(self.training)
        step_seconds, shares = given.pop("step_seconds"), given.pop("shares")
        steps = int((self.clock.seconds - self.since) / step_seconds)
        seconds, resumed = steps * step_seconds, given.get("resumed_step", 0)
        return _sample(
            {
                "rank": rank,
                "step": resumed + steps,
                "steps": steps,
                "step_seconds": seconds,
                "tokens": steps * given.pop("tokens_per_step", 2048),
                "phase_seconds": {phase: seconds * share for phase, share in shares.items()},
                "resumed_step": resumed,
                **given,
            }
        )


def _sample(given: Document) -> RankSample:
    phases = {Phase(name): float(seconds) for name, seconds in given.get("phase_seconds", {}).items()}
    return RankSample(**{"total_steps": 100, **given, "phase_seconds": phases})


class World:
    """All of one case: the cluster, its pods, the operator, and what it did."""

    def __init__(self, bases: Mapping[str, Document]) -> None:
        numbers = count(1)
        self.clock, self.acts, self._bases = Clock(), list[Document](), bases
        self.store = ObjectStore(self.clock.now, lambda: f"{next(numbers):08d}-0000-0000-0000-000000000000")
        self.store.watchers.append(self._wrote)
        self.rules = Rules()
        self.store.admission.append(self.rules)
        self.agents = ScriptedAgents(self.acts.append)
        self.ranks = ScriptedRanks(self.clock)
        self._ours, self._suffixes = False, count(1)
        self.keys = dict(KEYS)
        self.new_operator()

    def new_operator(self) -> None:
        cluster = LocalCluster(self.store)
        nodes = CachedNodes(cluster, self.clock)
        prices, defaults = price_file(None), defaults_file(None)
        versions = KeyRing.of(self.keys).versions
        bills = Bills(cluster, "operators")
        self.memories = Memories()
        self.reconciler = Reconciler(
            cluster=cluster,
            bills=bills,
            agents=self.agents,
            gatherer=Gatherer(cluster, self.agents, self.ranks, nodes, prices, defaults, bills, self.clock, versions),
            memories=self.memories,
            clock=self.clock,
            keys=KeyRing.of(self.keys),
            new_suffix=lambda: f"{next(self._suffixes):08x}",
            published=lambda job, decision: None,
            forgotten=lambda key: self.acts.append({"forgotten": str(key)}),
        )

    async def step(self, step: Document) -> Document:
        """What the operator does in one step."""
        self.keys |= {name: base64.b64encode(key.encode()).decode() for name, key in step.get("keys", {}).items()}
        for name in step.get("keys_gone", []):
            del self.keys[name]
        if step.get("new_operator"):
            self.new_operator()
        self.agents.answers |= step.get("agents", {})
        for refusal in step.get("refuse", []):
            kind = ConflictError if refusal["status"] == 409 else ApiError
            error = kind(refusal["status"], refusal.get("message", "refused"))
            self.rules.refuse(refusal["verb"], refusal["kind"], error, refusal.get("times"))
        for change in step.get("between", []):
            self.rules.before(change["verb"], change["kind"], lambda _, change=change: self._somebody(change))
        done: Document = {}
        for number in range(step.get("times", 1)):
            self.clock.seconds += step.get("advance", 0)
            if number == 0:
                self._somebody(step)
                if "ranks" in step:
                    self.ranks.told(step["ranks"])
            done = await self._reconciled()
        return done

    async def _reconciled(self) -> Document:
        self.acts.clear()
        self._ours, done = True, dict[str, Any]()
        try:
            done["again_seconds"] = await self.reconciler.reconcile(KEY)
        except ApiError as error:
            done["raised"] = f"{type(error).__name__}: {error}"
        finally:
            self._ours = False
        return {"acts": list(self.acts), **done}

    def _somebody(self, change: Document) -> None:
        """Somebody else's writes."""
        ours, self._ours = self._ours, False
        for given in change.get("patch", []):
            patch = {n: v for n, v in self._timed(given).items() if n not in ("kind", "name")}
            key = ObjectKey(given["kind"], "" if given["kind"] == "Node" else KEY.namespace, given["name"])
            if "status" in patch:
                self.store.patch(key, {"status": patch.pop("status")}, "somebody", only_status=True)
            if patch:
                self.store.patch(key, patch, "somebody")
        for given in change.get("delete", []):
            key = ObjectKey(given["kind"], KEY.namespace, given["name"])
            before = self.store.get(key) if given.get("watched") else None
            self.store.delete(key, grace_seconds=given.get("grace_seconds"))
            if before is not None and (view := pod_view(before)) is not None:
                self.memories.depart(KEY, view, self.clock.now())
        for given in change.get("put", []):
            self._put(given)
        self._ours = ours

    def _put(self, given: Document) -> None:
        over = {name: value for name, value in given.items() if name != "base"}
        document = self._timed(merged(self._bases[given["base"]], over))
        job = self.store.get(ObjectKey("Job", KEY.namespace, KEY.name))
        if document["kind"] == "Pod" and job is not None:
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": KEY.name, "uid": job["metadata"]["uid"]}
            document["metadata"].setdefault("ownerReferences", [{**owner, "controller": True}])
        self.store.create(document, "somebody")
        if "status" in document:
            self.store.patch(ObjectKey.of(document), {"status": document["status"]}, "somebody", only_status=True)

    def _timed(self, document: Document) -> Document:
        now = self.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        timed: Document = json.loads(json.dumps(document).replace("$now", now))
        return timed

    def _wrote(self, write: Write) -> None:
        if self._ours:
            self.acts.append(shown(write))


def shown(write: Write) -> Document:
    """A write as a golden file has it: the whole of a new object, the difference to an old one; events in a line."""
    request = write.request
    if request.key.kind == "Event":
        body = request.document
        line = f"{body['type']} {body['reason']}: {body['message']}"
        return {"event": line, "name": request.key.name, "at": body["firstTimestamp"]} | _refusal(write)
    told = {request.verb: f"{request.key.kind} {request.key.name}"}
    if write.refused:
        return told | _refusal(write)
    if write.after is None:
        return told
    after = readable(write.after)
    if write.before is None:
        return told | {"object": after}
    return told | {"change": difference(readable(write.before), after)}


def _refusal(write: Write) -> Document:
    return {"refused": write.refused} if write.refused else {}


def readable(document: Mapping[str, Any]) -> Document:
    """A document without what the store counts, its JSON texts as what they say, and its conditions by their type."""
    result: Document = json.loads(json.dumps(document))
    for name in ("resourceVersion", "uid", "creationTimestamp"):
        result["metadata"].pop(name, None)
    if result["kind"] == "ConfigMap":
        result["data"] = {n: _parsed(text) for n, text in (result.get("data") or {}).items()}
    conditions = (result.get("status") or {}).get("conditions")
    if isinstance(conditions, list) and all(isinstance(c, dict) and "type" in c for c in conditions):
        result["status"]["conditions"] = {c["type"]: {n: v for n, v in c.items() if n != "type"} for c in conditions}
    return result


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Document:
    """The merge patch from one to the other; null where something is gone."""
    changed: Document = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if name not in before:
            changed[name] = value
        elif isinstance(old, dict) and isinstance(value, dict):
            if inner := difference(old, value):
                changed[name] = inner
        elif old != value:
            changed[name] = value
    return changed


@cache
def read(path: Path) -> Any:
    """A YAML file, read once: libyaml's reader is ten times as fast, where it is there."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  both are safe


def steps_of(folder: Path) -> Iterator[tuple[Document, bool]]:
    """A case's steps, and whether they are its own."""
    given = read(folder / "input.yaml")
    if "after" in given:
        for step, _ in steps_of(folder.parent / given["after"]):
            yield step, False
    for step in given["steps"]:
        yield step, True


async def played(folder: Path) -> list[Document]:
    """What the operator does in each step of a case."""
    world = World(read(folder.parent / "bases.yaml"))
    done = [(await world.step(step), own) for step, own in steps_of(folder)]
    return [{"step": n, **one} for n, one in enumerate((one for one, own in done if own), 1)]
