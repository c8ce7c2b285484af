"""Endpoints that misbehave, over real sockets: a reconcile is never held up for long, and never reads without end."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import aiohttp
import pytest
from tests.support.factories.endpoints import pod

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.sources import rank_endpoints as ranks
from cost_aware_operator.sources.metrics_source import Answers
from cost_aware_operator.sources.rank_endpoints import RankEndpoints

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
