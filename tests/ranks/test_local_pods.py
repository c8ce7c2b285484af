"""Two pods of the store in memory train one run with the real agent, each as processes of this host under an address of its own."""

import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from dataclasses import replace

from devtools.steps_log import steps_of
from tests.support.pods.pods import PodWorld, pod_document

from cost_aware_operator.engines.local.kubelet import AGENT
from cost_aware_operator.engines.local.pods.launch import PodFolder
from cost_aware_operator.engines.local.pods.logs import pod_log
from cost_aware_operator.engines.local.pods.proc import pids_of_pod
from cost_aware_operator.engines.local.store import ObjectKey
from cost_aware_operator.workload.views import pod_view
from cost_aware_trainer.contract import (
    AGENT_PORT,
    CONTRACT_VERSION,
    METRICS_PORT,
    AgentPhase,
    AgentStatus,
    Release,
    RunOrder,
    RunResult,
)

NAMES = ("job-0", "job-1")


class PodsWorld(PodWorld):
    """A world whose pods have the real agent."""

    def address(self, name):
        return pod_view(self.pod(name)).ip

    def folder(self, name):
        return PodFolder(self.state / "pods" / self.pod(name)["metadata"]["uid"])

    async def ask(self, name, path, message=None, port=AGENT_PORT):
        def ask():
            body = message.to_json().encode() if message is not None else None
            request = urllib.request.Request(f"http://{self.address(name)}:{port}/{path}", data=body)
            request.add_header("Authorization", "Bearer secret")
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
                return answer.read().decode()

        return await asyncio.to_thread(ask)

    async def listening(self, name):
        """Returns once a pod's agent answers."""
        for _ in range(400):
            with contextlib.suppress(OSError):
                return await self.ask(name, "livez")
            await asyncio.sleep(0.05)
        raise AssertionError(pod_log(self.folder(name)))

    async def start(self):
        for index, name in enumerate(NAMES):
            self.put(pod_document(name, node=f"node-{index}", index=index, grace_seconds=60, CATJ_PRELOAD=1))
        await self.until(lambda: all(self.phase(name) == "Running" for name in NAMES))
        await asyncio.gather(*(self.listening(name) for name in NAMES))

    async def order(self, attempt, plan):
        entry = ("-m", "cost_aware_trainer", "--plan", f"/run/catj/attempt-{attempt}/plan.json")
        order = RunOrder(
            version=CONTRACT_VERSION, namespace="team", job="job", attempt=attempt, nodes=2, ranks_per_node=1,
            rendezvous_host="job-0.job.team.svc", entry=(*entry, "--steps-log", "/checkpoints/steps.jsonl"), plan=plan,
        )  # fmt: skip
        for name in NAMES:
            await self.ask(name, "order", self.kubelet.localised(order, self.pod(name)["metadata"]["uid"]))

    async def wait_for_step(self, step):
        await self.until(lambda: any(line["step"] >= step for line in steps_of(self.volume / "steps.jsonl")), 240)

    async def wait_for_phase(self, phase):
        for name in NAMES:
            while (status := AgentStatus.from_json(await self.ask(name, "status"))).phase is not phase:
                assert status.phase is AgentPhase.RUNNING, (status, pod_log(self.folder(name)))
                await asyncio.sleep(0.1)

    def left_over(self):
        return [pid for folder in (self.state / "pods").glob("*") for pid in pids_of_pod(folder)]


async def test_two_local_pods_train_one_run_and_go_on_after_their_kubelet_was_stopped(make_plan, finish, tmp_path):
    undisturbed = finish(make_plan("undisturbed", data=2, steps=120))
    plan = make_plan(data=2, steps=120)
    plan = replace(plan, checkpoint=replace(plan.checkpoint, folder="/checkpoints/run"))
    first = PodsWorld(tmp_path / "state", agent=AGENT)
    await first.start()
    await first.order(1, plan)
    await first.wait_for_step(15)
    metrics = await first.ask(NAMES[1], "metrics", port=METRICS_PORT)
    # two pods of one host are two nodes: the link between their ranks is the network
    assert 'level="network"' in metrics
    await first.kubelet.close()
    assert first.left_over() == []
    (saved,) = {json.loads(file.read_text())["step"] for file in first.volume.glob("run/step-*/manifest.json")}
    assert 15 <= saved < 120
    volume = first.volume
    second = PodsWorld(tmp_path / "again", agent=AGENT, claims={"runs": volume})
    await second.start()
    await second.order(2, plan)
    await second.wait_for_phase(AgentPhase.COMPLETED)
    assert [line["step"] for line in steps_of(volume / "steps.jsonl")] == list(range(1, 121))
    for name in NAMES:
        await second.ask(name, "release", Release(attempt=2, complete=True))
    await second.until(lambda: all(second.phase(name) == "Succeeded" for name in NAMES))
    assert RunResult.from_json(pod_view(second.pod(NAMES[0])).last_message) == undisturbed.result
    assert second.left_over() == []


async def test_a_local_pod_whose_agent_is_killed_fails_and_leaves_no_rank(make_plan, tmp_path):
    plan = make_plan(data=2, steps=10_000)
    plan = replace(plan, checkpoint=replace(plan.checkpoint, folder="/checkpoints/run"))
    world = PodsWorld(tmp_path / "state", agent=AGENT)
    await world.start()
    await world.order(1, plan)
    await world.wait_for_step(5)
    os.kill(world.folder(NAMES[0]).keeper().agent.pid, signal.SIGKILL)
    await world.until(lambda: world.phase(NAMES[0]) == "Failed")
    assert pids_of_pod(world.folder(NAMES[0]).path) == []
    for name in NAMES:
        world.store.delete(ObjectKey("Pod", "team", name))
    await world.until(lambda: not list(world.store.list("Pod")), 90)
    assert world.left_over() == []
