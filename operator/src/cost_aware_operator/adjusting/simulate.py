"""A run on a virtual clock: the same adjuster, on machines that are not what the tables say, with noise and price changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cost_aware_operator.adjusting.adjuster import DynamicParallelismAdjuster
from cost_aware_operator.adjusting.calibration import Measured, faster
from cost_aware_operator.adjusting.capacity import Shortage, without_nodes
from cost_aware_operator.adjusting.changes import Change, Kind
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.situation import Action, AdjustSettings, Situation, SlowNode, Verdict, Window
from cost_aware_operator.costs.models.predict import step_seconds
from cost_aware_operator.costs.search.combinations import Offer
from cost_aware_operator.observing.stragglers import STRAGGLING
from cost_aware_operator.planning.plan import Plan, is_other_kind, type_of
from cost_aware_operator.planning.space import Space

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MOST_WINDOWS = 100_000
SLOW_NODE = "slow-node"
WAIT_SECONDS = 10.0
"""How often a run without enough nodes looks again."""


@dataclass(frozen=True)
class Absence:
    """Nodes that are gone for a while, as spot capacity is."""

    nodes: int
    """Number of nodes that are gone."""
    begin_seconds: float
    """When they go, in seconds since the start."""
    end_seconds: float
    """When they are back, in seconds since the start."""


def gone(trace: Iterable[Absence], seconds: float) -> int:
    """Nodes that are gone at a moment."""
    return sum(a.nodes for a in trace if a.begin_seconds <= seconds < a.end_seconds)


@dataclass(frozen=True)
class World:
    """The truth that the adjuster does not know: machines, noise, downtimes and prices."""

    compute: float = 1.0
    """Speed of arithmetic as a factor of the listed one."""
    network: float = 1.0
    """Speed of the network as a factor of the listed one."""
    noise: float = 0.02
    """Spread of a measured window, as a share."""
    overhead: float = 0.02
    """Share of a step that no plan changes: data and checkpoints."""
    downtime_seconds: dict[Kind, float] = field(
        default_factory=lambda: {Kind.REBALANCE: 5.0, Kind.RESIZE: 40.0, Kind.MOVE: 45.0, Kind.SHRINK: 40.0}
    )
    """Seconds that a change takes, by kind."""
    price: Callable[[float], float] = lambda seconds: 1.0
    """Times the list price, at so many seconds into the run."""
    straggler: float = 1.0
    """Times as long as all others that the node under the pod of index 1 computes."""
    spare_nodes: int = 0
    """Nodes beyond those that the run begins on."""
    other_nodes: int = 0
    """Free nodes of each other instance type that the manifest allows."""
    other_compute: float = 1.0
    """What `compute` is of those, over what it is of the first."""
    gone: Callable[[float], int] = lambda seconds: 0
    """How many of all these nodes are taken away, at so many seconds into the run."""
    restart_seconds: float = 30.0
    """From the moment that all nodes are there again to the first step."""

    def offer(self, listed: Offer, *, other: bool = False) -> Offer:
        """The nodes as they are."""
        machine = faster(listed.machine, self.compute * (self.other_compute if other else 1.0))
        return replace(listed, machine=replace(machine, network_gbit_per_s=machine.network_gbit_per_s * self.network))


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run's end."""

    usd: float
    """Dollars that were paid."""
    seconds: float
    """Seconds that it took."""
    downtime_seconds: float
    """Seconds of changes and of waiting for nodes."""
    changes: tuple[Change, ...]
    """Changes that were made, oldest first."""
    verdicts: tuple[tuple[float, Verdict], ...]
    """Each new verdict, with the seconds into the run at which it was first given."""
    plan: Plan
    """The plan at the end."""
    submitted_usd: float
    """What the same steps would have cost under the plan that was submitted, at the prices at which they were done.

    Dollars of a run that was never changed are no measure of a decision where prices change: a cheaper plan that takes longer meets
    prices that the other had escaped, and that nobody could know.
    """
    steps_left: int = 0
    """Not done, as the budget was spent first."""


