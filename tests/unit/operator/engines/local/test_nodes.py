"""Declared nodes: what a person may write, what a node then has, and what has no price."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cost_aware_operator.costs.tables.prices import shipped
from cost_aware_operator.engines.local.nodes import (
    NodeSize,
    NodeTextError,
    declared_nodes,
    node_documents,
    price_rows,
    put_nodes,
    this_machine,
)
from cost_aware_operator.engines.local.store import ObjectKey, ObjectStore
from cost_aware_operator.workload.views import node_view

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HERE = NodeSize(4, 8 * 2**30, 0)
BOOK = shipped()


def test_a_known_type_has_its_size_and_its_price_from_the_tables() -> None:
    documents = node_documents(declared_nodes(["p3.8xlarge*2"], BOOK, HERE), NOW)
    assert [one["metadata"]["name"] for one in documents] == ["p3.8xlarge-0", "p3.8xlarge-1"]
    view = node_view(documents[1])
    assert (view.instance_type, view.zone, view.spot, view.ready) == ("p3.8xlarge", "local", False, True)
    assert view.allocatable == {
        "cpu": "32000m",
        "memory": f"{244 * 2**20}Ki",
        "pods": "110",
        "nvidia.com/gpu": "4",
    }
    assert BOOK.price(view.instance_type) is not None


def test_without_a_declaration_there_is_this_machine_and_it_has_no_price() -> None:
    nodes = declared_nodes([], BOOK, HERE)
    (document,) = node_documents(nodes, NOW)
    view = node_view(document)
    assert dict(view.allocatable) == {"cpu": "4000m", "memory": f"{8 * 2**20}Ki", "pods": "110"}
    assert BOOK.overridden(price_rows(nodes, None, "2026-01-01")).price(view.instance_type) is None
    price = BOOK.overridden(price_rows(nodes, 0.5, "2026-01-01")).price(view.instance_type)
    assert price is not None
    assert (price.hourly_usd, price.source) == (0.5, "--hourly")


def test_a_type_that_no_table_knows_needs_a_price_and_is_as_large_as_this_machine() -> None:
    with pytest.raises(NodeTextError, match=r"p3.2xlrge: not in the price tables: did you mean p3.2xlarge"):
        declared_nodes(["p3.2xlrge"], BOOK, HERE)
    (nodes,) = declared_nodes(["desk*3"], BOOK, HERE, 0.2)
    assert (nodes.count, nodes.size) == (3, HERE)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["p3.2xlarge*0"], "from 1 to 500"),
        (["p3.2xlarge*501"], "from 1 to 500"),
        (["p3.2xlarge*99999999999999"], "from 1 to 500"),
        (["p3.2xlarge*-1"], "such as p3.2xlarge"),
        (["p3.2xlarge * 2"], "no spaces"),
        ([""], "write an instance type"),
        (["*2"], "write an instance type"),
        (["p3.2xlarge*2*2"], "write an instance type"),
        (["p3.2xlarge*٣"], "write an instance type"),
        (["p3.2xlarge", "p3.2xlarge*2"], "is there twice"),
        (["p3.2xlarge*300", "p3.8xlarge*300"], "more than 500"),
    ],
)
def test_bad_text_is_refused_with_what_to_write(texts: list[str], said: str) -> None:
    with pytest.raises(NodeTextError, match=said):
        declared_nodes(texts, BOOK, HERE)


@pytest.mark.parametrize("hourly_usd", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_a_price_that_cannot_be_is_refused(hourly_usd: float) -> None:
    with pytest.raises(NodeTextError, match="--hourly"):
        declared_nodes([], BOOK, HERE, hourly_usd)


def test_a_machine_is_as_large_as_its_control_group_lets_it_be(tmp_path: Path) -> None:
    for name, text in (
        ("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\n"),
        ("sys/fs/cgroup/memory.max", "1073741824\n"),
        ("sys/fs/cgroup/cpu.max", "50000 100000\n"),
        ("proc/driver/nvidia/gpus/0000:01/information", ""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert this_machine(tmp_path, lambda _: None) == NodeSize(0.5, 2**30, 1)
    assert this_machine(tmp_path, lambda _: "GPU 0: A\nGPU 1: A\n").gpus == 2
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert this_machine(tmp_path, lambda _: "").memory_bytes == 2**33


def test_declaring_again_changes_nothing_and_others_replace_them() -> None:
    store = ObjectStore(lambda: NOW, lambda: "uid")
    for _ in range(2):
        put_nodes(store, node_documents(declared_nodes(["p3.2xlarge*2"], BOOK, HERE), NOW))
    version = store.version
    put_nodes(store, node_documents(declared_nodes(["p3.2xlarge*2"], BOOK, HERE), NOW.replace(year=2027)))
    assert store.version == version
    put_nodes(store, node_documents(declared_nodes([], BOOK, HERE), NOW))
    assert [one["metadata"]["name"] for one in store.list("Node")] == ["local-0"]
    found = store.get(ObjectKey("Node", "", "local-0"))
    assert found is not None
    assert node_view(found).ready
