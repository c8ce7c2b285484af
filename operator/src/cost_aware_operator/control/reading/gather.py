"""Reading everything that one reconcile needs to know, once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from cost_aware_operator.adjusting.capacity import nodes_lost
from cost_aware_operator.api.job import JobKey, TrainingJob
from cost_aware_operator.api.spec import AdjustPolicy
from cost_aware_operator.control.reading.believable import believed, believed_agents, left_result
from cost_aware_operator.control.reading.bills import Bills, is_of
from cost_aware_operator.control.reading.facts import Facts, MissingClaim, Unheard, Unread
from cost_aware_operator.control.reading.memory import Memory
from cost_aware_operator.control.reading.nodes import Nodes
from cost_aware_operator.control.reading.run_record import KEY_RECORD, RunRecord, from_data, kept_from, unknown_in
from cost_aware_operator.control.reading.stragglers import stragglers_under
from cost_aware_operator.control.reading.unreadable_record import RecordUnreadableError
from cost_aware_operator.costs.tables.prices import Price, PriceBook
from cost_aware_operator.engines.cluster import Cluster, owner_uids
from cost_aware_operator.ledger.bill import Bill
from cost_aware_operator.observing.samples import Scrape
from cost_aware_operator.planning.space import resources_of
from cost_aware_operator.sources.clock import Clock
from cost_aware_operator.sources.files import WatchedFile
from cost_aware_operator.sources.metrics_source import Agents, MetricsSource
from cost_aware_operator.workload.defaults import PodDefaults
from cost_aware_operator.workload.folders import LivingJob, folder_taken
from cost_aware_operator.workload.names import labels, record_name
from cost_aware_operator.workload.placement import could_take
from cost_aware_operator.workload.usage import taken_by_others
from cost_aware_operator.workload.views import NodeView, PodView, child_job_view, pod_view
from cost_aware_trainer.contract import AgentStatus, RunOrder, RunResult

logger = logging.getLogger(__name__)
MOST_LOOKED_AT = 32
"""Number of candidate nodes whose other pods are listed. Further candidates are assumed empty."""


class Gatherer:
    """Makes `Facts`."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        source: MetricsSource,
        nodes: Nodes,
        prices: WatchedFile[PriceBook],
        defaults: WatchedFile[PodDefaults],
        bills: Bills,
        clock: Clock,
        key_versions: frozenset[int] = frozenset({1}),
        clock_problem: Callable[[], str] = str,
        scrape_interval_seconds: float = 5.0,
    ) -> None:
        self._cluster = cluster
        self._agents = agents
        self._source = source
        self._scrape_interval_seconds = scrape_interval_seconds
        self._nodes = nodes
        self._prices = prices
        self._defaults = defaults
        self._bills, self._clock_problem = bills, clock_problem
        self._clock = clock
        self._key_versions = key_versions

    async def facts(self, job: TrainingJob, memory: Memory, living: Iterable[LivingJob] = ()) -> Facts:
        """One job's world now, with other jobs that live.

        Raises:
            ApiError: the API server refused or could not be reached.
            RecordUnreadableError: the stored record is of another form.
        """
        child, documents, (record, order, result, foreign), missing = await asyncio.gather(
            self._cluster.child_job(job.key),
            self._cluster.pods(job.key.namespace, labels(job.key.name)),
            self._record(job, memory),
            self._missing_claims(job),
        )
        obstacle = foreign
        if child is not None and job.uid not in owner_uids(child):
            obstacle, child = in_the_way("Job", job.key.name), None
        owner = child["metadata"]["uid"] if child is not None else None
        views = [view for document in documents if (view := pod_view(document)) is not None]
        pods = tuple(view for view in views if owner is not None and view.owner_uid == owner)
        former, departed = _others(job, views, pods, memory, record)
        nodes = await self.nodes_of((*pods, *former, *departed))
        agents, unread = await self._agents_of(job, pods, record, memory)
        await self.scrape(job, pods, memory, record.attempt)
        vanished = record.ledger.without_end() - {p.uid for p in (*pods, *former, *departed)}
        if result is None:
            told = (a.result for a in agents.values() if a.result is not None and a.result.total_steps)
            result = next(told, None) or left_result(pods)
        return Facts(
            job=job,
            now=self._clock.now(),
            child=child_job_view(child) if child is not None else None,
            pods=tuple(sorted(pods, key=lambda p: (p.index, p.created_at))),
            departed=departed,
            former=former,
            bill=memory.bill.bill if memory.bill is not None else None,
            done_before=await self._done_before(job, record, memory) if child is None else None,
            unknown_fields=memory.unknown_fields,
            clock_problem=self._clock_problem(),
            nodes=nodes,
            record=record,
            order=order,
            result=result if result is not None and result.outcome == "completed" else None,
            prices=self._prices.value(),
            defaults=self._defaults.value(),
            missing_claims=missing,
            key_versions=self._key_versions,
            obstacle=obstacle,
            folder_taken=folder_taken(LivingJob(job, record.attempt > 0), living),
            agents=agents,
            unread=unread,
            samples=dict(memory.samples),
            scrapes=tuple(memory.scrapes),
            scrape_interval_seconds=self._scrape_interval_seconds,
            cluster_nodes=await self.cluster_nodes(job, record, memory, nodes.values(), priority_of(pods)),
            told_ends=await self._agents.ends([p for p in pods if p.uid in agents]) if vanished else {},
            unheard=tuple(
                Unheard(rank, why, self._clock.monotonic() - since)
                for rank, (since, why) in sorted(memory.unheard.items())
            ),
        )

    async def pods(self, key: JobKey) -> list[PodView]:
        """All pods of jobs of a name, one after the other."""
        documents = await self._cluster.pods(key.namespace, labels(key.name))
        return [view for document in documents if (view := pod_view(document)) is not None]

    async def nodes_of(self, pods: Iterable[PodView]) -> dict[str, NodeView]:
        """Nodes under pods, by name; those that may not be read are missing."""
        names = sorted({p.node for p in pods if p.node})
        return {name: node for name in names if (node := await self._nodes.get(name)) is not None}

    def price(self, node: NodeView) -> Price | None:
        """A node's price today; None where it is not known."""
        return self._prices.value().price(node.instance_type, spot=node.spot, zone=node.zone)

    async def _done_before(self, job: TrainingJob, record: RunRecord, memory: Memory) -> Bill | None:
        """The bill of an earlier job that did the same; looked for once, before anything is made."""
        if record.attempt > 0:
            return None
        if not memory.looked_before:
            memory.done_before = await self._bills.done_before(job)
            memory.looked_before = True
        return memory.done_before

    async def _agents_of(
        self, job: TrainingJob, pods: tuple[PodView, ...], record: RunRecord, memory: Memory
    ) -> tuple[Mapping[str, AgentStatus], tuple[Unread, ...]]:
        """Agents' answers by pod uid, and which agents cannot be worked with, and for how long."""
        newest = max(record.attempt, job.status.attempt)
        agents, unread = believed_agents(job, pods, await self._agents.statuses(pods), newest)
        behind = {uid for uid, agent in agents.items() if agent.attempt < record.attempt}
        unread |= {uid: why for uid, why in memory.refused.items() if uid in behind}
        now, names = self._clock.monotonic(), {pod.uid: pod.name for pod in pods}
        memory.unread = {uid: (memory.unread.get(uid, (now, ""))[0], why) for uid, why in unread.items()}
        since = sorted(memory.unread.items())
        return agents, tuple(Unread(uid, names[uid], why, now - begun) for uid, (begun, why) in since)

    async def cluster_nodes(
        self, job: TrainingJob, record: RunRecord, memory: Memory, own: Iterable[NodeView], priority: int = 0
    ) -> tuple[NodeView, ...] | None:
        """Nodes that pods could also run on, with what others take of them."""
        listed = await self._listed_nodes(job, record, memory, own)
        if listed is None or record.plan is None:
            return listed
        resources = resources_of(job.spec, self._defaults.value().resources)
        able = could_take(listed, job, replace(record.plan, instance_types=()), resources)[:MOST_LOOKED_AT]
        uses = dict(zip(able, await asyncio.gather(*map(self._nodes.uses, able)), strict=True))
        return tuple(
            node
            if (used := uses.get(node.name)) is None
            else replace(node, taken=taken_by_others(used, job.key, priority))
            for node in listed
        )

    async def _listed_nodes(
        self, job: TrainingJob, record: RunRecord, memory: Memory, own: Iterable[NodeView]
    ) -> tuple[NodeView, ...] | None:
        """Nodes that are asked for only where it may matter, as a list of them is large.

        That is while a rank is slow, a node cordoned or one lost, and for a job that may run on several types of nodes.
        """
        plan = job.status.plan
        if plan is None:
            return None
        allowed, policy = job.spec.nodes.instance_types, job.spec.efficiency.policy
        if len(allowed) > 1 and policy is not AdjustPolicy.OFF:
            return await self._nodes.all(allowed)
        lost = any(nodes_lost(record.changes, plan.nodes))
        if not (lost or any(node.is_cordoned for node in own) or _straggling(job, record, memory)):
            return None
        return await self._nodes.all(plan.instance_types)

    async def _record(
        self, job: TrainingJob, memory: Memory
    ) -> tuple[RunRecord, RunOrder | None, RunResult | None, str]:
        stored = await self._cluster.config_map(job.key.namespace, record_name(job.key.name))
        if not memory.bill_read:
            memory.bill, memory.bill_read = await self._bills.read(job.uid), True
        memory.record_version = stored.resource_version if stored is not None else None
        if stored is not None and job.uid not in stored.owner_uids:
            return RunRecord(), None, None, in_the_way("ConfigMap", record_name(job.key.name))
        data = dict(stored.data) if stored is not None else {}
        try:
            record, order, result = from_data(data)
        except ValueError as error:
            raise RecordUnreadableError(record_name(job.key.name), error) from error
        memory.kept = kept_from(data, order, result)
        memory.unknown_fields = (*unknown_in(record, KEY_RECORD), *memory.kept)
        if memory.bill is not None:
            # the job's namespace may write the record, and has no say in what was spent
            memory.unknown_fields += unknown_in(memory.bill.bill, "bill.json")
            record = record.model_copy(update={"ledger": memory.bill.bill.ledger})
        # between saves the ledger is ahead of what is stored; both lead to the same sums
        saved = memory.saved
        if saved is not None:
            record = record.model_copy(update={"ledger": saved.ledger})
        if saved is not None and saved.attempt == record.attempt and saved.ended_at == record.ended_at:
            known = {"newest_checkpoint": saved.newest_checkpoint, "saves": saved.saves}
            record = record.model_copy(update=known)
        return record, order, result, ""

    async def _missing_claims(self, job: TrainingJob) -> tuple[MissingClaim, ...]:
        claims = [("spec.checkpoint.volume", job.spec.checkpoint.volume)]
        if job.spec.trainer.config is not None:
            claims.append(("spec.trainer.config.data.volume", job.spec.trainer.config.data.volume))
        found = await asyncio.gather(*(self._cluster.claim_exists(job.key.namespace, name) for _, name in claims))
        return tuple(MissingClaim(*claim) for claim, exists in zip(claims, found, strict=True) if not exists)

    async def scrape(self, job: TrainingJob, pods: tuple[PodView, ...], memory: Memory, attempt: int) -> None:
        """A rank that does not answer, or not what can be true, keeps its last sample while its pod lives: its counters only grow."""
        plan = job.status.plan
        if plan is None:
            return
        answers = await self._source.samples(job.key, pods, plan.ranks // plan.nodes)
        now = self._clock.monotonic()
        fresh, unheard = believed(job, pods, answers, memory.samples, attempt, self._clock.now())
        memory.unheard = {rank: (memory.unheard.get(rank, (now, ""))[0], why) for rank, why in unheard.items()}
        alive = {p.uid for p in pods}
        memory.samples = {uid: s for uid, s in memory.samples.items() if uid in alive or uid in memory.departed} | fresh
        if fresh:
            ranks = tuple(sample for samples in fresh.values() for sample in samples)
            memory.scrapes.append(Scrape(now - answers.age_seconds, ranks))


def _others(
    job: TrainingJob, views: Iterable[PodView], pods: Iterable[PodView], memory: Memory, record: RunRecord
) -> tuple[tuple[PodView, ...], tuple[PodView, ...]]:
    """Pods that this job pays for beside those of its Job: those of a Job before it, and those that were seen to go.

    Pods of an earlier job of the same name are on that job's bill.
    """
    present = {p.uid for p in pods}
    children = memory.bill.bill.children if memory.bill is not None else ()
    children = (*children, *{p.owner_uid for p in pods})
    accounts = {account.uid for account in record.ledger.accounts}
    former = tuple(p for p in views if p.uid not in present and is_of(p, job.uid, children, accounts))
    listed = present | {p.uid for p in former}
    left = memory.departed.values()
    return former, tuple(p for p in left if p.uid not in listed and is_of(p, job.uid, children, accounts))


def _straggling(job: TrainingJob, record: RunRecord, memory: Memory) -> bool:
    return record.plan is not None and bool(stragglers_under(job.spec, record.plan, tuple(memory.scrapes)))


def priority_of(pods: Iterable[PodView]) -> int:
    """What the scheduler gives way to."""
    return next((pod.priority for pod in pods), 0)


def in_the_way(kind: str, name: str) -> str:
    """What to say when an object of a child's name is not the job's. Taking it over would break what it belongs to."""
    return (
        f"metadata.name: a {kind} {name!r} is in the namespace and belongs to something else, a deleted job of this name that is "
        "still being cleaned up perhaps: wait until it is gone, or give this job another name"
    )
