"""How a job's life ends: deleted, out of budget, past its deadline, refused by the trainer, cleaned up after its time.

All jobs of this file run beside each other: none of them waits for another, and no test measures how fast one is.
"""

from __future__ import annotations

from typing import Any

import pytest
from devtools.cluster import Space, manifest

pytestmark = [pytest.mark.cluster]
ENDLESS: dict[str, Any] = {"config": {"steps": 100_000}}
JOBS: dict[str, dict[str, Any]] = {
    "gone": {"trainer": ENDLESS},
    "poor": {"trainer": ENDLESS, "budget": {"totalUSD": 0.025}},
    "late": {"trainer": ENDLESS, "activeDeadlineSeconds": 20},
    "no-folder": {"trainer": {"config": {"data": {"volume": "data", "folder": "no-such-folder"}}}},
    "short": {"trainer": {"config": {"steps": 3}}, "ttlSecondsAfterFinished": 3},
}


@pytest.fixture(scope="module")
def jobs(space: Space) -> Space:
    """The namespace in which all of them have been submitted."""
    for name, spec in JOBS.items():
        space.submit(manifest(name, **spec))
    return space


def test_deleting_a_running_job_removes_everything(jobs: Space) -> None:
    jobs.wait_step("gone", 5)
    assert jobs.children("gone") == ["ConfigMap", "Job", "Pod", "Secret", "Service"]
    jobs.cluster.run("delete", "catj", "gone", "-n", jobs.name)
    jobs.wait_until(lambda: jobs.children("gone") == [], 90, "end of the children of gone")


def test_a_spent_budget_checkpoints_and_stops(jobs: Space) -> None:
    status = jobs.wait(
        "poor", lambda s: s.get("state") == "Suspended" and not jobs.pods("poor"), 120, "the budget's end"
    )
    exhausted = jobs.condition("poor", "BudgetExhausted")
    assert exhausted["status"] == "True"
    assert "raise spec.budget.totalUSD" in exhausted["message"]
    assert status["cost"]["accruedUSD"] >= 0.025


def test_a_job_past_its_deadline_fails_and_says_so(jobs: Space) -> None:
    status = jobs.wait_finished("late", 120)
    assert status["state"] == "Failed"
    assert jobs.condition("late", "Failed")["reason"] == "DeadlineExceeded"


def test_a_plan_that_only_the_trainer_can_refuse_fails_at_once_with_its_words(jobs: Space) -> None:
    status = jobs.wait_finished("no-folder", 120)
    assert status["state"] == "Failed"
    assert status["attempt"] == 1, "trying again is pointless"
    assert "no-such-folder" in jobs.condition("no-folder", "Failed")["message"]


def test_a_finished_job_is_deleted_after_its_ttl_with_all_it_had(jobs: Space) -> None:
    jobs.wait_until(lambda: not jobs.exists("short"), 120, "end of short")
    jobs.wait_until(lambda: jobs.children("short") == [], 60, "end of the children of short")
