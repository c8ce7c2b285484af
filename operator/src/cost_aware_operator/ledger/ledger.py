"""Accrual: what each pod cost since it was last accounted, and what that time went to.

The state is a value: `accrue(state, pods, progress, now)` gives the next one. Everything in it is absolute (accounted until when,
seen how many seconds of a phase), so saving it late or computing a step twice from the same saved state loses and
doubles nothing: an operator that was away catches up from where the last saved state ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from cost_aware_operator.costs.tables.prices import USD_PER_GB_BETWEEN_ZONES
from cost_aware_operator.ledger.accounts import CLOCKS_APART, booked_until, opened
from cost_aware_operator.ledger.accounts import Cause as Cause
from cost_aware_operator.ledger.accounts import LedgerState as LedgerState
from cost_aware_operator.ledger.accounts import PodAccount as PodAccount
from cost_aware_operator.ledger.accounts import PodFacts as PodFacts
from cost_aware_trainer.contract import Phase

REMEMBERED = timedelta(minutes=10)
"""How long a pod that is gone stays in the state, so that late news of it is recognised."""

NEWS_WITHIN = timedelta(seconds=10)
"""How long after a pod's disappearance its end may still be told."""

CAUSE_OF_PHASE = {
    Phase.COMPUTE: Cause.PRODUCTIVE,
    Phase.OPTIMIZER: Cause.PRODUCTIVE,
    Phase.EVALUATION: Cause.PRODUCTIVE,
    Phase.COMMUNICATION: Cause.COMMUNICATION,
    Phase.TENSOR_COMMUNICATION: Cause.COMMUNICATION,
    Phase.PIPELINE_COMMUNICATION: Cause.COMMUNICATION,
    Phase.PIPELINE_BUBBLE: Cause.IDLE,
    Phase.STRAGGLER_WAIT: Cause.IDLE,
    Phase.CHECKPOINT: Cause.CHECKPOINT,
    Phase.DATA: Cause.IDLE,
}


@dataclass(frozen=True)
class Fees:
    """Dollars an hour that are paid beside the nodes while a run has pods."""

    storage_hourly_usd: float = 0.0
    """Kept checkpoints."""
    management_hourly_usd: float = 0.0
    """The cluster's control plane."""


@dataclass(frozen=True)
class TrainedSteps:
    """Steps as the ranks tell them; all zero while none answers."""

    attempt: int = 0
    """The attempt."""
    step: int = 0
    """The newest step that is done."""
    resumed_step: int = 0
    """The step that the attempt resumed from."""


@dataclass
class _Book:
    """Sums while one accrual is computed."""

    usd: dict[Cause, float]
    """Dollars by cause."""
    seconds: dict[Cause, float]
    """Pod-seconds by cause."""
    data_usd: float
    """Dollars of waiting for data, a part of idle."""
    transfer_usd: float
    """Dollars of bytes between zones."""
    pod_seconds: float
    """Pod-seconds, priced or not."""
    unpriced_pod_seconds: float
    """Pod-seconds without a price."""
    accounts: list[PodAccount] = field(default_factory=list)
    """Accounts of the pods after this accrual."""

    def book(self, cause: Cause, seconds: float, hourly_usd: float | None) -> None:
        """Seconds of one pod that went to one cause."""
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds
        self.usd[cause] = self.usd.get(cause, 0.0) + seconds * (hourly_usd or 0.0) / 3600.0


def accrue(
    state: LedgerState,
    pods: Sequence[PodFacts],
    progress: TrainedSteps,
    now: datetime,
    fees: Fees | None = None,
    told: Mapping[str, datetime] | None = None,
    lag_seconds: float = 0.0,
) -> LedgerState:
    """The state after booking every pod up to `now`, or up to its end, and the fees for as long as one runs.

    A pod that runs is booked up to `lag_seconds` ago: news of its end are late by a little, and what was booked is not taken back.

    Pods that exist in the state but not in `pods` are gone. `told` holds ends of such pods, by uid, that their own agents have
    left word of. Without such a word their account ends where it was last accounted to, unless the replacement of the
    same index shows when they ended at the latest.
    """
    book = _Book(
        dict(state.usd),
        dict(state.seconds),
        state.data_usd,
        state.transfer_usd,
        state.pod_seconds,
        state.unpriced_pod_seconds,
    )
    known = {account.uid: account for account in state.accounts}
    crossing = _crossing_zones(pods)
    listed = {pod.uid for pod in pods}
    settled = {
        uid: now if uid in listed else at for uid, at in state.settled.items() if uid in listed or now - at < REMEMBERED
    }
    for pod in pods:
        if pod.uid in settled:
            continue
        account = known.pop(pod.uid) if pod.uid in known else opened(pod, now)
        _book_pod(book, account, pod, pod.uid in crossing, booked_until(account, pod, now, lag_seconds))
    for account in known.values():
        _book_gone(book, account, pods, (told or {}).get(account.uid), now, lag_seconds)
    _book_rework(book, state, progress)
    # a copy, so that what a newer operator wrote beside it is kept
    return state.model_copy(
        update={
            "usd": book.usd,
            "seconds": book.seconds,
            "data_usd": book.data_usd,
            "transfer_usd": book.transfer_usd,
            **_fees(state, pods, fees or Fees(), now),
            "pod_seconds": book.pod_seconds,
            "unpriced_pod_seconds": book.unpriced_pod_seconds,
            **_trained(state, progress),
            **_folded(book.accounts, settled, listed, now),
        }
    )


