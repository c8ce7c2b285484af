"""Pods as the ledger sees them, with their price."""

from __future__ import annotations

from datetime import timedelta

from tests.support.factories.facts import START

from cost_aware_operator.costs.tables.prices import Price
from cost_aware_operator.ledger.ledger import PodFacts

PRICE = Price(3.60, "test", "2026-01-01")  # a tenth of a cent a second


def at(seconds: float):
    return START + timedelta(seconds=seconds)


def pod(
    index: int = 0, uid: str = "a", *, start: float = 0.0, end: float | None = None, price: Price | None = PRICE, **over
):
    return PodFacts(
        uid=uid,
        index=index,
        started_at=at(start),
        ended_at=None if end is None else at(end),
        instance_type="p3.2xlarge",
        zone=over.pop("zone", None),
        price=price,
        **over,
    )
