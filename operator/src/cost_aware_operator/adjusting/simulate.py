"""A run on a virtual clock: the same adjuster, on machines that are not what the tables say, with noise and price changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cost_aware_operator.adjusting.adjuster import DynamicParallelismAdjuster
from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.candidates import layout_of
from cost_aware_operator.adjusting.changes import Change, Kind
from cost_aware_operator.adjusting.history import History
from cost_aware_operator.adjusting.situation import Action, Settings, Situation, SlowNode, Verdict, Window
from cost_aware_operator.costs.combinations import Offer
from cost_aware_operator.costs.predict import step_seconds
from cost_aware_operator.observing.stragglers import STRAGGLING
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.space import Space

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MOST_WINDOWS = 100_000
SLOW_NODE = "slow-node"


@dataclass(frozen=True)
class World:
    """What is true and nobody knows: machines as factors of their listed rates, noise, downtimes, and the price over time.

    `overhead` is the share of a step that no plan changes (data, checkpoints). `noise` is the spread of a measured window.
    """

    compute: float = 1.0
    network: float = 1.0
    noise: float = 0.02
    overhead: float = 0.02
    downtime_seconds: dict[Kind, float] = field(
        default_factory=lambda: {Kind.REBALANCE: 5.0, Kind.RESIZE: 40.0, Kind.MOVE: 45.0}
    )
    price: Callable[[float], float] = lambda seconds: 1.0
    """Times the list price, at so many seconds into the run."""
    straggler: float = 1.0
    """Times as long as all others that the node under the pod of index 1 computes."""
    spare_nodes: int = 0
    """Nodes beyond those that the run begins on."""

    def offer(self, listed: Offer) -> Offer:
        """The nodes as they are."""
        machine = listed.machine
        gpu = machine.accelerator
        real = replace(
            gpu,
            peak_tflops={p: v * self.compute for p, v in gpu.peak_tflops.items()},
            memory_gbytes_per_s=gpu.memory_gbytes_per_s * self.compute,
        )
        network = machine.network_gbit_per_s * self.network
        return replace(listed, machine=replace(machine, accelerator=real, network_gbit_per_s=network))


@dataclass(frozen=True)
class Outcome:
    """How a simulated run went."""

    usd: float
    seconds: float
    downtime_seconds: float
    changes: tuple[Change, ...]
    verdicts: tuple[tuple[float, Verdict], ...]
    """Each new verdict, with the seconds into the run at which it was first given."""
    plan: Plan
    submitted_usd: float
    """What the same steps would have cost under the plan that was submitted, at the prices at which they were done.

    Dollars of a run that was never changed are no measure of a decision where prices change: a cheaper plan that takes longer meets
    prices that the other had escaped, and that nobody could know.
    """


def simulate(space: Space, plan: Plan, settings: Settings, world: World, seed: int = 0) -> Outcome:
    """A run from its first step to its last, in windows of `settings.window_seconds`.

    Raises:
        ValueError: it would take more windows than anybody waits for.
    """
    chance, adjuster = random.Random(seed), DynamicParallelismAdjuster()  # noqa: S311  noise, not secrets
    listed = next((o for o in space.offers if o.name.removesuffix(" spot") in plan.instance_types), space.offers[0])
    node_usd, clock, usd, downtime = listed.hourly_usd / 3600, 0.0, 0.0, 0.0
    total = plan.nodes + world.spare_nodes
    submitted_usd = 0.0
    usual = _window(space, plan, listed, replace(world, noise=0.0), settings.window_seconds, random.Random(0))[1]  # noqa: S311
    step_usd = usual * plan.nodes * node_usd
    remaining, history, told = float(space.work.steps), History(), list[tuple[float, Verdict]]()
    for _ in range(MOST_WINDOWS):
        seen, wall = _window(space, plan, listed, world, settings.window_seconds, chance)
        took = min(settings.window_seconds, remaining * wall)
        submitted_usd += took / wall * step_usd * world.price(clock)
        clock, usd, remaining = (*_paid(world, clock, usd, took, plan.nodes * node_usd), remaining - took / wall)
        if remaining <= 1e-9:
            return Outcome(usd, clock, downtime, history.changes, tuple(told), plan, submitted_usd)
        hourly = plan.nodes * node_usd * 3600 * world.price(clock)
        now = EPOCH + timedelta(seconds=clock)
        situation = Situation(
            now, settings, plan, space, seen, round(remaining), hourly, history.changes, frozenset(history.barred),
            slow=_slow(plan, world, seen), spare_nodes=max(0, total - len(plan.excluded_nodes) - plan.nodes),
        )  # fmt: skip
        verdict = adjuster.verdict(situation)
        if not told or (told[-1][1].action, told[-1][1].reason) != (verdict.action, verdict.reason):
            told.append((clock, verdict))
        if verdict.action in (Action.CHANGE, Action.ROLL_BACK) and verdict.plan is not None:
            history = history.begun(situation, verdict, len(history.changes) + 2)
            kind = history.changes[-1].kind
            pause = world.downtime_seconds[kind]
            most = max(plan.nodes, verdict.plan.nodes) * node_usd
            clock, usd = _paid(world, clock, usd, pause, most)
            plan, downtime = verdict.plan, downtime + pause
            history = history.resumed(EPOCH + timedelta(seconds=clock))
        else:
            history = history.judged(situation)
    raise ValueError(f"steps: the run takes more than {MOST_WINDOWS:,} windows: write fewer steps or a longer window")


def _paid(world: World, clock: float, usd: float, seconds: float, second_usd: float) -> tuple[float, float]:
    return clock + seconds, usd + seconds * second_usd * world.price(clock)


def _window(
    space: Space, plan: Plan, listed: Offer, world: World, seconds: float, chance: random.Random
) -> tuple[Window, float]:
    """What the ranks measure, and what a step truly takes in this window."""
    found = step_seconds(
        space.work.shape, world.offer(listed).machine, layout_of(plan, space.work.global_batch, listed)
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
