"""The stored record of a run, in one ConfigMap: the newest attempt, its pods, its plan and the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from cost_aware_operator.adjusting.changes import Change
from cost_aware_operator.adjusting.situation import Window
from cost_aware_operator.ledger.blocks import Baseline
from cost_aware_operator.ledger.ledger import LedgerState
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.workload.secret import TokenSecret
from cost_aware_trainer.contract import ContractError, RunOrder, RunResult

KEY_RECORD = "record.json"
KEY_ORDER = "order.json"
KEY_RESULT = "result.json"


class Considered(BaseModel):
    """The newest search for another plan, and why it changed nothing."""

    model_config = ConfigDict(frozen=True, extra="allow")

    attempt: int
    """The attempt that was running."""
    generation: int
    """The manifest's generation."""
    at: datetime
    """When the search was made."""
    reason: str
    """Why nothing was changed, in one CamelCase word."""
    message: str
    """The sentence with its figures."""


class Saves(BaseModel):
    """Checkpoints that were seen in one attempt."""

    model_config = ConfigDict(frozen=True, extra="allow")

    attempt: int = 0
    """The attempt that they are counted in."""
    newest: int = 0
    """The newest step that was saved."""
    count: int = 0
    """How many were seen."""
    stall_seconds: float | None = None
    """Seconds that one save blocks the ranks, in the newest attempt that tells; None until one does."""


class Pace(BaseModel):
    """The newest whole window's measurements, which are needed when the ranks cannot go on."""

    model_config = ConfigDict(frozen=True, extra="allow")

    plan: str
    """The plan that was measured (`plan_key`)."""
    window: Window
    """Its figures."""


class RunRecord(BaseModel):
    """The run as it survives the operator.

    It is written before what it says is acted on: an operator that dies in between repeats the act, which is harmless.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    attempt: int = 0
    """Number of the newest attempt; 0 before the first."""
    attempt_at: datetime | None = None
    """When the newest attempt began."""
    members: dict[int, str] = {}
    """Uids of the newest attempt's pods by index; another uid there now means that the attempt has lost a pod."""
    started_at: datetime | None = None
    """When the first attempt began."""
    newest_checkpoint: int = 0
    """The newest step known to be saved."""
    attempt_checkpoint: int = 0
    """The newest step known to be saved when the newest attempt began."""
    fruitless: int = 0
    """Attempts in a row that added no checkpoint."""
    ended_at: datetime | None = None
    """When the run succeeded or failed; set once."""
    failed: tuple[str, str] | None = None
    """Reason and message of a run that failed."""
    plan: Plan | None = None
    """The plan in force, as long as the manifest asks for what it was made for."""
    planned_for: str = ""
    """Hash of what the manifest asked for when the plan was made."""
    changes: tuple[Change, ...] = ()
    """Changes of plan that the adjuster made, oldest first."""
    barred: tuple[str, ...] = ()
    """Plans (`plan_key`) that broke their promise or did not start, and are not tried again."""
    considered: Considered | None = None
    """The newest search that changed nothing."""
    saves: Saves = Saves()
    """Checkpoints that were seen."""
    pace: Pace | None = None
    """Measurements of the newest whole window."""
    baseline: Baseline | None = None
    """How the submitted plan did until the first change."""
    interruptions: int = 0
    """Attempts that were lost to failures."""
    stopped: bool = False
    """Whether the newest attempt was ended by its owner or its budget, which is no failure."""
    drained: dict[str, str] = {}
    """Nodes that were about to end, with the uid of the pod that was moved off each."""
    interval_reason: str = ""
    """Why the newest order saves as often as it does."""
    token: TokenSecret | None = None
    """The Secret with the token of the newest Job's pods; its name is saved before it is made."""
    ledger: LedgerState = LedgerState()
    """The books."""


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

    Fields that a newer operator wrote are kept in the record. An order or a result that cannot be read is none: the next attempt has
    an order of its own, and a result can be asked for again.

    Raises:
        ValueError: somebody changed the record into something else.
    """
    record = RunRecord.model_validate_json(data[KEY_RECORD]) if KEY_RECORD in data else RunRecord()
    order: RunOrder | None = None
    result: RunResult | None = None
    with contextlib.suppress(ContractError):
        order = RunOrder.from_json(data[KEY_ORDER]) if KEY_ORDER in data else None
    with contextlib.suppress(ContractError):
        result = RunResult.from_json(data[KEY_RESULT]) if KEY_RESULT in data else None
    return record, order, result


def kept_from(data: Mapping[str, str], order: RunOrder | None, result: RunResult | None) -> dict[str, str]:
    """Entries of the ConfigMap that were not read; they are written back as they are."""
    read = (
        {KEY_RECORD} | ({KEY_ORDER} if order is not None else set()) | ({KEY_RESULT} if result is not None else set())
    )
    return {name: text for name, text in data.items() if name not in read}


def unknown_in(value: object, where: str) -> tuple[str, ...]:
    """Paths of fields that no model here knows, which were read nevertheless."""
    if isinstance(value, BaseModel):
        extra = tuple(f"{where}.{name}" for name in value.model_extra or {})
        inner = (unknown_in(getattr(value, name), f"{where}.{name}") for name in type(value).model_fields)
        return (*extra, *(path for paths in inner for path in paths))
    if isinstance(value, tuple):
        return tuple(path for i, one in enumerate(value) for path in unknown_in(one, f"{where}.{i}"))
    return ()