def simulate(
    space: Space, plan: Plan, settings: AdjustSettings, world: World, seed: int = 0, budget_usd: float | None = None
) -> SimulatedRun:
    """A run from its first step to its last, or to the end of its budget, in windows of `settings.window_seconds`.

    Raises:
        ValueError: it would take more windows than anybody waits for.
    """
    run = _Run(space, plan, settings, world, seed, budget_usd)
    for _ in range(MOST_WINDOWS):
        if run.is_broke() or (not run.lacks_nodes() and run.train()):
            return run.outcome()
        if run.lacks_nodes():
            run.wait()
        elif not run.is_broke():
            run.adjust()
    raise ValueError(f"steps: the run takes more than {MOST_WINDOWS:,} windows: write fewer steps or a longer window")


class _Run:
    """A run's present state on the virtual clock."""

    def __init__(
        self, space: Space, plan: Plan, settings: AdjustSettings, world: World, seed: int, budget_usd: float | None
    ) -> None:
        self.budget_usd = budget_usd
        self.space, self.plan, self.settings, self.world = space, plan, settings, world
        self.chance, self.adjuster = random.Random(seed), DynamicParallelismAdjuster()  # noqa: S311  noise, not secrets
        self.first, self.total = plan.instance_types, plan.nodes + world.spare_nodes
        usual, wall = self._measure(replace(world, noise=0.0), random.Random(0))  # noqa: S311
        self.submitted_step_usd, self.window = wall * plan.nodes * self.node_usd, usual
        self.clock = self.usd = self.downtime = self.submitted_usd = self.waited = 0.0
        self.remaining, self.history = float(space.work.steps), History()
        self.told: list[tuple[float, Verdict]] = []

    @property
    def listed(self) -> Offer:
        """The nodes that the run has, as the tables list them."""
        offers = self.space.offers
        return next((o for o in offers if not is_other_kind(self.plan, o)), offers[0])

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs on nodes of another type than at first."""
        return self.plan.instance_types != self.first

    @property
    def node_usd(self) -> float:
        """Dollars a second of a node."""
        return self.listed.hourly_usd / 3600

    def _measure(self, world: World, chance: random.Random) -> tuple[Window, float]:
        seconds = self.settings.window_seconds
        return _window(self.space, self.plan, self.listed, world, seconds, chance, other=self.is_elsewhere)

    def there(self) -> int:
        """Nodes that there are now, those that were left because they are slow not counted."""
        if self.is_elsewhere:
            return max(self.world.other_nodes, self.plan.nodes)
        return max(0, self.total - self.world.gone(self.clock) - len(self.plan.excluded_nodes))

    def lacks_nodes(self) -> bool:
        """Whether pods have no node."""
        return self.there() < self.plan.nodes

    def is_broke(self) -> bool:
        """Whether the budget is spent, which stops the run."""
        return self.budget_usd is not None and self.usd >= self.budget_usd - 1e-9

    def affords(self, nodes: int) -> float:
        """Seconds until the budget is spent on so many nodes, at the price of the moment."""
        second_usd = nodes * self.node_usd * self.world.price(self.clock)
        return math.inf if self.budget_usd is None or not second_usd else (self.budget_usd - self.usd) / second_usd

    def pay(self, seconds: float, nodes: int) -> None:
        """Lets time pass, with so many nodes paid for; no longer than the budget lasts."""
        seconds = max(0.0, min(seconds, self.affords(nodes)))
        self.usd += seconds * nodes * self.node_usd * self.world.price(self.clock)
        self.clock += seconds

    def train(self) -> bool:
        """A window of steps; whether the last step is done."""
        if self.waited:
            self.pay(self.world.restart_seconds, self.plan.nodes)
            self.downtime, self.waited = self.downtime + self.waited + self.world.restart_seconds, 0.0
        self.window, wall = self._measure(self.world, self.chance)
        took = max(0.0, min(self.settings.window_seconds, self.remaining * wall, self.affords(self.plan.nodes)))
        self.submitted_usd += took / wall * self.submitted_step_usd * self.world.price(self.clock)
        self.pay(took, self.plan.nodes)
        self.remaining -= took / wall
        return self.remaining <= 1e-9

    def wait(self) -> None:
        """Ten seconds for nodes to come, in which those that are there are paid for."""
        held = min(self.there(), self.plan.nodes)
        self.pay(WAIT_SECONDS, held)
        self.waited += WAIT_SECONDS
        short = Shortage(("pod",), self.waited, held, held * self._node_hour_usd() if held else None)
        situation = self._situation(replace(self.window, seconds=0.0))
        self._follow(situation, without_nodes(situation, short))

    def adjust(self) -> None:
        """Asks the adjuster, and does what it says."""
        situation = self._situation(self.window)
        if not self._follow(situation, self.adjuster.verdict(situation)):
            self.history = self.history.judged(situation)

    def _node_hour_usd(self) -> float:
        return self.node_usd * 3600 * self.world.price(self.clock)

    def _situation(self, seen: Window) -> Situation:
        kinds = [type_of(o) for o in self.space.offers if is_other_kind(self.plan, o)]
        free = {kind: self.total if kind in self.first else self.world.other_nodes for kind in kinds}
        return Situation(
            EPOCH + timedelta(seconds=self.clock), self.settings, self.plan, self.space, seen, round(self.remaining),
            self.plan.nodes * self._node_hour_usd(), self.history.changes, frozenset(self.history.barred),
            budget_left_usd=None if self.budget_usd is None else self.budget_usd - self.usd,
            slow=_slow(self.plan, self.world, seen), spare_nodes=max(0, self.there() - self.plan.nodes),
            free_nodes=free,
        )  # fmt: skip

    def _follow(self, situation: Situation, verdict: Verdict) -> bool:
        if not self.told or (self.told[-1][1].action, self.told[-1][1].reason) != (verdict.action, verdict.reason):
            self.told.append((self.clock, verdict))
        if verdict.action not in (Action.CHANGE, Action.ROLL_BACK) or verdict.plan is None:
            return False
        self.history = self.history.begun(situation, verdict, len(self.history.changes) + 2)
        kind = self.history.changes[-1].kind
        pause = self.world.downtime_seconds[kind]
        nodes = verdict.plan.nodes if kind is Kind.SHRINK else max(self.plan.nodes, verdict.plan.nodes)
        self.pay(pause, nodes)
        self.plan, self.downtime, self.waited = verdict.plan, self.downtime + self.waited + pause, 0.0
        self.history = self.history.resumed(EPOCH + timedelta(seconds=self.clock))
        return True

    def outcome(self) -> SimulatedRun:
        """How it went."""
        changes, told = self.history.changes, tuple(self.told)
        left = max(0, math.ceil(self.remaining - 1e-6))
        return SimulatedRun(self.usd, self.clock, self.downtime, changes, told, self.plan, self.submitted_usd, left)


def _window(
    space: Space, plan: Plan, listed: Offer, world: World, seconds: float, chance: random.Random, *, other: bool
) -> tuple[Window, float]:
    """What the ranks measure, and what a step truly takes in this window."""
    found = step_seconds(
        space.work.shape,
        world.offer(listed, other=other).machine,
        plan.layout(space.work.global_batch, listed.precision),
    )
    factor = max(0.2, chance.gauss(1.0, world.noise))
    working, modelled = factor * float(found.compute + found.optimizer), factor * float(found.total)
    longest = working * (world.straggler if _holds_up(plan, world) else 1.0)
    mean = working + (longest - working) / plan.nodes
    modelled += longest - working
    wall = modelled * (1 + world.overhead)
    return Window(seconds, max(2.0, seconds / wall), mean / wall, wall, Measured(modelled, longest)), wall


def _holds_up(plan: Plan, world: World) -> bool:
    return world.straggler > 1 and plan.nodes > 1 and SLOW_NODE not in plan.excluded_nodes


def _slow(plan: Plan, world: World, seen: Window) -> SlowNode | None:
    """What the ranks' metrics tell of the straggler: nothing where its pipeline stages lie on its node alone."""
    own = range(plan.ranks_per_node, 2 * plan.ranks_per_node)
    stage = plan.data * plan.tensor
    peers = {rank for mine in own for rank in range(mine // stage * stage, (mine // stage + 1) * stage)} - set(own)
    if not _holds_up(plan, world) or not peers or world.straggler < STRAGGLING:
        return None
    longest = seen.measured.working_seconds
    usual = longest / world.straggler
    return SlowNode(SLOW_NODE, ("pod-1",), tuple(own), longest, usual, usual)
