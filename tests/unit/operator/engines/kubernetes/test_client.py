"""The API client against a real HTTP server: whatever answers, or does not, is an ApiError or one failed try."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.engines.cluster import ApiError, ConflictError
from cost_aware_operator.engines.kubernetes import lease as lease_module
from cost_aware_operator.engines.kubernetes.client import KubernetesCluster, default_namespace
from cost_aware_operator.engines.kubernetes.lease import Lease

KEY = JobKey("team", "gpt")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def api_at(url: str) -> AsyncIterator[client.ApiClient]:
    async with client.ApiClient(client.Configuration(host=url)) as api:
        yield api


@asynccontextmanager
async def api_of(handler: Handler) -> AsyncIterator[client.ApiClient]:
    """A client of a server whose every answer is the handler's."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(application) as server, api_at(f"http://127.0.0.1:{server.port}") as api:
        yield api


@asynccontextmanager
async def api_refused() -> AsyncIterator[client.ApiClient]:
    """A client of a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with api_at(f"http://127.0.0.1:{taken.getsockname()[1]}") as api:
            yield api


def saying(text: str, status: int = 200, kind: str = "application/json") -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type=kind)

    return handler


async def hanging_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("status", [200, 503])
async def test_an_answer_that_is_not_json_is_an_api_error_that_shows_it(status: int) -> None:
    async with api_of(saying("<html>the proxy is full</html>", status, "text/html")) as api:
        with pytest.raises(ApiError, match="the proxy is full") as raised:
            await KubernetesCluster(api).training_job(KEY)
    assert raised.value.status == status


async def test_a_refused_connection_is_an_api_error() -> None:
    async with api_refused() as api:
        with pytest.raises(ApiError, match="cannot be reached") as raised:
            await KubernetesCluster(api).training_job(KEY)
    assert raised.value.status == 0


async def test_a_connection_that_is_cut_is_an_api_error() -> None:
    async with api_of(hanging_up) as api:
        with pytest.raises(ApiError, match="cannot be reached"):
            await KubernetesCluster(api).training_job(KEY)


async def test_a_conflict_and_a_missing_object_are_told_apart_from_other_refusals() -> None:
    async with api_of(saying('{"message": "somebody was first"}', 409)) as api:
        with pytest.raises(ConflictError, match="somebody was first"):
            await KubernetesCluster(api).training_job(KEY)
    async with api_of(saying('{"message": "none"}', 404)) as api:
        assert await KubernetesCluster(api).training_job(KEY) is None
    async with api_of(saying('{"message": "not yours"}', 403)) as api:
        with pytest.raises(ApiError, match="not yours"):
            await KubernetesCluster(api).training_job(KEY)


async def test_a_refused_connection_is_one_failed_try_for_the_lease_and_not_the_elector_s_end() -> None:
    record = LeaderElectionRecord("me", "15", "2026-01-01 12:00:00", "2026-01-01 12:00:00")
    async with api_refused() as api:
        lease = Lease("lock", "team", "me", api)
        found, why = await lease.get("lock", "team")
        assert not found
        assert getattr(why, "body", "absent") is None
        assert not await lease.create("lock", "team", record)
        lease.lease_reference = client.V1Lease(metadata=client.V1ObjectMeta(name="lock"), spec=client.V1LeaseSpec())
        assert not await lease.update("lock", "team", record)


async def test_a_server_that_never_answers_is_one_failed_try_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(request: web.Request) -> web.Response:
        await request.read()
        await stop.wait()
        return web.Response()

    stop = asyncio.Event()
    monkeypatch.setattr(lease_module, "TIMEOUT_SECONDS", 0.2)
    async with api_of(silent) as api:
        try:
            found, _ = await Lease("lock", "team", "me", api).get("lock", "team")
            assert not found
        finally:
            stop.set()


def kubeconfig(namespace: str | None) -> str:
    context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "elsewhere", "context": {"cluster": "c", "user": "u", "namespace": "other"}},
            {"name": "here", "context": context},
        ],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
    }
    return yaml.safe_dump(document)


@pytest.mark.parametrize(("written", "expected"), [("team", "team"), (None, "default")])
def test_the_namespace_is_that_of_the_kubeconfig_s_context(
    written: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config"
    path.write_text(kubeconfig(written))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    assert default_namespace() == expected


def test_without_a_kubeconfig_the_namespace_is_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    assert default_namespace() == "default"


@pytest.mark.parametrize("status", [201, 404, 409, 429])
async def test_an_eviction_names_the_pod_that_is_meant_and_may_be_refused_for_now(status: int) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json()))
        return web.json_response({"message": "no"}, status=status)

    async with api_of(handler) as api:
        await KubernetesCluster(api).evict("team", "gpt-1-a", "pod-1")
    ((path, body),) = asked
    assert path == "/api/v1/namespaces/team/pods/gpt-1-a/eviction"
    assert body["deleteOptions"] == {"preconditions": {"uid": "pod-1"}}


async def test_an_eviction_without_permission_is_an_error() -> None:
    async with api_of(saying('{"message": "forbidden"}', 403)) as api:
        with pytest.raises(ApiError, match="403"):
            await KubernetesCluster(api).evict("team", "gpt-1-a", "pod-1")


async def test_nodes_that_may_not_be_listed_are_unknown_and_types_are_asked_for() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.query["labelSelector"])
        return web.json_response({"items": [{"metadata": {"name": "n"}}]})

    async with api_of(handler) as api:
        assert await KubernetesCluster(api).nodes(["a", "b"]) == [{"metadata": {"name": "n"}}]
    assert asked == ["node.kubernetes.io/instance-type in (a,b)"]
    async with api_of(saying("{}", 403)) as api:
        assert await KubernetesCluster(api).nodes([]) is None


@pytest.mark.parametrize(
    ("date", "heard"),
    [("Thu, 01 Jan 2026 12:00:00 GMT", [datetime(2026, 1, 1, 12, tzinfo=UTC)]), ("yesterday", []), ("", [])],
)
async def test_the_server_s_time_is_heard_with_each_answer(date: str, heard: list[datetime]) -> None:
    async def dated(_: web.Request) -> web.Response:
        return web.Response(text="{}", content_type="application/json", headers={"Date": date})

    found: list[datetime] = []
    async with api_of(dated) as api:
        await KubernetesCluster(api, found.append).training_job(KEY)
    assert found == heard
