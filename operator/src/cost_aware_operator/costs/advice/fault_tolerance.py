"""Failures: how likely, what each way to survive them costs in memory, network, waiting and dollars, and the cheapest that will do.

Failures of nodes are taken as independent and exponential in time. Spot reclaims are neither (Kadupitiya et al. 2019, arXiv
1911.05160), so `correlated_share` of them is taken to hit every copy that is kept in nodes' memory at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cost_aware_operator.costs.advice.survival import Backing, Mechanism, Run, Strategy, StrategyCost, cost
from cost_aware_operator.costs.checks import count, not_negative, share
from cost_aware_operator.costs.tables.hazards import STORAGE_LOSS_PER_HOUR


@dataclass(frozen=True)
class Choice:
    """The cheapest strategy that is reliable enough."""

    best: StrategyCost | None
    """The strategy; None where none will do."""
    reason: str
    """Why this one, or why none."""
    options: tuple[StrategyCost, ...]
    """All strategies, in the order in which they were priced."""


class FaultToleranceAnalyzer:
    """Failure probability, interval, goodput, and the strategies priced."""

    def failure_probability(self, nodes: int, hours: float, node_failures_per_hour: float) -> float:
        """1 - e^(-n h hazard): at least one failure in the run.

        Raises:
            AnalysisError: a figure out of range.
        """
        rate = not_negative("node_failures_per_hour", node_failures_per_hour, 1e6)
        return -math.expm1(-count("nodes", nodes) * not_negative("hours", hours, 1e6) * rate)

    def none(self, run: Run) -> StrategyCost:
        """Every failure begins the run again: E[T] = (e^(L T) - 1)/L e^(L R)."""
        lost = run.failures_per_hour
        return cost(run, Mechanism(Strategy.NONE, "begin again", 0, 0, run.restart_seconds, 0, 0, 0, lost))

    def checkpoint(self, run: Run) -> StrategyCost:
        """To durable storage, asynchronously: a stall for the copy to host memory, then the write behind training."""
        copied = run.node_state_gb / run.copy_gbytes_per_s
        moved = run.state_gb / run.storage_gbytes_per_s
        detail = f"to storage, {run.kept} kept"
        memory = run.node_state_gb
        return cost(
            run,
            Mechanism(
                Strategy.CHECKPOINT,
                detail,
                stall=copied,
                write=moved,
                recovery=run.restart_seconds + moved,
                memory_gb=memory,
                sent_gb=0.0,
                stored_gb=run.kept * run.state_gb,
                loss_per_hour=STORAGE_LOSS_PER_HOUR,
                reason=_memory(run, memory),
            ),
        )

    def replication(self, run: Run, copies: int = 2, *, backed: bool = False) -> StrategyCost:
        """`copies` of each node's state in the memory of as many nodes, as in GEMINI (Wang et al. 2023).

        Existing data-parallel replicas count as copies and are free: nothing is copied, and a failure costs no saved interval.
        Otherwise a node holds its own copy and those of others twice, as an old one stays until the new one is whole.

        `backed`: rare checkpoints go to durable storage besides, as GEMINI's do, so that the loss of all copies goes back to one
        of these instead of to the beginning. They are taken from a snapshot of their own, as copies move on while it is written.

        Raises:
            AnalysisError: fewer than 2 copies, or more than nodes.
        """
        count("copies", copies, 2, max(2, run.nodes))
        free = run.data_replicas >= copies
        # the state is then spread over nodes / data_replicas of them
        size = run.state_gb * run.data_replicas / run.nodes if free else run.node_state_gb
        fetch = run.restart_seconds + size / run.network_gbytes_per_s
        holders = run.data_replicas if free else copies
        memory = 0.0 if free else 2 * copies * size
        reason = _memory(run, memory)
        if copies > run.nodes:
            reason = f"copies: {copies} copies need {copies} nodes, the run has {run.nodes}"
        how = Mechanism(
            Strategy.REPLICATION,
            f"{holders} data-parallel replicas" if free else f"{copies} copies in memory",
            stall=0.0 if free else size / run.copy_gbytes_per_s,
            write=0.0 if free else (copies - 1) * size / run.network_gbytes_per_s,
            recovery=fetch,
            memory_gb=memory,
            sent_gb=0.0 if free else (copies - 1) * run.state_gb,
            stored_gb=0.0,
            loss_per_hour=_loss(run, holders, holders - 1, fetch),
            reason=reason,
        )
        return cost(run, _backed(run, how) if backed else how)

    def erasure_coding(self, run: Run, data: int = 4, parity: int = 2) -> StrategyCost:
        """Groups of `data` + `parity` nodes; any `data` of their shards rebuild the rest, as in ECCheck (2025).

        A node holds its own copy and parity/data of it more, twice over; coding sends parity times a node's state; a lost node
        receives `data` shards.

        Raises:
            AnalysisError: fewer than 1 of either.
        """
        group = count("data", data, 1, 10**4) + count("parity", parity, 1, 10**4)
        size = run.node_state_gb
        fetch = run.restart_seconds + data * size / run.network_gbytes_per_s
        memory = 2 * size * (1 + parity / data)
        reason = _memory(run, memory)
        if group > run.nodes:
            reason = (
                f"data + parity: {group} nodes to a group, the run has {run.nodes}: write {run.nodes} together or less"
            )
        return cost(
            run,
            Mechanism(
                Strategy.ERASURE_CODING,
                f"{data} + {parity} in memory",
                stall=size / run.copy_gbytes_per_s,
                write=parity * size / run.network_gbytes_per_s,
                recovery=fetch,
                memory_gb=memory,
                sent_gb=parity * run.state_gb,
                stored_gb=0.0,
                loss_per_hour=_loss(run, group, parity, fetch),
                reason=reason,
            ),
        )

    def choose(self, run: Run, reliability: float) -> Choice:
        """The cheapest of all strategies whose run begins again with a probability of at most 1 - `reliability`.

        Raises:
            AnalysisError: a reliability outside 0 to 1.
        """
        share("reliability", reliability)
        options = [self.none(run), self.checkpoint(run)]
        options += [
            self.replication(run, copies, backed=backed)
            for backed in (False, True)
            for copies in (2, 3)
            if copies <= run.nodes
        ]
        options += [self.erasure_coding(run, k, m) for k, m in ((2, 1), (4, 2), (8, 2)) if k + m <= run.nodes]
        possible = [(option.usd, option) for option in options if option.usd is not None]
        if not possible:
            why = "; ".join(f"{o.strategy} ({o.detail}): {o.reason}" for o in options)
            return Choice(None, f"none can be done: {why}", tuple(options))
        enough = [(usd, option) for usd, option in possible if option.reliability >= reliability]
        if not enough:
            _, top = max(possible, key=lambda pair: (pair[1].reliability, -pair[0]))
            return Choice(
                None,
                f"reliability: none reaches {reliability:.6g}, the best, {top.strategy} ({top.detail}), "
                f"reaches {math.floor(top.reliability * 1e9) / 1e9:.9g}",
                tuple(options),
            )
        usd, best = min(enough, key=lambda pair: pair[0])
        return Choice(
            best,
            f"{best.strategy} ({best.detail}) is the cheapest of {len(enough)} that reach {reliability:.6g}: ${usd:.2f}",
            tuple(options),
        )


def _memory(run: Run, needed_gb: float) -> str:
    if needed_gb <= run.free_host_gb:
        return ""
    return f"free_host_gb: needs {needed_gb:.4g} a node, but {run.free_host_gb:.4g} are free: write {needed_gb:.4g} or more"


def _backed(run: Run, how: Mechanism) -> Mechanism:
    """A way that keeps copies in memory, with checkpoints on durable storage for when all copies are lost.

    Those are as frequent as losses of all copies make it pay. Only storage lost between such a loss and the save before it
    begins the run again.
    """
    moved = run.state_gb / run.storage_gbytes_per_s
    backing = Backing(
        stall=run.node_state_gb / run.copy_gbytes_per_s,
        write=moved,
        recovery=run.restart_seconds + moved,
        losses_per_hour=how.loss_per_hour,
    )
    exposed = min(1.0, STORAGE_LOSS_PER_HOUR * (backing.interval(run.hours) + backing.recovery) / 3600)
    memory = how.memory_gb + run.node_state_gb
    return replace(
        how,
        detail=f"{how.detail}, backed by storage",
        memory_gb=memory,
        stored_gb=run.kept * run.state_gb,
        loss_per_hour=how.loss_per_hour * exposed,
        reason=how.reason or _memory(run, memory),
        backing=backing,
    )


def _loss(run: Run, group: int, survives: int, rebuild_seconds: float) -> float:
    """Losses of a whole state an hour, of any group of `group` nodes that survives `survives` losses at once.

    A first failure, then `survives` more in the group while the first is rebuilt, w hours: n h prod_i((g - i) h w), the chain of
    RAID reliability (Patterson, Gibson, Katz 1988), no more than all failures; and the failures that hit all copies.
    """
    hazard, window = run.node_failures_per_hour, rebuild_seconds / 3600
    chance = 1.0
    for i in range(1, survives + 1):
        chance *= min(1.0, (group - i) * hazard * window)
    return run.failures_per_hour * min(1.0, chance + run.correlated_share)
