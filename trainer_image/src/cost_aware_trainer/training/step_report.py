"""Report of a finished step: metrics, the steps log's line and the run's result, for the bundled trainer and for sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_aware_trainer.contract import AgentPhase, LaunchStage, Metric, RunResult
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.telemetry.phases import Lap
from cost_aware_trainer.telemetry.traffic import Axis


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Facts of one finished step on one rank."""

    attempt: int
    """Attempt that the step belongs to; 0 if the run was started by hand."""
    progress: RunProgress
    """Progress of the run after the step."""
    lap: Lap
    """Wall time of the step."""
    global_samples: int
    """Samples of the step on all ranks."""
    samples: float
    """This rank's share of them: all ranks' shares add up to the global batch."""
    tokens: float | None = None
    """This rank's share of the step's tokens; None for a session, which does not know its samples' tokens."""
    model_flops: float | None = None
    """Floating-point operations that the model needs for those tokens; None for a session."""
    gradient_norm: float
    """Norm of the whole model's gradient before clipping."""
    learning_rate: float
    """Rate with which the step was applied."""
    heldout_loss: float | None
    """Held-out loss for the log's line, nats per token; None if there is none to show."""
    memory_bytes: int
    """Peak memory of this process."""
    sent_bytes: Mapping[Axis, float]
    """Bytes that this rank sent in the step, by axis."""
    overlapped_seconds: float
    """Seconds in which gradients travelled while this rank computed."""
    stage_seconds: Mapping[LaunchStage, float] = field(default_factory=dict)
    """Seconds of each stage from the order to the end of this step; empty if it is not the attempt's first step."""

    def show(self, metrics: RankMetrics) -> None:
        """Puts the step into this rank's metrics."""
        if self.stage_seconds:
            metrics.set_stages(self.stage_seconds)
        gauges = {
            Metric.STEP: self.progress.step,
            Metric.LOSS: self.progress.loss or 0.0,
            Metric.GRADIENT_NORM: self.gradient_norm,
            Metric.LEARNING_RATE: self.learning_rate,
            Metric.MEMORY_BYTES: self.memory_bytes,
        }
        for gauge, value in gauges.items():
            metrics.set(gauge, value)
        counters = {
            Metric.STEPS: 1.0,
            Metric.SAMPLES: self.samples,
            Metric.TOKENS: self.tokens,
            Metric.MODEL_FLOPS: self.model_flops,
            Metric.COMMUNICATION_BYTES: sum(self.sent_bytes.values()),
            Metric.OVERLAPPED_SECONDS: self.overlapped_seconds,
        }
        for counter, amount in counters.items():
            if amount is not None:
                metrics.add(counter, amount)
        metrics.add_lap(self.lap)

    def log_entry(self) -> dict[str, Any]:
        """Line of the steps log, as JSON values."""
        stages = {"reconfiguration_seconds": dict(self.stage_seconds)} if self.stage_seconds else {}
        return {
            "attempt": self.attempt,
            "step": self.progress.step,
            "loss": self.progress.loss,
            "heldout_loss": self.heldout_loss,
            "sample_first": (self.progress.step - 1) * self.global_samples,
            "sample_last": self.progress.step * self.global_samples - 1,
            "step_seconds": self.lap.step_seconds,
            "seconds": {phase.value: seconds for phase, seconds in self.lap.phase_seconds.items()},
            "overlapped_seconds": self.overlapped_seconds,
            **stages,
            "bytes": {axis.value: sent for axis, sent in self.sent_bytes.items()},
        }


def run_result(
    outcome: AgentPhase,
    progress: RunProgress,
    *,
    total_steps: int,
    global_samples: int,
    heldout_loss: float | None,
    save_seconds: float,
    message: str = "",
) -> RunResult:
    """Result of a run that ends with this progress.

    Args:
        outcome: kind of end.
        progress: the run's progress at its end.
        total_steps: steps of the whole run.
        global_samples: samples of one step.
        heldout_loss: the last held-out loss, nats per token; None if there was no evaluation.
        save_seconds: seconds of the last save that the ranks waited for.
        message: reason of an end that is not a completion.
    """
    return RunResult(
        outcome=outcome,
        step=progress.step,
        total_steps=total_steps,
        loss=progress.loss,
        heldout_loss=heldout_loss,
        samples=progress.step * global_samples,
        samples_checksum=progress.samples_checksum,
        message=message,
        save_seconds=save_seconds,
    )
