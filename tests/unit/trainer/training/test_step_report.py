import json

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cost_aware_trainer.contract import AgentPhase, LaunchStage, Metric, Phase
from cost_aware_trainer.data.samples import add_checksums
from cost_aware_trainer.state.manifests import CheckpointManifest, RunFacts
from cost_aware_trainer.state.progress import RunProgress
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.telemetry.phases import Lap
from cost_aware_trainer.telemetry.traffic import Axis
from cost_aware_trainer.training.step_report import StepReport, run_result

LAP = Lap(2.0, {Phase.COMPUTE: 1.5, Phase.DATA: 0.5})


def report(**changes):
    fields = {
        "attempt": 3, "progress": RunProgress(5, 17, 1.25), "lap": LAP, "global_samples": 8, "samples": 4.0,
        "gradient_norm": 0.5, "learning_rate": 0.001, "heldout_loss": None, "memory_bytes": 100,
        "sent_bytes": {Axis.DATA: 10.0, Axis.TENSOR: 20.0}, "overlapped_seconds": 0.25,
    }  # fmt: skip
    return StepReport(**(fields | changes))


def shown(step):
    metrics = RankMetrics(0)
    step.show(metrics)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (s.name, s.labels.get("phase") or s.labels.get("stage")): s.value for family in families for s in family.samples
    }


def test_the_log_line_has_the_documented_keys_in_their_order():
    line = json.loads(json.dumps(report().log_entry()))
    assert list(line) == [
        "attempt", "step", "loss", "heldout_loss", "sample_first", "sample_last", "step_seconds", "seconds",
        "overlapped_seconds", "bytes",
    ]  # fmt: skip
    assert (line["sample_first"], line["sample_last"]) == (32, 39)
    assert line["seconds"] == {"compute": 1.5, "data": 0.5}
    assert line["bytes"] == {"data": 10.0, "tensor": 20.0}


def test_only_an_attempts_first_step_says_how_long_it_took_to_get_there():
    first = report(stage_seconds={LaunchStage.LOAD: 1.0, LaunchStage.FIRST_STEP: 2.0})
    assert first.log_entry()["reconfiguration_seconds"] == {"load": 1.0, "first_step": 2.0}
    assert shown(first)[Metric.RECONFIGURATION_SECONDS, "load"] == 1.0
    assert "reconfiguration_seconds" not in report().log_entry()


def test_a_step_shows_in_gauges_and_counters():
    series = shown(report(tokens=64.0, model_flops=1e6))
    expected = {
        Metric.STEP: 5, Metric.LOSS: 1.25, Metric.GRADIENT_NORM: 0.5, Metric.LEARNING_RATE: 0.001,
        Metric.MEMORY_BYTES: 100, Metric.STEPS: 1, Metric.SAMPLES: 4, Metric.TOKENS: 64, Metric.MODEL_FLOPS: 1e6,
        Metric.COMMUNICATION_BYTES: 30, Metric.OVERLAPPED_SECONDS: 0.25, Metric.STEP_SECONDS: 2,
    }  # fmt: skip
    assert {metric: series[metric, None] for metric in expected} == expected
    assert series[Metric.PHASE_SECONDS, "compute"] == 1.5


def test_a_session_that_knows_no_tokens_shows_no_series_of_them():
    series = shown(report())
    assert (Metric.TOKENS, None) not in series
    assert (Metric.MODEL_FLOPS, None) not in series


def test_progress_goes_on_from_a_checkpoint_as_if_the_run_had_never_stopped():
    facts = RunFacts(model={}, seed=0, global_samples=8, data_sha256="")
    through = RunProgress().advanced(2**64 - 1, 3.0)
    manifest = CheckpointManifest(
        step=through.step, samples=8, samples_checksum=through.samples_checksum, attempt=0, run=facts, loss=through.loss
    )
    assert RunProgress.saved_in(manifest) == through
    assert through.advanced(7, 2.0) == RunProgress(2, add_checksums(2**64 - 1, 7), 2.0)


@pytest.mark.parametrize("outcome", [AgentPhase.COMPLETED, AgentPhase.CHECKPOINTED])
def test_a_result_tells_the_progress(outcome):
    result = run_result(
        outcome, RunProgress(5, 255, 1.5), total_steps=9, global_samples=8, heldout_loss=1.0, save_seconds=0.5
    )
    assert (result.outcome, result.step, result.total_steps, result.samples) == (outcome, 5, 9, 40)
    assert (result.loss, result.heldout_loss, result.save_seconds) == (1.5, 1.0, 0.5)
    assert result.samples_checksum == "00000000000000ff"
