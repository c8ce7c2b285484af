"""`python -m cost_aware_operator.app.main`: the operator's process.

Order: probes first, then leadership by a Lease, then kopf's watches and the workers. Losing the Lease ends the process: what it was
doing is safe to repeat, and the next leader repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Coroutine
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio import client
from kubernetes.aio.leaderelection import electionconfig, leaderelection

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.app.logs import LogFormat, set_up_logs
from cost_aware_operator.app.probes import Health, serve
from cost_aware_operator.app.settings import Settings, SettingsError
from cost_aware_operator.app.telemetry import Telemetry
from cost_aware_operator.app.watches import Version, kopf_settings, registry, version_of
from cost_aware_operator.control.loop.queue import KeyedQueue
from cost_aware_operator.control.loop.reconcile import Reconciler
from cost_aware_operator.control.loop.worker import work
from cost_aware_operator.control.reading.bills import Bills
from cost_aware_operator.control.reading.gather import Gatherer
from cost_aware_operator.control.reading.memory import Memories
from cost_aware_operator.control.reading.nodes import CachedNodes
from cost_aware_operator.engines.cluster import ApiError
from cost_aware_operator.engines.kubernetes.client import KubernetesCluster, connect
from cost_aware_operator.engines.kubernetes.lease import Lease
from cost_aware_operator.sources.clock import SteadyClock, SystemClock
from cost_aware_operator.sources.files import defaults_file, price_file
from cost_aware_operator.sources.metrics_source import MetricsSource
from cost_aware_operator.sources.prometheus import PrometheusSource
from cost_aware_operator.sources.rank_endpoints import RankEndpoints
from cost_aware_operator.workload.secret import KeyRing

logger = logging.getLogger("cost_aware_operator")
LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 15, 10, 2
COMPARE_SECONDS = 60.0
"""How often all jobs are listed, to find out whether the watches still deliver, and to work on what they missed."""


class Operator:
    """One replica."""

    def __init__(self, settings: Settings, api: client.ApiClient, session: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.clock = SteadyClock(SystemClock())
        self.cluster = KubernetesCluster(api, self.clock.heard)
        self.bills = Bills(self.cluster, settings.namespace)
        self.queue: KeyedQueue[JobKey] = KeyedQueue(self.clock.monotonic)
        self.memories = Memories()
        self.telemetry = Telemetry(lambda: len(self.queue), lambda: self.queue.oldest_seconds)
        self.health = Health(self.clock.monotonic, lambda: self.queue.oldest_seconds)
        self.telemetry.watch_lag.set_function(lambda: self.health.watch_lag_seconds)
        self._seen: dict[JobKey, Version] = {}
        self._serving: asyncio.Task[Any] | None = None
        self._api = api
        self._ranks = RankEndpoints(session, settings.scrape_concurrency)
        self._source: MetricsSource = (
            PrometheusSource(session, settings.prometheus_url, token_file=settings.prometheus_token_file)
            if settings.prometheus_url is not None
            else self._ranks
        )

    async def lead(self) -> None:
        """Takes the Lease, then works until the Lease is lost or the task is cancelled."""
        lock = Lease(self.settings.lease_name, self.settings.namespace, self.settings.identity, self._api)
        election = electionconfig.Config(
            lock,
            lease_duration=LEASE_SECONDS,
            renew_deadline=RENEW_SECONDS,
            retry_period=RETRY_SECONDS,
            onstarted_leading=self._serve_jobs,
            onstopped_leading=self._lost,
        )
        logger.info("%s asks for the lease %s", self.settings.identity, self.settings.lease_name)
        self.health.standing_by = True
        try:
            await leaderelection.LeaderElection(election).run()
        finally:
            if self._serving is not None:
                # the elector does not end what it started; the Lease is given up only when nothing is done in its name any more
                self._serving.cancel()
                await asyncio.gather(self._serving, return_exceptions=True)
            with contextlib.suppress(ApiError):
                await self.cluster.release_lease(
                    self.settings.namespace, self.settings.lease_name, self.settings.identity
                )

    async def _lost(self) -> None:
        logger.error("the lease was lost; this process ends and its successor goes on")
        self.health.leading = False

    async def _serve_jobs(self) -> None:
        self._serving = asyncio.current_task()
        logger.info("%s leads", self.settings.identity)
        self.health.leading = True
        self.telemetry.leader.set(1)
        try:
            reconciler = await self._reconciler()
            async with asyncio.TaskGroup() as group:
                for _ in range(self.settings.workers):
                    group.create_task(work(self.queue, reconciler.reconcile, self.telemetry, self.clock.monotonic))
                group.create_task(self._watch())
                group.create_task(self._compare())
        except Exception:
            # without this the elector would go on renewing the Lease of a process that does nothing
            logger.exception("the operator cannot go on")
            os._exit(1)

    async def _reconciler(self) -> Reconciler:
        made = {KeyRing.entry(self.clock.now()): base64.b64encode(secrets.token_bytes(32)).decode()}
        keys = KeyRing.of(await self.cluster.own_secret(self.settings.namespace, self.settings.key_secret, made))
        for key in await self.bills.open_keys():
            # a job that went while no operator looked is told of by its bill alone
            await self.queue.add(key)
        return Reconciler(
            cluster=self.cluster,
            bills=self.bills,
            agents=self._ranks,
            gatherer=Gatherer(
                self.cluster,
                self._ranks,
                self._source,
                CachedNodes(self.cluster, self.clock),
                price_file(self.settings.prices_file),
                defaults_file(self.settings.pod_defaults_file),
                self.bills,
                self.clock,
                keys.versions,
                self.clock.problem,
                self.settings.scrape_interval_seconds,
            ),
            memories=self.memories,
            clock=self.clock,
            keys=keys,
            new_suffix=lambda: secrets.token_hex(4),
            published=self.telemetry.published,
            forgotten=self.telemetry.forgotten,
        )

    async def _compare(self) -> None:
        suspects: set[tuple[JobKey, Version]] = set()
        while True:
            await asyncio.sleep(COMPARE_SECONDS)
            try:
                documents = await self.cluster.training_jobs(self.settings.watch_namespaces)
            except ApiError as error:
                logger.warning("jobs cannot be listed: %s", error)
                continue
            listed = {
                (JobKey(d["metadata"]["namespace"], d["metadata"]["name"]), version_of(d["metadata"]))
                for d in documents
            }
            missed = {(key, version) for key, version in listed if self._seen.get(key) != version}
            # a change of this very moment may still be on its way: only what was missing before as well counts
            self.health.compared(bool(missed & suspects))
            suspects = missed
            # a deletion that the watches missed leaves a bill open
            gone = await self.bills.open_keys() - {key for key, _ in listed}
            for key in {key for key, _ in missed} | gone:
                await self.queue.add(key)

    async def _watch(self) -> None:
        ready = asyncio.Event()
        namespaces = self.settings.watch_namespaces
        settings = kopf_settings()
        settings.scanning.disabled = bool(namespaces)

        async def synced() -> None:
            await ready.wait()
            self.health.synced = True
            logger.info("watching %s", ", ".join(namespaces) or "all namespaces")

        async with asyncio.TaskGroup() as group:
            group.create_task(synced())
            await kopf.operator(
                registry=registry(self.queue, self.memories, self.clock, self._seen),
                settings=settings,
                clusterwide=not namespaces,
                namespaces=namespaces,
                # else kopf asks for the user's name, which a container's user need not have
                identity=cast("Any", self.settings.identity),
                ready_flag=ready,
            )
            raise RuntimeError("kopf's watches ended")


async def run(settings: Settings) -> None:
    """The whole process, until SIGTERM."""
    api = await connect()
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        operator = Operator(settings, api, session)
        runner = await serve(operator.health, operator.telemetry.registry, settings.port)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            await _first(operator.lead(), stop.wait())
        finally:
            await runner.cleanup()
            await api.close()


async def _first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs until one ends; cancels the others; raises what the one raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def main() -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="cost-aware-operator", description="Runs CostAwareTrainingJobs.")
    parser.add_argument("--log-format", choices=[*LogFormat], help="text, or json for a log store (CATJ_LOG_FORMAT)")
    asked = parser.parse_args().log_format
    try:
        settings = Settings.from_environment({**os.environ, **({"CATJ_LOG_FORMAT": asked} if asked else {})})
    except SettingsError as error:
        sys.exit(f"cost-aware-operator: {error}")
    set_up_logs(settings.log_format, settings.log_level)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
