"""Whole reconciles over any lives of jobs and pods: each job's bill equals what its own pods took, to the cent, and never goes back.

Jobs are deleted and made again under one name while pods of the one before still end; pods are replaced, forced away, or go with
their Job; the operator is away, and another one comes; nodes' clocks are up to a minute off.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some
from tests.support.reconciling import KEY, World, read

from cost_aware_operator.engines.local.store import ObjectKey

BASES = read(Path(__file__).parent / "golden/bases.yaml")
JOB = ObjectKey("CostAwareTrainingJob", KEY.namespace, KEY.name)
CHILD = ObjectKey("Job", KEY.namespace, KEY.name)
HOURLY_USD = 3.06
CENT = 0.01
ACTIONS = (
    "look",
    "look",
    "look",
    "start",
    "start",
    "start",
    "end",
    "remove",
    "force",
    "make",
    "delete",
    "away",
    "back",
)


@dataclass
class Life:
    """A pod's life in true seconds, and the job that pays for it."""

    job: str
    index: int
    started: float
    ended: float | None = None


@dataclass
class Drama:
    """A cluster in the hands of somebody else, who knows what each pod took."""

    offs: list[int]
    world: World = field(default_factory=lambda: World(BASES))
    lives: dict[str, Life] = field(default_factory=dict)
    away: bool = False
    shown: dict[str, float] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)

    async def begin(self) -> None:
        put = [{"base": base} for base in ("data", "checkpoints", "node-0", "node-1")]
        await self.world.step({"put": put})

    def pods(self) -> dict[str, dict[str, Any]]:
        return {pod["metadata"]["name"]: pod for pod in self.world.store.list("Pod", KEY.namespace)}

    async def act(self, action: str, pick: int, seconds: int) -> None:
        names = sorted(self.pods())
        name = names[pick % len(names)] if names else ""
        alive = self.world.store.get(JOB) is not None
        self.world.clock.seconds += seconds
        if action == "make" and not alive:
            await self.look(put=[{"base": "job", "spec": {"startupDeadlineSeconds": 86400}}])
        elif action == "delete" and alive:
            await self.look(delete=[{"kind": "CostAwareTrainingJob", "name": KEY.name}])
        elif action == "start":
            self.start(pick % 2)
        elif action in ("end", "force") and name and self.lives[name].ended is None:
            self.end(name)
            await self.look()
        elif action == "remove" and name and self.lives[name].ended is not None and not self.away:
            await self.look(delete=[{"kind": "Pod", "name": name, "grace_seconds": 0, "watched": True}])
        elif action == "away":
            self.away = True
        elif action == "back" and self.away:
            self.away = False
            await self.look(new_operator=True)
        await self.look()

    async def look(self, **step: Any) -> None:
        """Somebody else's acts, and a look of the operator unless it is away."""
        if self.away:
            for given in step.get("put", []):
                document = json.loads(json.dumps(BASES[given["base"]]))
                document["spec"] |= given["spec"]
                self.world.store.create(document, "somebody")
            before = self.pods().keys()
            for given in step.get("delete", []):
                self.world.store.delete(ObjectKey(given["kind"], KEY.namespace, given["name"]))
            # what is left of pods that have ended goes at once with their job, and nobody can say any more when they did
            self.unseen |= {self.lives[name].job for name in before - self.pods().keys()}
            return
        await self.world.step(step)
        self.audit()

    def start(self, index: int) -> None:
        """The Job controller makes a pod, and its kubelet starts it."""
        child, job = self.world.store.get(CHILD), self.world.store.get(JOB)
        up = {life.index for name, life in self.lives.items() if life.ended is None and name in self.pods()}
        if child is None or job is None or child["spec"].get("suspend") or index in up:
            return
        name, uid = f"gpt-{index}-{len(self.lives)}", child["metadata"]["ownerReferences"][0]["uid"]
        document = json.loads(json.dumps(BASES[f"pod-{index}"]))
        document["metadata"] |= {
            "name": name,
            "labels": child["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": KEY.name,
                    "uid": child["metadata"]["uid"],
                    "controller": True,
                }
            ],
        }
        self.world.store.create(document, "somebody")
        status = {**document["status"], "startTime": self.told(index)}
        status["containerStatuses"] = [{"state": {"running": {"startedAt": self.told(index)}}}]
        self.patch(name, status)
        self.lives[name] = Life(uid, index, self.world.clock.seconds)

    def end(self, name: str) -> None:
        """A container ends, and its kubelet says when, by its own clock."""
        life = self.lives[name]
        life.ended = self.world.clock.seconds
        state = {"terminated": {"finishedAt": self.told(life.index), "exitCode": 143, "reason": "Error"}}
        self.patch(name, {"phase": "Failed", "containerStatuses": [{"state": state}]})

    def patch(self, name: str, status: dict[str, Any]) -> None:
        self.world.store.patch(ObjectKey("Pod", KEY.namespace, name), {"status": status}, "somebody", only_status=True)

    def told(self, index: int) -> str:
        return (self.world.clock.now() + timedelta(seconds=self.offs[index])).strftime("%Y-%m-%dT%H:%M:%SZ")

    def bills(self) -> dict[str, dict[str, Any]]:
        found = [json.loads(d["data"]["bill.json"]) for d in self.world.store.list("ConfigMap", "operators")]
        return {bill["uid"]: bill for bill in found}

    def audit(self) -> None:
        """No bill is less than it was."""
        for uid, bill in self.bills().items():
            usd = sum(bill["ledger"]["usd"].values())
            assert usd >= self.shown.get(uid, 0.0) - 1e-9, f"{uid}: {self.shown[uid]} -> {usd}"
            self.shown[uid] = usd

    async def finish(self) -> None:
        """The last job is deleted, all pods end and go, and their bills are closed."""
        self.away = False
        await self.look(new_operator=True)
        if self.world.store.get(JOB) is not None:
            await self.look(delete=[{"kind": "CostAwareTrainingJob", "name": KEY.name}])
        for name in sorted(self.pods()):
            self.world.clock.seconds += 3
            if self.lives[name].ended is None:
                self.end(name)
            await self.look()
            await self.look(delete=[{"kind": "Pod", "name": name, "grace_seconds": 0, "watched": True}])
        for _ in range(3):
            await self.world.step({"advance": 15})

    def truth(self) -> dict[str, float]:
        """Dollars by job."""
        found: dict[str, float] = {}
        for life in self.lives.values():
            assert life.ended is not None
            found[life.job] = found.get(life.job, 0.0) + (life.ended - life.started) * HOURLY_USD / 3600
        return found


async def played(offs: list[int], acts: list[tuple[str, int, int]]) -> None:
    drama = Drama(offs)
    await drama.begin()
    await drama.act("make", 0, 1)
    for act in acts:
        await drama.act(*act)
    await drama.finish()
    truth, bills = drama.truth(), drama.bills()
    for uid, usd in truth.items():
        booked = sum(bills[uid]["ledger"]["usd"].values())
        assert booked < usd + CENT
        if uid not in drama.unseen:
            assert booked > usd - CENT, f"{uid}: {booked} and not {usd}"
            assert not bills[uid]["estimated"]
    for uid, bill in bills.items():
        assert bill["closed_at"] is not None
        assert uid in truth or not bill["ledger"]["pod_seconds"]


@settings(max_examples=100)
@given(
    some.lists(some.integers(-60, 60), min_size=2, max_size=2),
    some.lists(some.tuples(some.sampled_from(ACTIONS), some.integers(0, 5), some.integers(1, 40)), max_size=30),
)
def test_each_job_s_bill_equals_what_its_own_pods_took(offs: list[int], acts: list[tuple[str, int, int]]) -> None:
    asyncio.run(played(offs, acts))
