"""The operator's own metrics, all names in one place."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cost_aware_operator.api.job import JobKey, TrainingJob
from cost_aware_operator.api.status import JobStatus
from cost_aware_trainer.contract import Phase

_JOB = ("namespace", "job")


class Telemetry:
    """Gauges of every job (prefix `catj_`), removed with it, and figures of the operator itself (`catj_operator_`)."""

    def __init__(self, queue_length: Callable[[], float], queue_age: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        self._step = Gauge("catj_step", "Finished optimizer steps", _JOB, registry=registry)
        self._total_steps = Gauge("catj_total_steps", "Steps of the whole run", _JOB, registry=registry)
        self._loss = Gauge("catj_loss", "Training loss, nats per token", _JOB, registry=registry)
        self._efficiency = Gauge(
            "catj_efficiency_ratio", "Share of the ranks' time that moves the weights", _JOB, registry=registry
        )
        self._share = Gauge(
            "catj_time_share_ratio", "Share of the ranks' time by phase", (*_JOB, "phase"), registry=registry
        )
        self._speed = Gauge("catj_tokens_per_second", "Tokens trained a second", _JOB, registry=registry)
        self._usd = Gauge("catj_cost_usd", "Dollars accrued, by cause", (*_JOB, "cause"), registry=registry)
        self._block = Gauge("catj_cost_block_usd", "Dollars in all, by block", (*_JOB, "block"), registry=registry)
        self._saved = Gauge("catj_savings_usd", "Dollars saved against the submitted plan", _JOB, registry=registry)
        self._hourly = Gauge("catj_hourly_usd", "Dollars an hour of the pods that are up", _JOB, registry=registry)
        self._mfu = Gauge("catj_mfu_ratio", "Operations the model needs over the ranks' peak", _JOB, registry=registry)
        self._paid = Gauge(
            "catj_paid_time_share_ratio", "Share of all paid pod-seconds by cause", (*_JOB, "cause"), registry=registry
        )
        self._error = Gauge(
            "catj_prediction_error_ratio",
            "|predicted - measured| / measured of the plan in force, by figure",
            (*_JOB, "figure"),
            registry=registry,
        )
        self._attempt = Gauge("catj_attempt", "Starts of the ranks", _JOB, registry=registry)
        self._gauges = (
            self._step, self._total_steps, self._loss, self._efficiency, self._share, self._speed, self._usd, self._hourly,
            self._mfu, self._block, self._saved, self._paid, self._error, self._attempt,
        )  # fmt: skip
        self._reconciles = Counter("catj_operator_reconciles", "Reconciles by outcome", ("outcome",), registry=registry)
        self._seconds = Histogram("catj_operator_reconcile_seconds", "Duration of a reconcile", registry=registry)
        Gauge("catj_operator_queue_length", "Jobs waiting for a worker", registry=registry).set_function(queue_length)
        Gauge("catj_operator_queue_age_seconds", "How long the first of them waits", registry=registry).set_function(
            queue_age
        )
        self.leader = Gauge("catj_operator_leader", "1 while this replica leads", registry=registry)
        self.watch_lag = Gauge(
            "catj_operator_watch_lag_seconds",
            "For how long the watches have failed to deliver what a list shows",
            registry=registry,
        )

    def reconciled(self, seconds: float, outcome: str) -> None:
        """One reconcile ended."""
        self._reconciles.labels(outcome).inc()
        self._seconds.observe(seconds)

    def published(self, job: TrainingJob, status: JobStatus) -> None:
        """A job's status was written: its gauges follow."""
        names = (job.key.namespace, job.key.name)
        self._attempt.labels(*names).set(status.attempt)
        if status.progress is not None:
            self._step.labels(*names).set(status.progress.step)
            self._total_steps.labels(*names).set(status.progress.total_steps)
            self._speed.labels(*names).set(status.progress.tokens_per_second or 0.0)
            if status.progress.loss is not None:
                self._loss.labels(*names).set(status.progress.loss)
        if status.efficiency is not None:
            shares = status.efficiency.model_dump()
            self._efficiency.labels(*names).set(status.efficiency.current)
            for phase in Phase:
                self._share.labels(*names, phase).set(shares[phase])
            _told(self._mfu, names, status.efficiency.mfu)
        measured = status.plan.measured if status.plan is not None else None
        _told(self._error, (*names, "step_seconds"), measured.step_error if measured is not None else None)
        _told(self._error, (*names, "memory"), measured.memory_error if measured is not None else None)
        if status.goodput is not None:
            for cause, share in status.goodput.model_dump().items():
                self._paid.labels(*names, cause).set(share)
        if status.cost is not None:
            _told(self._hourly, names, status.cost.hourly_usd)
            for block, usd in status.cost.by_block.model_dump().items():
                self._block.labels(*names, block).set(usd)
            _told(self._saved, names, status.cost.savings.usd if status.cost.savings is not None else None)
            for cause, usd in status.cost.by_cause.model_dump().items():
                self._usd.labels(*names, cause).set(usd)

    def forgotten(self, key: JobKey) -> None:
        """A job is gone: so are its series."""
        for gauge in self._gauges:
            gauge.remove_by_labels({"namespace": key.namespace, "job": key.name})


def _told(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
    """Sets a series, or takes it away where the figure is not known: never a zero in its stead."""
    if value is not None:
        gauge.labels(*labels).set(value)
    else:
        gauge.remove(*labels)
