"""All that a verdict of the adjuster depends on, and the verdict, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum

from cost_aware_operator.adjusting.calibration import Measured
from cost_aware_operator.adjusting.changes import Change, Kind
from cost_aware_operator.api.spec import AdjustPolicy, Objective
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.space import Space


class Action(StrEnum):
    """What to do."""

    HOLD = "Hold"
    RECOMMEND = "Recommend"
    CHANGE = "Change"
    ROLL_BACK = "RollBack"


@dataclass(frozen=True)
class AdjustSettings:
    """The manifest's settings of the adjuster."""

    policy: AdjustPolicy
    """Act, Recommend or Off."""
    threshold: float
    """Efficiency under which other plans are looked for."""
    window_seconds: float
    """Seconds that are measured before anything is concluded."""
    cooldown_seconds: float
    """Seconds between two changes."""
    minimum_savings_usd: float
    """Dollars that a change must save over the rest of the run."""


@dataclass(frozen=True)
class Window:
    """Measurements of the present attempt over the last seconds."""

    seconds: float
    """Seconds between the first and the last scrape."""
    steps: float
    """Steps taken in them."""
    efficiency: float
    """Share of the ranks' time that moves the weights."""
    wall_step_seconds: float
    """Seconds of a step by the clock, everything included."""
    measured: Measured
    """The part of a step that the cost models predict."""


@dataclass(frozen=True)
class SlowNode:
    """A node whose ranks work longer on the same than their peers."""

    name: str
    """The node."""
    pods: tuple[str, ...]
    """Names of the pods on it that are slow."""
    ranks: tuple[int, ...]
    """Their slow ranks."""
    working_seconds: float
    """Seconds of a step on the slowest of these ranks."""
    peers_seconds: float
    """Seconds of a step on the median of that rank's peers."""
    rest_seconds: float
    """Seconds of a step on the rank that works longest of all that are elsewhere."""

    @property
    def slowdown(self) -> float:
        """Times as long."""
        return self.working_seconds / self.peers_seconds


@dataclass(frozen=True)
class Situation:
    """Everything that a verdict depends on."""

    now: datetime
    """The moment."""
    settings: AdjustSettings
    """What the manifest says."""
    plan: Plan
    """The plan in force."""
    space: Space | None
    """All plans that the manifest allows; None if model or hardware is not known."""
    window: Window | None
    """What the ranks measured; None until a step can be told."""
    remaining_steps: int
    """Steps that are left."""
    hourly_usd: float | None
    """Dollars an hour of the pods that run; None if a price is unknown."""
    changes: tuple[Change, ...]
    """Changes that were made, oldest first."""
    barred: frozenset[str]
    """Keys of plans that are not tried again."""
    deadline_left_seconds: float | None = None
    """Seconds until the run shall be done; None without a deadline."""
    budget_left_usd: float | None = None
    """Dollars that may still be spent; None without a budget."""
    slow: SlowNode | None = None
    """A node that holds up the others, if there is one."""
    spare_nodes: int | None = None
    """Nodes that the pods may run on and none of them does; None where that is not known."""
    free_nodes: Mapping[str, int] = field(default_factory=dict)
    """Spare nodes of other instance types that the manifest allows, by type."""


@dataclass(frozen=True)
class MeasuredSituation(Situation):
    """A situation in which the ranks were measured and the nodes have a price: what dollars can be compared in."""

    window: Window
    """What the ranks measured."""
    hourly_usd: float
    """Dollars an hour of the pods that run."""

    @property
    def step_usd(self) -> float:
        """Dollars of a step as it goes now, everything included."""
        return self.window.wall_step_seconds * self.hourly_usd / 3600

    @property
    def node_hourly_usd(self) -> float:
        """Dollars an hour of one node, the mean over the nodes of the plan."""
        return self.hourly_usd / self.plan.nodes

    @property
    def overhead_seconds(self) -> float:
        """Seconds of a step that no model predicts: checkpoints, evaluation, waiting for data."""
        return self.window.wall_step_seconds - self.window.measured.step_seconds

    @property
    def is_late(self) -> bool:
        """Whether the run misses its deadline at the present speed."""
        left = self.deadline_left_seconds
        return left is not None and self.remaining_steps * self.window.wall_step_seconds > left


def measured_of(given: Situation) -> MeasuredSituation | None:
    """The situation with its measurements; None if there is no window or no price."""
    if given.window is None or given.hourly_usd is None:
        return None
    return MeasuredSituation(**{one.name: getattr(given, one.name) for one in fields(given)})


@dataclass(frozen=True)
class Verdict:
    """What to do, and why."""

    action: Action
    """What to do."""
    reason: str
    """One CamelCase word."""
    message: str
    """A sentence with its figures."""
    plan: Plan | None = None
    """The plan to change to, if any."""
    predicted_step_usd: float | None = None
    """Dollars of a step under that plan, as promised."""
    predicted_savings_usd: float | None = None
    """Dollars promised over the rest of the run, the cost of the change taken off."""
    searched: bool = False
    """Whether other plans were searched for."""
    of_slow_node: Verdict | None = None
    """Why a node that is slow is not left, where there is one."""
    kind: Kind | None = None
    """How the plan is changed to, where the two plans do not tell."""


def hold(reason: str, message: str) -> Verdict:
    """The verdict to leave the run as it is."""
    return Verdict(Action.HOLD, reason, message)


def wants_time(given: Situation) -> bool:
    """Whether the owner asked for the fastest run, not for the cheapest."""
    return given.space is not None and given.space.objective is Objective.TIME


def affordable(given: Situation, usd: float) -> bool:
    """Whether the budget has so many dollars left."""
    return given.budget_left_usd is None or usd <= given.budget_left_usd
