"""The seeds' cost structure: compute, communication, storage and I/O, management, as dollars and shares of one prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cost_aware_operator.costs.checks import AnalysisError, count, not_negative, positive, share
from cost_aware_operator.costs.models.layout import Layout
from cost_aware_operator.costs.models.predict import Prediction
from cost_aware_operator.costs.tables.fees import between_zones, fee
from cost_aware_operator.costs.tables.prices import USD_PER_GB_BETWEEN_ZONES, PriceError

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Terms:
    """Prices and habits of a run that a prediction of one step does not know. All default to none of it."""

    checkpoint_seconds: float = 0.0
    """Seconds for which one checkpoint blocks training."""
    checkpoint_interval_seconds: float | None = None
    """Seconds of training between two checkpoints; None without checkpoints."""
    input_share: float = 0.0
    """Share of a step in which ranks wait for data, on top of the predicted step."""
    goodput: float = 1.0
    """Productive share of time under failures, as `StrategyCost.goodput`. What is lost is booked as management, as the
    seed counts fault tolerance there."""
    stored_gib: float = 0.0
    """GiB of data and checkpoints kept during the run."""
    storage_usd_per_gib_month: float | None = None
    """Dollars for one GiB kept for a month; needed where GiB are stored."""
    zone_gb_per_step: float = 0.0
    """Traffic between zones in one step, 1e9 bytes."""
    usd_per_gb: float = USD_PER_GB_BETWEEN_ZONES
    """Dollars for 1e9 bytes between zones."""
    management_hourly_usd: float = 0.0
    """Dollars an hour of control plane and monitoring, whatever the number of nodes."""

    def __post_init__(self) -> None:
        not_negative("checkpoint_seconds", self.checkpoint_seconds, 1e9)
        if self.checkpoint_interval_seconds is not None:
            positive("checkpoint_interval_seconds", self.checkpoint_interval_seconds, 1e12)
        elif self.checkpoint_seconds > 0:
            raise AnalysisError(
                "checkpoint_interval_seconds: missing though checkpoints take time: write seconds between them"
            )
        if self.input_share > 0.99:
            share("input_share", self.input_share, 0.99)
        share("input_share", self.input_share)
        if not self.goodput >= 1e-6:
            raise AnalysisError(f"goodput: must lie from 1e-06 to 1, got {self.goodput!r}: write 1e-06 or more")
        share("goodput", self.goodput)
        not_negative("stored_gib", self.stored_gib, 1e12)
        if self.storage_usd_per_gib_month is not None:
            not_negative("storage_usd_per_gib_month", self.storage_usd_per_gib_month, 1e6)
        elif self.stored_gib > 0:
            raise AnalysisError(
                "storage_usd_per_gib_month: missing though GiB are stored: write dollars a GiB and month"
            )
        not_negative("zone_gb_per_step", self.zone_gb_per_step, 1e9)
        not_negative("usd_per_gb", self.usd_per_gb, 1e6)
        not_negative("management_hourly_usd", self.management_hourly_usd, 1e6)


def at_list_prices(terms: Terms, provider: str, storage: str) -> Terms:
    """The terms with a provider's dated list prices: transfer between zones, a kind of storage, the control plane.

    Raises:
        PriceError: fees.csv has no such row, or `storage` is not priced by the GiB and month.
    """
    kept = fee(provider, storage)
    if kept.unit != "GiB-month":
        raise PriceError(f"fees.csv, {provider}, {storage}: is priced by the {kept.unit}: write a kind of storage")
    return replace(
        terms,
        storage_usd_per_gib_month=kept.usd,
        usd_per_gb=between_zones(provider),
        management_hourly_usd=fee(provider, "control-plane").usd,
    )


@dataclass(frozen=True)
class CostStructure:
    """Dollars of a whole run by block. They add up to `total_usd`, and shares to 1."""

    hours: float
    """Hours of the whole run."""
    compute_usd: float
    """Dollars of all nodes for arithmetic, optimizer, pipeline bubbles and what no other term covers."""
    communication_usd: float
    """Dollars of all nodes for exposed communication, and of bytes between zones."""
    storage_usd: float
    """Dollars of all nodes for waiting for data and checkpoints, and of what is stored."""
    management_usd: float
    """Dollars of all nodes for time lost to failures, and of the control plane."""

    @property
    def total_usd(self) -> float:
        """The run."""
        return self.compute_usd + self.communication_usd + self.storage_usd + self.management_usd

    @property
    def shares(self) -> dict[str, float]:
        """Each block over the total, by the block's name."""
        total = self.total_usd
        return {
            "compute": self.compute_usd / total,
            "communication": self.communication_usd / total,
            "storage": self.storage_usd / total,
            "management": self.management_usd / total,
        }


def structure(
    prediction: Prediction,
    layout: Layout,
    gpus_per_node: int,
    steps: int,
    node_hourly_usd: float,
    terms: Terms | None = None,
) -> CostStructure:
    """A run of `steps` predicted steps in dollars. Whole nodes are paid for, used or not.

    hours = steps x step / (1 - input share) x (1 + checkpoint / interval) / goodput. Every second is booked once: the step's by its
    breakdown, the rest by what it waited for.

    Raises:
        AnalysisError: a figure out of range, or a step without a finite time.
    """
    terms = terms or Terms()
    count("steps", steps)
    usd = positive("node_hourly_usd", node_hourly_usd, 1e6)
    parts = prediction.breakdown
    if not (math.isfinite(parts.total) and 0 < parts.total < 1e12):
        raise AnalysisError(
            f"prediction.step_seconds: got {parts.total!r}: write a layout whose step takes a finite time"
        )
    nodes = math.ceil(layout.ranks / count("gpus_per_node", gpus_per_node))
    talking = (
        parts.tensor_communication
        + parts.pipeline_communication
        + parts.data_communication
        + parts.context_communication
    )
    step = parts.total
    waiting = step * terms.input_share / (1 - terms.input_share)
    saving = 0.0
    if terms.checkpoint_interval_seconds is not None:
        saving = (step + waiting) * terms.checkpoint_seconds / terms.checkpoint_interval_seconds
    busy = step + waiting + saving
    lost = busy * (1 / terms.goodput - 1)
    hours = steps * (busy + lost) / 3600
    # dollars of one second in every step of the run, over all nodes
    second = steps / 3600 * nodes * usd
    stored = terms.stored_gib * (terms.storage_usd_per_gib_month or 0.0) * hours / HOURS_A_MONTH
    return CostStructure(
        hours=hours,
        compute_usd=(step - talking) * second,
        communication_usd=talking * second + steps * terms.zone_gb_per_step * terms.usd_per_gb,
        storage_usd=(waiting + saving) * second + stored,
        management_usd=lost * second + hours * terms.management_hourly_usd,
    )
