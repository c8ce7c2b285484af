"""A finished job's summary tells each change of plan, what it promised and what came of it."""

from __future__ import annotations

from tests.support.factories.facts import START

from cost_aware_operator.api.job import JobKey
from cost_aware_operator.api.status import AdjustmentStatus, JobState, JobStatus
from cost_aware_operator.cli.jobs.views import summary


def test_changes_are_told_with_promise_and_outcome() -> None:
    change = AdjustmentStatus(
        time=START, attempt=2, kind="Resize", from_="2x1x1 on 2 nodes", to="1x1x1 on 1 node", reason="",
        predicted_savings_usd=24.25, realised_savings_usd=25.24, outcome="Kept",
    )  # fmt: skip
    open_one = change.model_copy(update={"realised_savings_usd": None, "outcome": "Checking"})
    text = summary(JobKey("team", "gpt"), JobStatus(state=JobState.SUCCEEDED, adjustments=(change, open_one)))
    assert "2x1x1 on 2 nodes -> 1x1x1 on 1 node: $24.25 predicted, $25.24 realised (Kept)" in text
    assert "$24.25 predicted (Checking)" in text
