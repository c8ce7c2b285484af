"""One way to survive failures, priced: from how it saves and recovers to goodput, hours and dollars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from cost_aware_operator.costs.checks import AnalysisError, count, not_negative, positive, share
from cost_aware_operator.costs.models.goodput import (
    LONGEST_EXPONENT,
    expected_goodput,
    goodput_of_waits,
    optimal_interval,
    repeated_hours,
)

HOURS_A_MONTH = 730.0


class Strategy(StrEnum):
    """Where a run's state survives the loss of a node."""

    NONE = "none"
    CHECKPOINT = "checkpoint"
    REPLICATION = "replication"
    ERASURE_CODING = "erasure-coding"


@dataclass(frozen=True)
class Run:
    """A run to be protected against failures."""

    nodes: int
    """Nodes of the run."""
    hours: float
    """Productive hours, without any failure."""
    node_hourly_usd: float
    """Dollars an hour of one node."""
    node_failures_per_hour: float
    """Failures an hour of one node, see `node_hazard`."""
    state_gb: float
    """Weights and optimizer states of the run, 1e9 bytes."""
    restart_seconds: float
    """Seconds from a failure to ranks that could load: detection, a new node, images, rendezvous."""
    storage_gbytes_per_s: float
    """Rate of durable storage for the whole job, 1e9 bytes a second."""
    storage_usd_per_gib_month: float
    """Dollars for one GiB kept for a month on durable storage."""
    network_gbytes_per_s: float
    """Network of one node, one direction, 1e9 bytes a second."""
    copy_gbytes_per_s: float
    """Rate from accelerators to host memory of one node, 1e9 bytes a second; bounds the stall of an asynchronous
    save."""
    free_host_gb: float
    """Host memory of one node that is free for copies, 1e9 bytes."""
    kept: int = 2
    """Checkpoints kept on storage."""
    data_replicas: int = 1
    """Unsharded data-parallel replicas of the state that exist anyway; 1 where the state is sharded."""
    usd_per_gb_between_nodes: float = 0.0
    """Dollars for 1e9 bytes between nodes: 0 inside a zone, `prices.USD_PER_GB_BETWEEN_ZONES` where copies cross
    zones."""
    correlated_share: float = 0.01
    """Share of failures that hit all copies in memory. The default is an assumption without a source."""

    def __post_init__(self) -> None:
        for name, largest in (("nodes", 10**6), ("kept", 10**4), ("data_replicas", 10**6)):
            count(name, getattr(self, name), 1, largest)
        for name, most in (
            ("hours", 1e6),
            ("node_hourly_usd", 1e5),
            ("state_gb", 1e9),
            ("storage_gbytes_per_s", 1e6),
            ("network_gbytes_per_s", 1e6),
            ("copy_gbytes_per_s", 1e6),
        ):
            positive(name, getattr(self, name), most)
        for name, most in (
            ("node_failures_per_hour", 1e6),
            ("restart_seconds", 1e9),
            ("free_host_gb", 1e9),
            ("storage_usd_per_gib_month", 1e5),
            ("usd_per_gb_between_nodes", 1e5),
        ):
            not_negative(name, getattr(self, name), most)
        share("correlated_share", self.correlated_share)
        if self.data_replicas > self.nodes:
            raise AnalysisError(
                f"data_replicas: {self.data_replicas} replicas on {self.nodes} nodes: write {self.nodes} or less"
            )

    @property
    def failures_per_hour(self) -> float:
        """Of the job: any node's failure stops it."""
        return self.nodes * self.node_failures_per_hour

    @property
    def node_state_gb(self) -> float:
        """A node's part of the state, which it saves."""
        return self.state_gb / self.nodes


@dataclass(frozen=True)
class Backing:
    """Checkpoints on durable storage, besides copies in memory."""

    stall: float
    """Seconds for which one save blocks training."""
    write: float
    """Seconds until one save is whole."""
    recovery: float
    """Seconds to recover from a save."""
    losses_per_hour: float
    """Losses of all copies in memory an hour, which these checkpoints make good."""

    def interval(self, hours: float) -> float:
        """Seconds of work between two of them in a run of so many hours."""
        return min(hours * 3600, optimal_interval(self.stall, self._mtbf, self.write))

    def goodput(self, hours: float) -> float:
        """Productive share of time, of what saving and losing copies in memory leaves."""
        # what is lost while a save is being written goes back to the save before it
        behind = max(0.0, self.write - self.stall)
        return expected_goodput(self.interval(hours), self.stall, self.recovery + behind, self._mtbf)

    @property
    def _mtbf(self) -> float:
        return 3600 / self.losses_per_hour if self.losses_per_hour > 0 else math.inf