def _trained(state: LedgerState, progress: TrainedSteps) -> dict[str, int]:
    """Steps after these: those of the newest attempt are counted once, however often they are seen."""
    restarted = progress.attempt > state.attempt
    resumed = progress.resumed_step if restarted else state.attempt_resumed_step
    before = 0 if restarted else max(0, state.trained_step - state.attempt_resumed_step)
    stepped = max(0, progress.step - resumed - before) if progress.attempt >= max(state.attempt, 1) else 0
    return {
        "attempt": max(state.attempt, progress.attempt),
        "attempt_resumed_step": resumed,
        "trained_step": progress.step if restarted else max(state.trained_step, progress.step),
        "trained_steps": state.trained_steps + stepped,
    }


def _folded(
    accounts: Sequence[PodAccount], settled: Mapping[str, datetime], listed: set[str], now: datetime
) -> dict[str, Any]:
    """Accounts, but of pods that ended a while ago and are still listed only their uids: a Job keeps what is left of failed pods."""
    over = {
        account.uid
        for account in accounts
        if account.closed
        and not account.estimated
        and account.uid in listed
        and now - account.accounted_until >= REMEMBERED
    }
    return {
        "accounts": tuple(account for account in accounts if account.uid not in over),
        "settled": {**settled, **dict.fromkeys(over, now)},
    }


def _fees(state: LedgerState, pods: Sequence[PodFacts], fees: Fees, now: datetime) -> dict[str, Any]:
    """Storage and management since they were last booked, while a pod is there; as absolute as the pods' own time."""
    up = [p.begun_at for p in pods if p.ended_at is None]
    begun = max(state.fees_until, min(up)) if up and state.fees_until is not None else min(up, default=now)
    hours = max(0.0, (now - begun).total_seconds()) / 3600 if up else 0.0
    return {
        "storage_usd": state.storage_usd + hours * fees.storage_hourly_usd,
        "management_usd": state.management_usd + hours * fees.management_hourly_usd,
        "fees_until": max(now, state.fees_until or now),
    }


def _crossing_zones(pods: Sequence[PodFacts]) -> set[str]:
    """Uids of pods whose neighbour in the ring of all pods that are up lies in another zone."""
    ring = sorted((p for p in pods if p.ended_at is None), key=lambda p: p.index)
    following = [*ring[1:], *ring[:1]]
    return {p.uid for p, n in zip(ring, following, strict=True) if p.zone and n.zone and p.zone != n.zone}


def _book_pod(book: _Book, account: PodAccount, pod: PodFacts, crosses: bool, end: datetime) -> None:
    if account.closed:
        book.accounts.append(account)
        return
    hourly_usd = pod.price.hourly_usd if pod.price is not None else account.hourly_usd
    seconds = max(0.0, (end - account.accounted_until).total_seconds())
    credit, sent = dict(account.credit), 0.0
    if pod.phase_seconds is not None and pod.attempt >= account.attempt:
        # a newer attempt's ranks are new processes: their counters began at zero
        base = account.seen if pod.attempt == account.attempt else {}
        for phase, value in pod.phase_seconds.items():
            credit[phase] = credit.get(phase, 0.0) + max(0.0, value - base.get(phase, 0.0))
        sent = max(0.0, pod.sent_bytes - (account.seen_bytes if pod.attempt == account.attempt else 0.0))
        account = account.model_copy(
            update={"attempt": pod.attempt, "seen": dict(pod.phase_seconds), "seen_bytes": pod.sent_bytes}
        )
    if crosses:
        book.transfer_usd += sent / 1e9 * USD_PER_GB_BETWEEN_ZONES
    left = _spend(book, credit, seconds, pod.otherwise, hourly_usd)
    if pod.ended_at is not None:
        _take_back(book, (account.accounted_until - end).total_seconds(), pod.otherwise, hourly_usd)
    update: dict[str, Any] = {"hourly_usd": hourly_usd}
    if pod.ended_at is not None:
        update |= {"accounted_until": end, "closed": True, "credit": {}, "seen": {}}
    else:
        update |= {"accounted_until": max(end, account.accounted_until), "credit": left}
    book.accounts.append(account.model_copy(update=update))


