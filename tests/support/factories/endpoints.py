"""A pod whose endpoints are on this machine."""

from __future__ import annotations

from datetime import UTC, datetime

from cost_aware_operator.workload.views import PodView


def pod() -> PodView:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return PodView("gpt-0-a", "u", 0, "127.0.0.1", "node", "Running", now, now, None, deleting=False, running=True)
