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
    """What the manifest says of adjusting."""

    policy: AdjustPolicy
    threshold: float
    window_seconds: float
    cooldown_seconds: float
    minimum_savings_usd: float


@dataclass(frozen=True)
class Window:
    """What the ranks of the present attempt did over the last seconds. `wall_step_seconds` counts everything."""

    seconds: float
    steps: float
    efficiency: float
    wall_step_seconds: float
    measured: Measured


@dataclass(frozen=True)
class SlowNode:
    """A node whose ranks work longer on the same than their peers.

    Seconds of a step: `working_seconds` on its slowest rank, `peers_seconds` on the median of that rank's peers, `rest_seconds` on
    the rank that works longest of all that are elsewhere.
    """

    name: str
    pods: tuple[str, ...]
    ranks: tuple[int, ...]
    working_seconds: float
    peers_seconds: float
    rest_seconds: float

    @property
    def slowdown(self) -> float:
        """Times as long."""
        return self.working_seconds / self.peers_seconds


@dataclass(frozen=True)
class Situation:
    """All that a verdict depends on. `space` is None where model or hardware is not known."""

    now: datetime
    settings: AdjustSettings
    plan: Plan
    space: Space | None
    window: Window | None
    remaining_steps: int
    hourly_usd: float | None
    changes: tuple[Change, ...]
    barred: frozenset[str]
    deadline_left_seconds: float | None = None
    budget_left_usd: float | None = None
    slow: SlowNode | None = None
    """A node that holds up the others, if there is one."""
    spare_nodes: int | None = None
    """Nodes that the pods may run on and none of them does; None where that is not known."""
    free_nodes: Mapping[str, int] = field(default_factory=dict)
    """The same of other instance types that the manifest allows, by type."""


@dataclass(frozen=True)
class MeasuredSituation(Situation):
    """A situation in which the ranks were measured and the nodes have a price: what dollars can be compared in."""

    window: Window
    hourly_usd: float

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
    """What to do and why: one CamelCase word, and a sentence with its numbers."""

    action: Action
    reason: str
    message: str
    plan: Plan | None = None
    predicted_step_usd: float | None = None
    predicted_savings_usd: float | None = None
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