@dataclass(frozen=True)
class StrategyCost:
    """One strategy and what it costs over a run."""

    strategy: Strategy
    """The strategy."""
    detail: str
    """Its settings in words."""
    reliability: float
    """Probability that the run never begins again, 0 to 1."""
    interval_seconds: float
    """Seconds of work between saves."""
    stall_seconds: float
    """Seconds for which one save blocks training."""
    write_seconds: float
    """Seconds until one save is whole."""
    recovery_seconds: float
    """Seconds to recover from one failure."""
    memory_gb_per_node: float
    """Host memory that copies take on one node, 1e9 bytes."""
    network_gb: float
    """Bytes between nodes over the run, 1e9 bytes."""
    expected_failures: float
    """Failures expected in the run."""
    goodput: float
    """Productive hours over expected hours, 0 to 1."""
    hours: float | None
    """Expected hours of the run; None where it would never end."""
    usd: float | None
    """Expected dollars of the run; None where `reason` says why the strategy cannot be used."""
    recovery_usd: float | None
    """Dollars of all nodes during recovery; None where the strategy cannot be used."""
    reason: str = ""
    """Why the strategy cannot be used, with the nearest figure that would do; empty where it can."""
    durable_interval_seconds: float | None = None
    """Seconds between checkpoints that back copies in memory; None where nothing backs them."""


@dataclass(frozen=True)
class Mechanism:
    """How a strategy works, before its time is counted."""

    strategy: Strategy
    """The strategy."""
    detail: str
    """Its settings in words."""
    stall: float
    """Seconds for which one save blocks training."""
    write: float
    """Seconds until one save is whole."""
    recovery: float
    """Seconds to recover from one failure."""
    memory_gb: float
    """Host memory that copies take on one node, 1e9 bytes."""
    sent_gb: float
    """Bytes between nodes for one save, 1e9 bytes."""
    stored_gb: float
    """Bytes kept on durable storage, 1e9 bytes."""
    loss_per_hour: float
    """Losses of the whole state an hour."""
    reason: str = ""
    """Why the strategy cannot be used; empty where it can."""
    backing: Backing | None = None
    """Checkpoints that back copies in memory; None where nothing backs them."""


def cost(run: Run, how: Mechanism) -> StrategyCost:
    """What a way to survive failures comes to over a run."""
    rate, again = run.failures_per_hour, how.loss_per_hour
    interval, goodput, saves = _saving(run, how)
    if how.backing is not None:
        goodput *= how.backing.goodput(run.hours)
    once = run.hours / goodput if goodput > 0 else math.inf
    if how.strategy is Strategy.NONE:
        waits = again * how.recovery / 3600
        hours = repeated_hours(again, once) * math.exp(waits) if waits <= LONGEST_EXPONENT else math.inf
        reliability = math.exp(-again * run.hours)
    else:
        hours = repeated_hours(again, once)
        reliability = math.exp(-again * once) if math.isfinite(once) else 0.0
    never = "" if math.isfinite(hours) else "the run would never end: failures come faster than progress"
    reason = how.reason or never
    usd = recovery = None
    failures = rate * hours if math.isfinite(hours) else 0.0
    sent = how.sent_gb * saves * (hours / run.hours if math.isfinite(hours) else 0.0)
    if not reason:
        stored = how.stored_gb * 1e9 / 2**30 * run.storage_usd_per_gib_month * hours / HOURS_A_MONTH
        usd = run.nodes * run.node_hourly_usd * hours + stored + sent * run.usd_per_gb_between_nodes
        recovery = failures * how.recovery / 3600 * run.nodes * run.node_hourly_usd
    return StrategyCost(
        how.strategy,
        how.detail,
        reliability,
        interval,
        how.stall,
        how.write,
        how.recovery,
        how.memory_gb,
        sent,
        failures,
        run.hours / hours if math.isfinite(hours) else 0.0,
        hours if math.isfinite(hours) else None,
        usd,
        recovery,
        reason,
        how.backing.interval(run.hours) if how.backing is not None else None,
    )


def _saving(run: Run, how: Mechanism) -> tuple[float, float, float]:
    """Seconds of work between saves, the productive share of time they leave, and how many of them the run's work has."""
    # failures that take all copies are the backing's
    rate = run.failures_per_hour - (how.backing.losses_per_hour if how.backing is not None else 0.0)
    mtbf = 3600 / rate if rate > 0 else math.inf
    whole = run.hours * 3600
    if how.strategy is Strategy.NONE:
        return whole, 1.0, 0.0
    if how.stall == 0 and how.write == 0:
        return 0.0, goodput_of_waits(how.recovery, mtbf), 0.0
    interval = min(whole, optimal_interval(how.stall, mtbf, how.write))
    # what fails while a save is being written goes back to the save before it
    behind = max(0.0, how.write - how.stall)
    return interval, expected_goodput(interval, how.stall, how.recovery + behind, mtbf), whole / interval
