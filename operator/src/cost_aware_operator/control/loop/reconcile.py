"""`reconcile(key)`: gather the facts, decide, save the record, act, write the status once, then post events.

Level-based and safe to repeat. A leader that lost its Lease is stopped by the save, before it has touched anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from cost_aware_operator.api import KIND, MANAGER
from cost_aware_operator.api.job import JobKey, JobReference, TrainingJob
from cost_aware_operator.api.status import JobStatus
from cost_aware_operator.control.loop.closing import Bookkeeper, is_spent
from cost_aware_operator.control.loop.worker import about
from cost_aware_operator.control.policy.accounting import fees_now
from cost_aware_operator.control.policy.decide import BLOCKED_SECONDS, decide, rejected
from cost_aware_operator.control.policy.decision import Decision
from cost_aware_operator.control.policy.shaping import DeleteJob, MakeJob, SetJob, Shaping, shaping_of
from cost_aware_operator.control.reading.bills import Bills, bill_of
from cost_aware_operator.control.reading.facts import Facts
from cost_aware_operator.control.reading.gather import Gatherer, in_the_way
from cost_aware_operator.control.reading.memory import Memories, Memory
from cost_aware_operator.control.reading.reading import Reading
from cost_aware_operator.control.reading.run_record import to_data
from cost_aware_operator.control.reading.unreadable_record import RecordUnreadableError
from cost_aware_operator.control.status.events import Event
from cost_aware_operator.control.status.log_lines import log_lines
from cost_aware_operator.control.status.outcome import told
from cost_aware_operator.control.status.unreadable import told_unreadable, why_unreadable
from cost_aware_operator.engines.cluster import ApiError, Cluster, ConflictError, owner_uids
from cost_aware_operator.planning.plan import Plan, Refusal
from cost_aware_operator.sources.clock import Clock
from cost_aware_operator.sources.metrics_source import Agents
from cost_aware_operator.workload.job import indexed_job
from cost_aware_operator.workload.names import labels, owner_reference, record_name
from cost_aware_operator.workload.secret import KeyRing, TokenSecret, secret, secret_name
from cost_aware_operator.workload.service import service
from cost_aware_operator.workload.views import child_job_view
from cost_aware_trainer.contract import CONTRACT_VERSION, AgentStatus, Release

logger = logging.getLogger(__name__)
SAVE_SECONDS = 15.0
"""How often the ledger is saved while nothing else makes a save urgent. Later saves lose nothing but the split by cause of what
happened since."""

NAMES_TRIED = 4
"""Names that are tried for a Secret in one reconcile."""
StatusSink = Callable[[TrainingJob, JobStatus], None]


class Reconciler:
    """Reconciles one key at a time; different keys may be reconciled concurrently."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        gatherer: Gatherer,
        memories: Memories,
        bills: Bills,
        clock: Clock,
        keys: KeyRing,
        new_suffix: Callable[[], str],
        published: StatusSink,
        forgotten: Callable[[JobKey], None],
    ) -> None:
        self._cluster = cluster
        self._agents = agents
        self._gatherer = gatherer
        self._memories = memories
        self._clock = clock
        self._bills = bills
        self._books = Bookkeeper(bills, gatherer, memories, clock)
        self._keys = keys
        self._new_suffix = new_suffix
        self._published = published
        self._forgotten = forgotten

    async def reconcile(self, key: JobKey) -> float | None:
        """Brings one job a step nearer to what its manifest says.

        Returns:
            Seconds after which to look again even if nothing happens; None to wait for an event.

        Raises:
            ApiError: the API server refused or could not be reached; try again.
        """
        try:
            return await self._reconciled(key)
        except (ApiError, TimeoutError):
            raise
        except Exception as error:
            # it is logged by whoever called, and tried again; the job's owner must not be left without a word, nor its books
            with contextlib.suppress(ApiError):
                await self._tell_fault(key, error)
            raise

    async def _reconciled(self, key: JobKey) -> float | None:
        document = await self._cluster.training_job(key)
        if document is None or document["metadata"].get("deletionTimestamp") is not None:
            again = await self._books.close(key, None)
            if again is None:
                self._memories.forget(key)
            self._forgotten(key)
            return again
        again = await self._books.close(key, document["metadata"]["uid"])
        mine = await self._reconciled_alive(key, document)
        return min((s for s in (again, mine) if s is not None), default=None)

    async def _reconciled_alive(self, key: JobKey, document: dict[str, Any]) -> float | None:
        if (document.get("spec") or {}).get("managedBy", MANAGER) != MANAGER:
            return None
        try:
            job = TrainingJob.parse(document)
        except (ValueError, KeyError, TypeError):
            await self._keep_books(key, document["metadata"]["uid"], end=False)
            return await self._tell_unreadable(document, "ManifestUnreadable", why_unreadable(document))
        memory = self._memories.of(key, job.uid)
        memory.job = job
        try:
            facts = await self._gatherer.facts(job, memory, self._memories.living())
        except RecordUnreadableError as error:
            await self._keep_books(key, job.uid, end=True)
            return await self._tell_unreadable(document, "RecordUnreadable", str(error))
        reading = Reading(facts)
        decision = await self._act(job, reading, decide(reading), memory)
        return decision.requeue_seconds

    async def _act(self, job: TrainingJob, reading: Reading, decision: Decision, memory: Memory) -> Decision:
        """Does what was decided, the record first; returns what was decided in the end, as the pods may be refused."""
        facts = reading.facts
        shaping = shaping_of(facts, decision)
        if isinstance(shaping, MakeJob):
            decision = self._with_secret(job, decision)
        await self._save(job, facts, decision, memory, acts=shaping is not None)
        memory.secret_made = memory.secret_made if facts.child is None else ""
        decision, refusal = await self._shape_pods(job, facts, shaping, decision, memory)
        if refusal is not None:
            # what was saved stays true: the plan is in force, and no attempt can have begun without a Job
            decision = rejected(reading, decision.record, refusal)
        await self._tell(job, facts, decision, memory)
        for uid in decision.evict:
            await self._evict(job, next(p.name for p in facts.pods if p.uid == uid), uid)
        answer = told(reading, decision)
        status = answer.status.to_document()
        if status != job.status.to_document():
            await self._cluster.write_status(job.reference, status)
        for line in log_lines(facts.record, decision, answer.events):
            level = logging.WARNING if line.warning else logging.INFO
            logger.log(level, line.message, extra={**line.fields, **about(job.key)})
        self._published(job, answer.status)
        await self._post(job.reference, job.generation, decision.record.attempt, answer.events, facts.now)
        if decision.delete_job:
            await self._cluster.delete(KIND, job.key, job.uid)
        return decision

    async def _keep_books(self, key: JobKey, uid: str, *, end: bool) -> None:
        """Books the pods of a job of which something cannot be read; ends them where that is due, or where the budget is spent."""
        memory = self._memories.of(key, uid)
        memory.bill_read, memory.saved = False, None
        with contextlib.suppress(RecordUnreadableError):
            stored = await self._bills.read(uid)
            if stored is not None:
                end = is_spent((await self._books.book(key, stored)).bill) or end
        document = await self._cluster.child_job(key) if end else None
        if document is None or uid not in owner_uids(document):
            return
        child = child_job_view(document)
        if not (child.suspended or child.complete or child.failure is not None or child.deleting):
            await self._cluster.set_job(
                key, suspend=True, active_deadline_seconds=child.active_deadline_seconds, completions=None
            )

    async def _tell_fault(self, key: JobKey, error: Exception) -> None:
        document = await self._cluster.training_job(key)
        if document is None:
            return
        message = (
            f"the operator met an error of its own ({type(error).__name__}); its log has the rest, and it tries again. Pods that run "
            "go on and are paid for: write an issue with the log's lines about this job"
        )
        with contextlib.suppress(Exception):
            await self._keep_books(key, document["metadata"]["uid"], end=False)
        await self._tell_unreadable(document, "OperatorFault", message)

    async def _tell_unreadable(self, document: Mapping[str, Any], reason: str, message: str) -> float:
        """Writes one condition about a job and leaves all else as it is; nothing where that was done before."""
        now, job = self._clock.now(), JobReference.to(document)
        written = told_unreadable(document, reason, message, now)
        if written is not None:
            logger.error(message, extra={"reason": reason, **about(job.key)})
            await self._cluster.write_status(job, written.status)
            await self._post(job, document["metadata"].get("generation", 0), 0, written.events, now)
        return BLOCKED_SECONDS

    async def _tell(self, job: TrainingJob, facts: Facts, decision: Decision, memory: Memory) -> None:
        pods = {p.uid: p for p in facts.pods}
        secret_token = self._keys.token(job, facts.child.token) if facts.child is not None else None
        if secret_token is None:
            return
        if decision.tell and decision.order is not None:
            memory.refused = {}
            for version, uids in _by_version(facts.agents, decision.tell).items():
                told, order = [pods[uid] for uid in uids], decision.order.in_version(version)
                memory.refused |= dict(await self._agents.order(told, order, secret_token))
        if decision.release:
            release = Release(attempt=decision.record.attempt, complete=True)
            await self._agents.release([pods[uid] for uid in decision.release], release, secret_token)

    async def _post(
        self, job: JobReference, generation: int, attempt: int, events: Iterable[Event], now: datetime
    ) -> None:
        at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        for event in events:
            name = _event_name(job, generation, attempt, event)
            await self._cluster.post_event(job, event.reason, event.message, warning=event.warning, at=at, name=name)

    async def _evict(self, job: TrainingJob, name: str, uid: str) -> None:
        """A node that ends takes its pod with it in any case, so that a refusal is no reason not to go on."""
        try:
            await self._cluster.evict(job.key.namespace, name, uid)
        except ApiError as error:
            if error.status != 403:
                raise
            logger.warning("pod %s may not be evicted: %s", name, error, extra=about(job.key))

    async def _shape_pods(
        self, job: TrainingJob, facts: Facts, shaping: Shaping | None, decision: Decision, memory: Memory
    ) -> tuple[Decision, Refusal | None]:
        """Creates, suspends, resumes or deletes the Indexed Job and what it needs; returns what the API server refused."""
        match shaping:
            case DeleteJob(uid):
                await self._cluster.delete("Job", job.key, uid)
            case MakeJob(plan):
                return await self._make_pods(job, facts, plan, decision, memory)
            case SetJob(suspend, deadline, completions):
                await self._cluster.set_job(
                    job.key, suspend=suspend, active_deadline_seconds=deadline, completions=completions
                )
        return decision, None

    async def _make_pods(
        self, job: TrainingJob, facts: Facts, plan: Plan, decision: Decision, memory: Memory
    ) -> tuple[Decision, Refusal | None]:
        owners = await self._cluster.service_owners(job.key)
        if owners is not None and job.uid not in owners:
            return decision, Refusal("NameTaken", in_the_way("Service", job.key.name))
        try:
            decision, token = await self._make_secret(job, facts, decision, memory)
            await self._cluster.apply(service(job))
            await self._cluster.apply(indexed_job(job, plan, facts.defaults, token, suspend=False))
        except ApiError as error:
            # a field that does not exist is answered with 500 by server-side apply
            if error.status not in (400, 403, 422) and "typed patch object" not in str(error):
                raise
            return decision, Refusal(
                "PodsRefused", f"spec.template: the API server refused the pods; correct what it names: {error}"
            )
        return decision, None

    def _with_secret(self, job: TrainingJob, decision: Decision, *, taken: bool = False) -> Decision:
        """The decision with the name of a Secret in its record, which is saved before the Secret is made."""
        found = decision.record.token
        if found is not None and found.key_version == self._keys.newest and not taken:
            return decision
        token = TokenSecret(secret_name(job, self._new_suffix()), self._keys.newest)
        return replace(decision, record=decision.record.model_copy(update={"token": token}))

    async def _make_secret(
        self, job: TrainingJob, facts: Facts, decision: Decision, memory: Memory
    ) -> tuple[Decision, TokenSecret]:
        """Makes the Secret that the record names. A name that is taken, by whomever, takes another suffix: it is never written over.

        Raises:
            ConflictError: name after name is taken.
        """
        for _ in range(NAMES_TRIED):
            token = decision.record.token
            text = self._keys.token(job, token)
            if token is None or text is None:
                break
            if token.name == memory.secret_made or await self._cluster.create_secret(secret(job, token.name, text)):
                memory.secret_made = token.name
                return decision, token
            decision = self._with_secret(job, decision, taken=True)
            await self._save(job, facts, decision, memory, acts=True)
        raise ConflictError(409, f"every name that was tried for the Secret of {job.key} is taken")

    async def _save(self, job: TrainingJob, facts: Facts, decision: Decision, memory: Memory, *, acts: bool) -> None:
        """Saves the record before anything is done that depends on it. A conflict means that another leader wrote it: stop here.

        It is written before every act on pods, Job or agents (`acts`), changed or not: only a write over the version that was read
        shows that nobody else leads by now.
        """
        if decision.keep_off:
            return
        acts = acts or bool(decision.tell or decision.release or decision.evict or decision.delete_job)
        stale = self._clock.monotonic() - memory.saved_at >= SAVE_SECONDS
        memory.dirty = memory.dirty or decision.record != memory.saved
        if not (acts or (memory.dirty and (decision.urgent or stale or memory.record_version is None))):
            memory.saved = decision.record
            return
        document: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": record_name(job.key.name),
                "namespace": job.key.namespace,
                "labels": labels(job.key.name),
                "ownerReferences": [owner_reference(job)],
            },
            "data": {**memory.kept, **to_data(decision.record, decision.order, decision.result)},
        }
        try:
            if memory.bill is not None or acts or decision.record.ledger.pod_seconds:
                await self._save_bill(job, facts, decision, memory)
            memory.record_version = await self._cluster.save_config_map(document, memory.record_version)
        except ApiError:
            memory.saved, memory.bill_read = None, False
            raise
        memory.saved, memory.dirty = decision.record, False
        memory.saved_at = self._clock.monotonic()
        for pod in facts.departed:
            memory.departed.pop(pod.uid, None)

    async def _save_bill(self, job: TrainingJob, facts: Facts, decision: Decision, memory: Memory) -> None:
        """Saves the books where the job's namespace has no say, before the record that says the same."""
        before = memory.bill.bill if memory.bill is not None else None
        child = facts.child.uid if facts.child is not None else None
        bill = bill_of(job, decision.record, before, child, fees_now(facts), facts.now, decision.delete_job)
        if bill != before:
            memory.bill = await self._bills.save(bill, memory.bill.version if memory.bill is not None else None)


def _by_version(agents: Mapping[str, AgentStatus], uids: Iterable[str]) -> dict[int, list[str]]:
    """Pods by the version of the contract that their agents speak; one that has not said speaks the newest."""
    versions: dict[int, list[str]] = {}
    for uid in uids:
        version = agents[uid].version if uid in agents else CONTRACT_VERSION
        versions.setdefault(version, []).append(uid)
    return versions


def _event_name(job: JobReference, generation: int, attempt: int, event: Event) -> str:
    """An event's name, equal for an equal event, so that a repeated reconcile does not post it twice."""
    text = f"{job.uid}:{generation}:{attempt}:{event.reason}:{event.message}"
    return f"{job.key.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
