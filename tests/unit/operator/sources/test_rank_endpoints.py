"""Endpoints that misbehave, over real sockets: a reconcile is never held up for long, and never reads without end."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import aiohttp
import pytest
from tests.support.factories.endpoints import pod

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.sources import rank_endpoints as ranks
from cost_aware_operator.sources.metrics_source import AgentAnswers, Answers
from cost_aware_operator.sources.rank_endpoints import RankEndpoints
from cost_aware_trainer.contract import Release

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GOOD = b'catj_rank_step{namespace="n",job="j",attempt="1",rank="0"} 5\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n"


async def honest(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + f"Content-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD)


async def hangs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def drips(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    for _ in range(300):
        writer.write(b"# drip\n")
        await writer.drain()
        await asyncio.sleep(0.1)


async def floods(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    for _ in range(100):
        writer.write(b"# flood\n" * 131072)
        await writer.drain()


async def bombs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    packed = gzip.compress(b"# zero\n" * 14_000_000)
    writer.write(HEAD + f"Content-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode() + packed)


async def breaks(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff\xfe nonsense \x00")


async def binary(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n" + bytes(range(256)))


@asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await behaviour(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def says(body: bytes) -> Behaviour:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    return answer


async def ends(port: int, monkeypatch: pytest.MonkeyPatch, pods: int = 1) -> dict[str, datetime]:
    monkeypatch.setattr(ranks, "AGENT_PORT", port)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        return await RankEndpoints(session, 4, timeout_seconds=1.0).ends([pod()] * pods)


async def test_only_a_few_agents_are_asked_when_others_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def knows_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async with serving(knows_nothing) as port:
        assert await ends(port, monkeypatch, pods=100) == {}
    assert asked == ranks.ASKED


async def test_an_agent_tells_when_others_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(says(b'{"ends": [{"pod_uid": "a", "ended_at": 1767225600.5}]}')) as port:
        assert await ends(port, monkeypatch) == {"a": datetime(2026, 1, 1, microsecond=500_000, tzinfo=UTC)}


@pytest.mark.parametrize(
    "behaviour",
    [
        hangs,
        breaks,
        floods,
        says(b'{"ends": [{"pod_uid": "a", "ended_at": 1e300}]}'),
        says(b'{"ends": [{"pod_uid": "a", "ended_at": NaN}]}'),
        says(b'{"status": "of another version"}'),
    ],
    ids=["hangs", "breaks", "floods", "huge", "nan", "unknown"],
)
async def test_an_agent_that_tells_nonsense_of_ends_is_not_believed(
    behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(behaviour) as port:
        assert await ends(port, monkeypatch) == {}


async def scrape(port: int, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.setattr(ranks, "METRICS_PORT", port)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        return await RankEndpoints(session, 4, timeout_seconds=1.0).samples(JobKey("n", "j"), [pod()], 1)


async def test_an_honest_endpoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(honest) as port:
        answers = await scrape(port, monkeypatch)
    assert answers.samples["u"][0].step == 5
    assert answers.unheard == {}


@pytest.mark.parametrize("behaviour", [hangs, drips, floods, bombs, breaks, binary], ids=lambda b: b.__name__)
async def test_a_misbehaving_endpoint_is_given_up_in_time_and_named(
    behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(behaviour) as port:
        began = time.monotonic()
        answers = await scrape(port, monkeypatch)
        took = time.monotonic() - began
    assert took < 5
    assert answers.samples == {}
    (why,) = answers.unheard.values()
    assert next(iter(answers.unheard)) == "rank 0 (pod gpt-0-a)"
    assert why


SECRET = b"DB_PASSWORD=hunter2"


def redirects(status: bytes, port: int) -> Behaviour:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = f"http://127.0.0.1:{port}/".encode()
        writer.write(
            b"HTTP/1.1 "
            + status
            + b" Elsewhere\r\nLocation: "
            + where
            + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )

    return answer


@pytest.mark.parametrize("status", [b"301", b"302", b"303", b"307", b"308"])
async def test_no_redirect_of_a_pod_is_followed(status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def secret(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await says(GOOD)(_, writer)

    async with serving(secret) as elsewhere, serving(redirects(status, elsewhere)) as port:
        answers = await scrape(port, monkeypatch)
        assert await ends(port, monkeypatch) == {}
        assert await told(port, monkeypatch) is None
    assert asked == 0
    assert answers.samples == {}
    assert f"the status {status.decode()}, not 200" in answers.unheard["rank 0 (pod gpt-0-a)"]


async def told(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "AGENT_PORT", port)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        endpoints = RankEndpoints(session, 4, timeout_seconds=1.0)
        assert await endpoints.statuses([pod()]) == AgentAnswers()
        await endpoints.release([pod()], Release(attempt=1, complete=True), "token")


@pytest.mark.parametrize(
    "body",
    [
        SECRET,
        b"catj_rank_step " + SECRET,
        b'catj_rank_step{rank="' + SECRET + b'",attempt="1"} 5\n',
        b'catj_rank_step{rank="0",attempt="1"} 5\ncatj_rank_phase_seconds_total{phase="' + SECRET + b'"} 1\n',
    ],
    ids=["text", "value", "label", "phase"],
)
async def test_nothing_that_a_pod_says_gets_into_the_reason(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(says(body)) as port:
        answers = await scrape(port, monkeypatch)
    assert answers.unheard == {"rank 0 (pod gpt-0-a)": "its answer is not a rank's metrics"}


async def test_nothing_of_an_answer_that_is_not_http_gets_into_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def raw(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SECRET + b"\r\n\r\n")

    async with serving(raw) as port:
        answers = await scrape(port, monkeypatch)
    assert "hunter2" not in answers.unheard["rank 0 (pod gpt-0-a)"]


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "metadata.internal", None])
async def test_a_pod_is_asked_at_an_address_that_a_pod_can_have_only(address: str | None) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        endpoints = RankEndpoints(session, 4, timeout_seconds=1.0)
        odd = replace(pod(), ip=address)
        answers = await endpoints.samples(JobKey("n", "j"), [odd], 1)
        await endpoints.release([odd], Release(attempt=1, complete=True), "token")
    assert not answers.samples
    assert all("address" in why for why in answers.unheard.values())
