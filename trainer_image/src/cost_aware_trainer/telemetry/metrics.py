"""Prometheus metrics of every rank, under the names and labels of the contract."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from cost_aware_trainer.contract import (
    ENV_ADDRESS,
    ENV_ATTEMPT,
    ENV_JOB,
    ENV_METRICS_PORT,
    ENV_NAMESPACE,
    METRIC_LABELS,
    METRICS_PORT,
    LaunchStage,
    LinkLevel,
    Metric,
    Phase,
)
from cost_aware_trainer.telemetry.phases import Lap

logger = logging.getLogger(__name__)

HELP = {
    Metric.STEP: "Last completed optimizer step.",
    Metric.TOTAL_STEPS: "Steps of the whole run.",
    Metric.STEPS: "Optimizer steps completed by this process.",
    Metric.TOKENS: "Tokens trained by this rank.",
    Metric.SAMPLES: "Samples trained by this rank.",
    Metric.MODEL_FLOPS: "Floating-point operations that the model needs for what this rank trained; recomputation not counted.",
    Metric.LOSS: "Mean training loss of the last global batch, nats per token.",
    Metric.HELDOUT_LOSS: "Mean loss of the last held-out evaluation, nats per token.",
    Metric.GRADIENT_NORM: "Norm of the last gradient before clipping.",
    Metric.LEARNING_RATE: "Learning rate of the last step.",
    Metric.PHASE_SECONDS: "Wall time of steps by phase, seconds.",
    Metric.STEP_SECONDS: "Wall time of steps, seconds.",
    Metric.COMMUNICATION_BYTES: "Bytes sent by this rank in training collectives.",
    Metric.OVERLAPPED_SECONDS: "Time in which gradients travelled between replicas while this rank computed, seconds.",
    Metric.MEMORY_BYTES: "Peak memory: allocated on the CUDA device, or resident on a CPU.",
    Metric.CHECKPOINT_STEP: "Step of the newest finished checkpoint.",
    Metric.RESUMED_STEP: "Step that this attempt resumed from; 0 for a fresh start.",
    Metric.RECONFIGURATIONS: "Times that this process went on under another plan without being restarted.",
    Metric.RECONFIGURATION_SECONDS: "How long this attempt took from its order to its first step's end, by stage.",
    Metric.LINK_LATENCY: "How long a message between two ranks waits, by level of the link, seconds; measured at the start.",
    Metric.LINK_BANDWIDTH: "Bytes a second between two ranks while their neighbours send too, by level; measured at the start.",
}
_MORE_LABELS = {
    Metric.PHASE_SECONDS: ("phase",),
    Metric.RECONFIGURATION_SECONDS: ("stage",),
    Metric.LINK_LATENCY: ("level",),
    Metric.LINK_BANDWIDTH: ("level",),
}
_COUNTERS = frozenset(metric for metric in Metric if metric.endswith("_total"))


@dataclass(frozen=True)
class LinkFacts:
    """Links of one level. Both figures are medians over its pairs of ranks."""

    latency_seconds: float
    """Seconds that a message waits."""
    bytes_per_second: float
    """Bytes a second of one rank."""
    pairs: int
    """Number of pairs measured."""


class RankMetrics:
    """Series of one rank in a registry of its own, so that several ranks can live in one process."""

    def __init__(self, rank: int) -> None:
        self.registry = CollectorRegistry()
        values = (
            os.environ.get(ENV_NAMESPACE, ""),
            os.environ.get(ENV_JOB, ""),
            os.environ.get(ENV_ATTEMPT, "0"),
            str(rank),
        )
        self._labels = dict(zip(METRIC_LABELS, values, strict=True))
        self._links: Mapping[LinkLevel, LinkFacts] = {}
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}
        for metric in Metric:
            labels = (*METRIC_LABELS, *_MORE_LABELS.get(metric, ()))
            if metric in _COUNTERS:
                # prometheus_client appends `_total` itself.
                name = metric.removesuffix("_total")
                self._counters[metric] = Counter(name, HELP[metric], labels, registry=self.registry)
            else:
                self._gauges[metric] = Gauge(metric, HELP[metric], labels, registry=self.registry)
        self._show_all()

    def _show_all(self) -> None:
        """Makes series exist before they have a value."""
        for phase in Phase:
            self._counters[Metric.PHASE_SECONDS].labels(**self._labels, phase=phase.value)
        for stage in LaunchStage:
            self._gauges[Metric.RECONFIGURATION_SECONDS].labels(**self._labels, stage=stage.value)
        self._counters[Metric.RECONFIGURATIONS].labels(**self._labels)
        self.set_links(self._links)

    def start_attempt(self, attempt: int) -> None:
        """Changes the attempt's label. Gauges keep their values, counters start again."""
        kept = {
            metric: gauge.labels(**self._labels)._value.get()
            for metric, gauge in self._gauges.items()
            if metric not in _MORE_LABELS
        }
        for series in (*self._gauges.values(), *self._counters.values()):
            series.clear()
        self._labels["attempt"] = str(attempt)
        self._show_all()
        for metric, value in kept.items():
            self.set(metric, value)

    def set_stages(self, stage_seconds: Mapping[LaunchStage, float]) -> None:
        """Shows the seconds of the attempt's stages up to its first step. Stages that it did not have stay 0."""
        for stage, seconds in stage_seconds.items():
            self._gauges[Metric.RECONFIGURATION_SECONDS].labels(**self._labels, stage=stage.value).set(seconds)

    def set_links(self, links: Mapping[LinkLevel, LinkFacts]) -> None:
        """Shows the measured links. They stay for all attempts of this process."""
        self._links = links
        for level, facts in links.items():
            labels = self._labels | {"level": level.value}
            self._gauges[Metric.LINK_LATENCY].labels(**labels).set(facts.latency_seconds)
            self._gauges[Metric.LINK_BANDWIDTH].labels(**labels).set(facts.bytes_per_second)

    def set(self, metric: Metric, value: float) -> None:
        """Sets a gauge."""
        self._gauges[metric].labels(**self._labels).set(value)

    def add(self, metric: Metric, amount: float) -> None:
        """Adds to a counter."""
        self._counters[metric].labels(**self._labels).inc(amount)

    def add_lap(self, lap: Lap) -> None:
        """Adds the wall time of one step, in total and by phase."""
        self.add(Metric.STEP_SECONDS, lap.step_seconds)
        for phase, seconds in lap.phase_seconds.items():
            self._counters[Metric.PHASE_SECONDS].labels(**self._labels, phase=phase.value).inc(seconds)

    def serve(self, local_rank: int) -> bool:
        """Serves the registry on this rank's port. Returns False and logs an error if the port is taken; training goes on."""
        port = int(os.environ.get(ENV_METRICS_PORT, METRICS_PORT)) + local_rank
        try:
            start_http_server(port, addr=os.environ.get(ENV_ADDRESS) or "0.0.0.0", registry=self.registry)  # noqa: S104
        except OSError as error:
            logger.error(
                "METRICS NOT SERVED on port %d: %s. Training goes on unobserved; free the port or set %s",
                port,
                error,
                ENV_METRICS_PORT,
            )
            return False
        return True


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated by CUDA on a CUDA device, otherwise the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts kibibytes, macOS bytes.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
