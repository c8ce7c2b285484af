"""The ledger by the seeds' four blocks, and what was saved against the plan that was submitted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from cost_aware_operator.ledger.ledger import Cause, LedgerState


class Block(StrEnum):
    """The four of a run's costs, as `costs.structure` predicts them."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    STORAGE = "storage"
    MANAGEMENT = "management"


def by_block(state: LedgerState) -> dict[Block, float]:
    """Dollars by block; their sum is `total_usd`.

    Compute: arithmetic, bubbles, and time that nothing else explains. Communication: exposed, and bytes between zones. Storage:
    waiting for data and checkpoints, and what is stored. Management: time lost to starts and failures, and the control plane.
    """
    data_usd = min(state.data_usd, state.by_cause(Cause.IDLE))
    return {
        Block.COMPUTE: state.by_cause(Cause.PRODUCTIVE) + state.by_cause(Cause.IDLE) - data_usd,
        Block.COMMUNICATION: state.by_cause(Cause.COMMUNICATION) + state.transfer_usd,
        Block.STORAGE: state.by_cause(Cause.CHECKPOINT) + data_usd + state.storage_usd,
        Block.MANAGEMENT: state.by_cause(Cause.RESTART) + state.by_cause(Cause.LOST_WORK) + state.management_usd,
    }


def total_usd(state: LedgerState) -> float:
    """Pod-seconds x price, and transfer, storage and management beside them."""
    return state.accrued_usd + state.transfer_usd + state.storage_usd + state.management_usd


class Baseline(BaseModel):
    """The submitted plan's figures and the state of the books at the first change."""

    model_config = ConfigDict(frozen=True, extra="allow")

    plan: str
    nodes: int
    step_seconds: float
    step: int
    accrued_usd: float
    pod_seconds: float


@dataclass(frozen=True)
class Saved:
    """Dollars of the steps since the first change."""

    counterfactual_usd: float
    """Dollars that the submitted plan would have cost."""
    paid_usd: float
    """Dollars that were paid, the changes included."""

    @property
    def usd(self) -> float:
        """Negative where the changes cost more than they saved so far."""
        return self.counterfactual_usd - self.paid_usd


def saved(baseline: Baseline, state: LedgerState, step: int) -> Saved | None:
    """Savings against the submitted plan at its measured rate and the prices paid since; None without a price."""
    paid, seconds = state.accrued_usd - baseline.accrued_usd, state.pod_seconds - baseline.pod_seconds
    if paid <= 0 or seconds <= 0:
        return None
    done = max(0, step - baseline.step)
    return Saved(done * baseline.step_seconds * baseline.nodes * paid / seconds, paid)
