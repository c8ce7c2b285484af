"""A Prometheus server in the ranks' stead, over real sockets: answers recorded from Prometheus 2.42 that scraped two ranks.

Its scrape configuration had labels `namespace` and `job` of its own, so the ranks' are `exported_namespace` and `exported_job`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.factories.endpoints import pod

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.sources.metrics_source import Answers
from cost_aware_operator.sources.prometheus import PrometheusSource
from cost_aware_trainer.contract import LaunchStage, Phase

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/prometheus.json").read_text())
PODS = [pod(), replace(pod(), name="gpt-1-b", uid="v", index=1)]
Answering = Callable[[web.Request], Awaitable[web.Response]]


def recorded(change: Callable[[dict[str, Any]], None] = lambda _: None) -> Answering:
    """A server that says what was recorded, after a change."""
    said = copy.deepcopy(RECORDED)
    change(said)

    async def answer(request: web.Request) -> web.Response:
        query = (await request.post())["query"]
        assert isinstance(query, str)
        assert 'namespace="team",job="gpt"' in query
        assert 'exported_namespace="team",exported_job="gpt"' in query
        return web.json_response(said["told" if query.startswith("timestamp(") else "read"])

    return answer


@asynccontextmanager
async def serving(answer: Answering) -> AsyncIterator[str]:
    application = web.Application()
    application.add_routes([web.post("/prom/api/v1/query", answer)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/prom/"
    finally:
        await runner.cleanup()


async def asked(answer: Answering, timeout_seconds: float = 2.0) -> Answers:
    async with serving(answer) as url, aiohttp.ClientSession(auto_decompress=False) as session:
        return await PrometheusSource(session, url, timeout_seconds).samples(JobKey("team", "gpt"), PODS, 1)


async def test_the_ranks_series_become_the_same_samples_as_from_the_ranks() -> None:
    answers = await asked(recorded())
    assert answers.unheard == {}
    first, second = answers.samples["u"][0], answers.samples["v"][0]
    assert (first.rank, second.rank, first.attempt) == (0, 1, 2)
    assert first.loss is None, "NaN is not known"
    assert first.tokens == 100 * first.steps
    assert first.phase_seconds[Phase.COMPUTE] == pytest.approx(first.steps / 2)
    assert 0 < answers.age_seconds < 2, "a sample is as old as Prometheus' last scrape"


async def test_the_stages_of_an_attempt_s_start_are_read() -> None:
    def started(said: dict[str, Any]) -> None:
        found = said["read"]["data"]["result"]
        for rank, seconds in (("0", 1.5), ("1", 2.5)):
            one = copy.deepcopy(next(one for one in found if one["metric"]["rank"] == rank))
            one["metric"] |= {"__name__": "catj_rank_reconfiguration_seconds", "stage": "load"}
            one["value"][1] = str(seconds)
            found.append(one)

    answers = await asked(recorded(started))
    assert [answers.samples[uid][0].stage_seconds for uid in "uv"] == [{LaunchStage.LOAD: 1.5}, {LaunchStage.LOAD: 2.5}]


async def test_a_token_is_sent_and_may_be_replaced_and_one_that_is_missing_is_told_of(tmp_path: Path) -> None:
    token, seen = tmp_path / "token", []

    async def guarded(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return await recorded()(request)

    async with serving(guarded) as url, aiohttp.ClientSession(auto_decompress=False) as session:
        source = PrometheusSource(session, url, 2.0, token_file=token)
        unheard = (await source.samples(JobKey("team", "gpt"), PODS, 1)).unheard
        assert len(unheard) == 2
        assert all("No such file" in why for why in unheard.values())
        for text in ("first", "second"):
            token.write_text(text + "\n")
            assert not (await source.samples(JobKey("team", "gpt"), PODS, 1)).unheard
    assert seen == ["Bearer first"] * 2 + ["Bearer second"] * 2


async def test_series_of_an_older_attempt_are_dropped() -> None:
    def both(said: dict[str, Any]) -> None:
        for answer in said.values():
            if answer["status"] != "success":
                continue
            found = answer["data"]["result"]
            old = copy.deepcopy(found)
            for one in old:
                one["metric"]["attempt"], one["value"][1] = "1", "999999"
            answer["data"]["result"] = [*old[: len(old) // 2], *found, *old[len(old) // 2 :]]

    assert (await asked(recorded(both))).samples == (await asked(recorded())).samples


async def test_what_was_read_long_ago_is_not_the_present() -> None:
    def old(said: dict[str, Any]) -> None:
        for one in said["told"]["data"]["result"]:
            one["value"][1] = str(float(one["value"][1]) - 200)

    answers = await asked(recorded(old))
    assert answers.samples == {}
    assert "read it last 20" in answers.unheard["rank 0 (pod gpt-0-a)"]


async def test_a_rank_without_series_is_named() -> None:
    def one_missing(said: dict[str, Any]) -> None:
        data = said["read"]["data"]
        data["result"] = [one for one in data["result"] if one["metric"]["rank"] == "0"]

    answers = await asked(recorded(one_missing))
    assert set(answers.samples) == {"u"}
    assert "has no series of it" in answers.unheard["rank 1 (pod gpt-1-b)"]


async def hangs(_: web.Request) -> web.Response:
    await asyncio.sleep(20)
    return web.Response()


async def refuses(_: web.Request) -> web.Response:
    return web.json_response(RECORDED["bad"], status=400)


async def floods(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * 40_000_000)


async def fails(_: web.Request) -> web.Response:
    return web.Response(status=503, text="no healthy upstream")


async def lies(_: web.Request) -> web.Response:
    return web.json_response({"status": "success", "data": {"result": [{"metric": 5, "value": ["x"]}]}})


async def nests(_: web.Request) -> web.Response:
    return web.Response(text="[" * 200_000)


@pytest.mark.parametrize("answer", [hangs, refuses, floods, fails, lies, nests], ids=lambda a: a.__name__)
async def test_a_server_that_misbehaves_is_as_a_silent_endpoint_and_named(answer: Answering) -> None:
    began = time.monotonic()
    answers = await asked(answer, timeout_seconds=1.0)
    assert time.monotonic() - began < 5
    assert answers.samples == {}
    assert set(answers.unheard) == {"rank 0 (pod gpt-0-a)", "rank 1 (pod gpt-1-b)"}
    assert all("/prom/api/v1/query" in why for why in answers.unheard.values())


async def test_a_server_that_is_not_there_is_told() -> None:
    async with aiohttp.ClientSession() as session:
        answers = await PrometheusSource(session, "http://127.0.0.1:9").samples(JobKey("team", "gpt"), PODS, 1)
    assert len(answers.unheard) == 2


async def test_no_redirect_of_the_server_is_followed_and_the_token_goes_nowhere_else(tmp_path: Path) -> None:
    seen: list[str] = []
    token = tmp_path / "token"
    token.write_text("secret")

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        return await recorded()(request)

    async with serving(elsewhere) as other:

        async def redirects(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{other}api/v1/query"})

        async with serving(redirects) as url, aiohttp.ClientSession(auto_decompress=False) as session:
            source = PrometheusSource(session, url, 2.0, token_file=token)
            answers = await source.samples(JobKey("team", "gpt"), PODS, 1)
    assert seen == []
    assert all("sends elsewhere (307)" in why for why in answers.unheard.values())


async def test_what_the_server_says_does_not_get_into_the_reason() -> None:
    async def says(_: web.Request) -> web.Response:
        return web.json_response({"status": "error", "error": "DB_PASSWORD=hunter2"}, status=400)

    answers = await asked(says)
    assert not any("hunter2" in why for why in answers.unheard.values())


async def test_series_of_another_address_are_not_the_job_s_whatever_they_call_themselves() -> None:
    def forged(said: dict[str, Any]) -> None:
        for answer in said.values():
            if answer["status"] != "success":
                continue
            other = copy.deepcopy(answer["data"]["result"])
            for one in other:
                one["metric"] |= {"instance": "10.9.9.9:9400", "namespace": "stranger", "attempt": "7"}
                one["value"][1] = "999999"
            answer["data"]["result"] += other

    assert (await asked(recorded(forged))).samples == (await asked(recorded())).samples


async def test_where_the_scrape_configuration_hides_the_address_the_pod_s_name_counts() -> None:
    def named(name: str) -> Callable[[dict[str, Any]], None]:
        def change(said: dict[str, Any]) -> None:
            for answer in said.values():
                for one in answer.get("data", {}).get("result", []):
                    pods = {"0": "gpt-0-a", "1": "gpt-1-b"}
                    one["metric"] |= {"instance": "a-node", "pod": name or pods[one["metric"]["rank"]]}

        return change

    assert set((await asked(recorded(named("")))).samples) == {"u", "v"}
    assert not (await asked(recorded(named("stranger")))).samples
