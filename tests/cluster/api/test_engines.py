"""The real API server under the cases by which the store in memory is held: both do the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from devtools.cluster import Space
from tests.support.engine_cases import CASES, Case

from cost_aware_operator.engines.kubernetes.client import KubernetesCluster, connect

pytestmark = pytest.mark.cluster


class KubectlWorld:
    """A namespace of the development cluster, in the hands of kubectl."""

    def __init__(self, space: Space) -> None:
        self.namespace, self._cluster = space.name, space.cluster

    def _run(self, *arguments: str, stdin: str | None = None) -> str:
        return self._cluster.run(*arguments, "-n", self.namespace, stdin=stdin).stdout

    def put(self, document: dict[str, Any]) -> None:
        self._run("create", "-f", "-", stdin=json.dumps(document))

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        text = self._run("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def patch(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        self._run("patch", kind, name, "--type=merge", "-p", json.dumps(patch))

    def remove(self, kind: str, name: str) -> None:
        self._run("delete", kind, name, "--wait=true")


@pytest_asyncio.fixture
async def api(space: Space) -> AsyncIterator[KubernetesCluster]:
    client = await connect(space.cluster.kubeconfig)
    yield KubernetesCluster(client)
    await client.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_api_server(case: Case, api: KubernetesCluster, space: Space) -> None:
    await case(api, KubectlWorld(space))
