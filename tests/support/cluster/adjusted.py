"""Jobs that the adjuster looks at often."""

from __future__ import annotations

from typing import Any

import pytest
from devtools.cluster import Space, manifest

MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kvHeads": 2, "ffn": 344, "sequenceLength": 128, "vocabulary": 256}


QUICK = {"policy": "Act", "threshold": 0.9, "windowSeconds": 10, "cooldownSeconds": 20}


PRICED: dict[str, Any] = {"instanceTypes": ["p3.2xlarge"]}


def submitted(space: Space, name: str, nodes: dict[str, Any], degrees: dict[str, Any], **spec: Any) -> dict[str, Any]:
    document = manifest(
        name,
        model=MODEL,
        nodes={**PRICED, **nodes},
        parallelism=degrees,
        **({"batch": {"global": 8}, "trainer": {"config": {"steps": 500}}, "efficiency": QUICK} | spec),
    )
    space.submit(document)
    return document


def closes(status: dict[str, Any]) -> None:
    """The dollars by cause add up to the whole."""
    cost = status["cost"]
    assert sum(cost["byCause"].values()) == pytest.approx(cost["accruedUSD"], rel=0.005)
