"""What must survive the operator: the newest attempt, who takes part in it, and the ledger. Kept in one ConfigMap."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from cost_aware_operator.adjusting.changes import Change
from cost_aware_operator.adjusting.situation import Window
from cost_aware_operator.ledger.blocks import Baseline
from cost_aware_operator.ledger.ledger import LedgerState
from cost_aware_operator.planning.plan import Plan
from cost_aware_trainer.contract import RunOrder, RunResult

KEY_RECORD = "record.json"
KEY_ORDER = "order.json"
KEY_RESULT = "result.json"


class Considered(BaseModel):
    """The newest search for another plan, and why it changed nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int
    generation: int
    at: datetime
    reason: str
    message: str


class Saves(BaseModel):
    """The checkpoints that were seen in one attempt, and what one of them blocks the ranks for, in the newest attempt that tells."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int = 0
    newest: int = 0
    count: int = 0
    stall_seconds: float | None = None


class Pace(BaseModel):
    """What the ranks did in the newest whole window, under which plan (`plan_key`): known still when they cannot go on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str
    window: Window


class RunRecord(BaseModel):
    """Written before what it says is acted on: an operator that dies in between repeats the act, which is harmless.

    `members` maps a pod's index to the uid that the newest attempt was started with; another uid there means that the attempt
    has lost a pod. `newest_checkpoint` is the newest step known to be saved, `attempt_checkpoint` what it was when the
    attempt began; `fruitless` counts attempts in a row that added none. `ended_at` is set once, when the run succeeded or,
    with `failed` (reason, message), failed. `plan` is in force as long as what the manifest asks for has the hash
    `planned_for`; `interruptions` counts attempts that were lost to failures, `interval_reason` says why the newest order
    saves as often as it does. `drained` maps nodes that were about to end to the uid of the pod that was moved off. `pace` is
    what the newest whole window measured. `baseline` is how the submitted plan did until the first change. `stopped`: the
    newest attempt was ended by its owner or its budget, which is no failure. `changes` are those that the adjuster made,
    oldest first, `barred` the plans (`plan_key`) that broke their promise or did not start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int = 0
    attempt_at: datetime | None = None
    members: dict[int, str] = {}
    started_at: datetime | None = None
    newest_checkpoint: int = 0
    attempt_checkpoint: int = 0
    fruitless: int = 0
    ended_at: datetime | None = None
    failed: tuple[str, str] | None = None
    plan: Plan | None = None
    planned_for: str = ""
    changes: tuple[Change, ...] = ()
    barred: tuple[str, ...] = ()
    considered: Considered | None = None
    saves: Saves = Saves()
    pace: Pace | None = None
    baseline: Baseline | None = None
    interruptions: int = 0
    stopped: bool = False
    drained: dict[str, str] = {}
    interval_reason: str = ""
    ledger: LedgerState = LedgerState()


def to_data(record: RunRecord, order: RunOrder | None, result: RunResult | None) -> dict[str, str]:
    """The ConfigMap's data."""
    data = {KEY_RECORD: record.model_dump_json()}
    if order is not None:
        data[KEY_ORDER] = order.to_json()
    if result is not None:
        data[KEY_RESULT] = result.to_json()
    return data


def from_data(data: dict[str, str]) -> tuple[RunRecord, RunOrder | None, RunResult | None]:
    """Reads the ConfigMap's data.

    Raises:
        ValueError: somebody changed it into something else.
    """
    record = RunRecord.model_validate_json(data[KEY_RECORD]) if KEY_RECORD in data else RunRecord()
    order = RunOrder.from_json(data[KEY_ORDER]) if KEY_ORDER in data else None
    result = RunResult.from_json(data[KEY_RESULT]) if KEY_RESULT in data else None
    return record, order, result