def _spend(
    book: _Book, credit: dict[Phase, float], seconds: float, otherwise: Cause, hourly_usd: float | None
) -> dict[Phase, float]:
    """Books seconds against reported phases first; returns the credit that is left.

    Ranks report a step when it ends, so credit may run ahead of the seconds or lag behind them by part of a step; what
    runs ahead is kept for the next time.
    """
    book.pod_seconds += seconds
    if hourly_usd is None:
        book.unpriced_pod_seconds += seconds
    available = sum(credit.values())
    share = min(1.0, seconds / available) if available > 0 else 0.0
    for phase, value in credit.items():
        book.book(CAUSE_OF_PHASE[phase], value * share, hourly_usd)
        if phase is Phase.DATA:
            book.data_usd += value * share * (hourly_usd or 0.0) / 3600.0
    book.book(otherwise, max(0.0, seconds - available), hourly_usd)
    return {phase: value * (1.0 - share) for phase, value in credit.items() if value * (1.0 - share) > 1e-9}


def _take_back(book: _Book, seconds: float, otherwise: Cause, hourly_usd: float | None) -> None:
    """Unbooks what was booked after a pod's end: a kubelet tells of the end a second or two after it."""
    if seconds <= 0:
        return
    book.pod_seconds -= seconds
    if hourly_usd is None:
        book.unpriced_pod_seconds -= seconds
    usd = seconds * (hourly_usd or 0.0) / 3600.0
    # no rank reported steps in that time, so it was booked as unexplained; the rest are for safety
    for cause in (otherwise, Cause.RESTART, Cause.IDLE, Cause.PRODUCTIVE, Cause.COMMUNICATION, Cause.CHECKPOINT):
        part, time = min(usd, book.usd.get(cause, 0.0)), min(seconds, book.seconds.get(cause, 0.0))
        book.usd[cause] = book.usd.get(cause, 0.0) - part
        book.seconds[cause] = book.seconds.get(cause, 0.0) - time
        usd, seconds = usd - part, seconds - time


def _book_gone(
    book: _Book,
    account: PodAccount,
    pods: Sequence[PodFacts],
    told: datetime | None,
    now: datetime,
    lag_seconds: float,
) -> None:
    """A pod that is not listed any more, whose own word of its end is `told`.

    A list may lack a pod whose deletion the watch has yet to tell, so an open account waits for that news for a while. If
    none comes, the pod vanished while nobody looked, and ended no later than the replacement of its index began; its own word
    may still come. A closed account is remembered for longer: late news must not open it again and pay the pod twice.
    """
    gone_since = account.gone_since or now
    later = [p.begun_at for p in pods if p.index == account.index and p.begun_at > account.started_at]
    if told is not None and (account.estimated or not account.closed):
        # anybody may write to a volume: no word reaches beyond what is known, as far as clocks of nodes may differ
        latest = min(now, *later) if later else now
        earliest = max(account.started_at, (account.seen_until or account.accounted_until) - CLOCKS_APART)
        end = min(max(told, earliest), latest + CLOCKS_APART)
        account = _settled(book, account, end).model_copy(update={"gone_since": gone_since})
    if account.closed:
        if now - gone_since < REMEMBERED:
            book.accounts.append(account.model_copy(update={"gone_since": gone_since}))
        return
    if now - gone_since < NEWS_WITHIN:
        book.accounts.append(account.model_copy(update={"gone_since": gone_since}))
        return
    # it ran when it was last seen, and it was booked up to a little before that
    seen = min(now, account.accounted_until + timedelta(seconds=lag_seconds))
    end = max(min(later), account.accounted_until) if later else seen
    update = {"estimated": True, "seen_until": account.accounted_until}
    book.accounts.append(_settled(book, account, end).model_copy(update=update))


def _settled(book: _Book, account: PodAccount, end: datetime) -> PodAccount:
    """The account, closed at an end that may lie before what was booked."""
    seconds = (end - account.accounted_until).total_seconds()
    if seconds >= 0:
        _spend(book, dict(account.credit), seconds, Cause.RESTART, account.hourly_usd)
    else:
        _take_back(book, -seconds, Cause.RESTART, account.hourly_usd)
    update = {"closed": True, "estimated": False, "accounted_until": end, "credit": {}}
    return account.model_copy(update=update)


def _book_rework(book: _Book, state: LedgerState, progress: TrainedSteps) -> None:
    """A new attempt that resumed before the last trained step makes the steps between lost work."""
    lost = state.trained_step - progress.resumed_step
    if progress.attempt <= state.attempt or lost <= 0 or state.trained_steps <= 0:
        return
    share = min(1.0, lost / state.trained_steps)
    for cause in (Cause.PRODUCTIVE, Cause.COMMUNICATION):
        for sums in (book.usd, book.seconds):
            moved = sums.get(cause, 0.0) * share
            sums[cause] = sums.get(cause, 0.0) - moved
            sums[Cause.LOST_WORK] = sums.get(Cause.LOST_WORK, 0.0) + moved
