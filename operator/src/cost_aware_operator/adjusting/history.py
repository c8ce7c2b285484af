"""The changes of a run as values: one begun, its first step seen, judged, or given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from cost_aware_operator.adjusting.changes import (
    KEPT,
    Change,
    ChangeOutcome,
    described,
    kind_of,
    move_key,
    plan_key,
)
from cost_aware_operator.adjusting.situation import Action, Situation, Verdict, measured_of
from cost_aware_operator.planning.plan import Plan


@dataclass(frozen=True)
class History:
    """Changes of a run and plans that are not tried again."""

    changes: tuple[Change, ...] = ()
    """The newest changes, oldest first."""
    barred: tuple[str, ...] = ()
    """Keys of plans (`plan_key`) and of moves (`move_key`) that did not work."""

    @property
    def last(self) -> Change | None:
        """The newest change."""
        return self.changes[-1] if self.changes else None

    def _with_last(self, change: Change, *, bar: Plan | None = None) -> History:
        barred = self.barred if bar is None else tuple(dict.fromkeys((*self.barred, *_keys(change, bar))))
        return History((*self.changes[:-1], change), barred)

    def begun(self, situation: Situation, verdict: Verdict, attempt: int) -> History:
        """With a change that the verdict orders; a rollback ends the change that it undoes, and bars its plan.

        Raises:
            ValueError: the verdict orders nothing, or nothing was measured that it could rest on.
        """
        if verdict.plan is None or verdict.action not in (Action.CHANGE, Action.ROLL_BACK):
            raise ValueError(f"{verdict.action} is no change")
        measured = measured_of(situation)
        if measured is None:
            raise ValueError("nothing was measured under the plan in force")
        judged, back = self.judged(situation), verdict.action is Action.ROLL_BACK
        last = judged.last
        if last is not None and back:
            judged = judged._with_last(replace(last, outcome=ChangeOutcome.ROLLED_BACK), bar=situation.plan)
        elif last is not None and last.is_open:
            judged = judged._with_last(replace(last, outcome=ChangeOutcome.SUPERSEDED))
        change = Change(
            at=situation.now,
            attempt=attempt,
            kind=verdict.kind or kind_of(situation.plan, verdict.plan),
            origin=situation.plan,
            target=verdict.plan,
            reason=verdict.message,
            before_step_usd=measured.step_usd,
            predicted_step_usd=verdict.predicted_step_usd or 0.0,
            predicted_savings_usd=verdict.predicted_savings_usd or 0.0,
            remaining_steps=situation.remaining_steps,
            is_rollback=back,
            before_node_usd=measured.node_hourly_usd,
        )
        return History((*judged.changes, change)[-KEPT:], judged.barred)

    def resumed(self, now: datetime, stage_seconds: Mapping[str, float] | None = None) -> History:
        """With the first step under the newest change done, and how long its stages took."""
        last = self.last
        if last is None or last.outcome is not ChangeOutcome.IN_PROGRESS:
            return self
        downtime = (now - last.at).total_seconds()
        return self._with_last(
            replace(
                last,
                resumed_at=now,
                downtime_seconds=downtime,
                stage_seconds=dict(stage_seconds or {}),
                outcome=ChangeOutcome.CHECKING,
            )
        )

    def judged(self, situation: Situation) -> History:
        """With what the newest change has come to, once a window is measured under it."""
        last, measured = self.last, measured_of(situation)
        if last is None or last.outcome is not ChangeOutcome.CHECKING or measured is None:
            return self
        if measured.window.seconds < measured.settings.window_seconds:
            return self
        kept = _realised(last, measured.step_usd, measured.hourly_usd, measured.plan.nodes)
        return self._with_last(kept)

    def complete(self, now: datetime, hourly_usd: float | None) -> History:
        """With the run done before a window was measured under the newest change: it is judged by all the steps since.

        Where no step of it was seen, it stays without figures.
        """
        last = self.last
        if last is None or not last.is_open:
            return self
        # its first step had ended when the ranks were seen to have resumed
        steps, seconds = last.remaining_steps - 1, (now - (last.resumed_at or now)).total_seconds()
        if steps < 1 or seconds <= 0 or hourly_usd is None:
            return self._with_last(replace(last, outcome=ChangeOutcome.KEPT))
        return self._with_last(_realised(last, seconds / steps * hourly_usd / 3600, hourly_usd, last.target.nodes))

    def failed(self, why: str) -> tuple[History, Plan] | None:
        """With the newest change given up as it did not start, and the plan to go back to; None if none is under way."""
        last = self.last
        if last is None or last.outcome is not ChangeOutcome.IN_PROGRESS:
            return None
        ended = replace(last, outcome=ChangeOutcome.FAILED, reason=f"{last.reason} (it did not start: {why})"[:1024])
        plan = replace(last.origin, explanation=f"back from {described(last.target)}: {why}"[:1024])
        return self._with_last(ended, bar=last.target), plan


def _realised(change: Change, step_usd: float, hourly_usd: float, nodes: int) -> Change:
    """A change that stays, with what a step costs under it, and what it saved of the steps that were left, its own cost taken off."""
    paid = (change.downtime_seconds or 0.0) * hourly_usd / 3600
    savings = change.remaining_steps * (change.before_at(hourly_usd / nodes) - step_usd) - paid
    return replace(change, realised_step_usd=step_usd, realised_savings_usd=savings, outcome=ChangeOutcome.KEPT)


def _keys(change: Change, bar: Plan) -> tuple[str, ...]:
    """What is not tried again: to leave the nodes that a change left, or else its plan."""
    left = tuple(move_key(node) for node in change.target.excluded_nodes if node not in change.origin.excluded_nodes)
    return left or (plan_key(bar),)
