"""Whole runs of a tiny model on real ranks."""

import dataclasses
import os
import random
import re
import shutil
import signal
import statistics
import time
import urllib.request
from pathlib import Path

import pytest

from cost_aware_trainer.contract import METRIC_LABELS, AgentPhase, Metric, OptimizerPlan, Phase, Sharding, StrategyPlan
from cost_aware_trainer.data.samples import checksum_text, expected_checksum
from cost_aware_trainer.data.token_files import DataManifest


def promised_checksum(plan):
    windows = (DataManifest.read(Path(plan.data_folder)).train.bytes - 1) // plan.model.sequence_length
    return checksum_text(expected_checksum(windows, plan.seed, plan.batch.global_samples, plan.steps))


def test_one_and_two_ranks_train_the_same_samples_to_the_same_losses(make_plan, finish):
    alone, pair = finish(make_plan("a", steps=15)), finish(make_plan("b", steps=15, data=2))
    losses = [[step["loss"] for step in run.steps] for run in (alone, pair)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.3
    assert alone.result.heldout_loss == pytest.approx(pair.result.heldout_loss, abs=1e-5)
    assert alone.result.samples_checksum == pair.result.samples_checksum == promised_checksum(make_plan(steps=15))
    assert alone.result.outcome is AgentPhase.COMPLETED
    assert (alone.result.step, alone.result.samples) == (15, 120)
    assert [(s["sample_first"], s["sample_last"]) for s in pair.steps][:2] == [(0, 7), (8, 15)]
    assert pair.steps[0]["bytes"]["data"] > 0
    assert alone.steps[0]["bytes"] == {"data": 0, "tensor": 0, "pipeline": 0}


def test_the_micro_batch_does_not_change_the_losses(make_plan, finish):
    runs = [finish(make_plan(f"m{micro}", steps=4, micro=micro)) for micro in (1, 8)]
    losses = [[step["loss"] for step in run.steps] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_run_stopped_by_sigterm_and_resumed_ends_with_the_undisturbed_runs_weights(
    make_plan, finish, start_run, final_weights
):
    disturbed, undisturbed = make_plan("d", data=2, steps=60), make_plan("u", data=2, steps=60)
    whole = finish(undisturbed)
    first = start_run(disturbed)
    first.wait_for_step(random.randint(2, 30))
    # One rank alone is told: the others must learn of it.
    os.kill(first.ranks[1].pid, signal.SIGTERM)
    assert first.wait() == [0, 0], first.output
    assert first.result.outcome is AgentPhase.CHECKPOINTED
    assert 0 < first.result.step < 60
    second = finish(disturbed, CATJ_ATTEMPT="2")
    assert second.steps[0]["step"] == first.result.step + 1
    assert second.result == whole.result
    assert final_weights(disturbed) == final_weights(undisturbed)


def test_a_run_resumes_under_another_degree_with_the_same_losses(make_plan, finish, start_run):
    whole = finish(make_plan("u", steps=40))
    first = start_run(make_plan("d", data=2, steps=40))
    first.wait_for_step(3)
    os.kill(first.ranks[0].pid, signal.SIGTERM)
    assert first.wait() == [0, 0], first.output
    second = finish(make_plan("d", data=1, micro=4, steps=40))
    losses = [step["loss"] for step in first.steps + second.steps]
    assert losses == pytest.approx([step["loss"] for step in whole.steps], abs=1e-4)
    assert second.result.samples_checksum == whole.result.samples_checksum


def test_damaged_and_half_written_checkpoints_are_skipped_for_the_newest_good_one(
    make_plan, finish, final_weights, changed
):
    plan = make_plan("d", steps=12)
    finish(changed(plan, steps=4))
    good = Path(plan.checkpoint.folder) / "step-00000004"
    finish(changed(plan, steps=8))
    damaged = Path(plan.checkpoint.folder) / "step-00000008" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    half_written = Path(plan.checkpoint.folder) / "step-00000010"
    half_written.mkdir()
    (half_written / "__0_0.distcp").write_bytes(b"half")
    assert good.exists()
    run = finish(plan)
    assert run.steps[0]["step"] == 5
    assert "CHECKPOINT SKIPPED" in run.output
    assert "truncated or changed" in run.output
    assert not half_written.exists()
    assert run.result.samples_checksum == promised_checksum(plan)


def test_periodic_saves_run_beside_training_and_only_the_newest_stay(make_plan, finish):
    plan = make_plan("p", data=2, steps=60, interval_seconds=0.05, keep=2)
    run = finish(plan)
    assert sum(step["seconds"]["checkpoint"] > 0 for step in run.steps) >= 3
    kept = sorted(path.name for path in Path(plan.checkpoint.folder).iterdir())
    assert len(kept) == 2
    assert kept[-1] == "step-00000060"


def test_a_completed_run_started_again_only_reports(make_plan, finish):
    plan = make_plan("again", steps=6)
    first, second = finish(plan), finish(plan)
    assert second.steps == []
    assert second.result.outcome is AgentPhase.COMPLETED
    assert second.result.heldout_loss == pytest.approx(first.result.heldout_loss)


def test_a_diverging_run_fails_naming_the_step_and_keeps_its_good_checkpoint(make_plan, finish, start_run, changed):
    plan = make_plan("nan", data=2, steps=40)
    finish(changed(plan, steps=3))
    wild = OptimizerPlan(learning_rate=1e38, minimum_learning_rate=1e38, warmup_steps=0)
    run = start_run(changed(plan, optimizer=wild))
    assert set(run.wait()) == {1}
    assert run.result.outcome is AgentPhase.FAILED
    assert re.search(r"step \d+: .*not finite; the checkpoint of step 3 is kept", run.result.message)
    assert [path.name for path in Path(plan.checkpoint.folder).iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO3])
def test_a_held_out_loss_that_is_not_finite_fails_the_run_in_words_on_every_rank(make_plan, start_run, sharding):
    # gradient and weights are finite still, but so large that the next forward pass overflows
    wild = OptimizerPlan(learning_rate=3.3e37, minimum_learning_rate=3.3e37, warmup_steps=0, weight_decay=10.0)
    plan = make_plan("overflow", data=2, steps=1, strategy=StrategyPlan(sharding=sharding), optimizer=wild)
    run = start_run(plan)
    assert set(run.wait()) == {1}, run.output
    assert run.result.outcome is AgentPhase.FAILED
    assert run.result.message.startswith("step 1: the held-out loss is nan: ")
    assert not list(Path(plan.checkpoint.folder).glob("*/manifest.json")), (
        "what the evaluation finds spoilt is not saved"
    )


@pytest.mark.parametrize("interval_seconds", [0.05, 3600.0])
def test_a_full_volume_fails_the_run_in_plain_words_and_leaves_the_older_checkpoint(
    make_plan, finish, start_run, changed, interval_seconds
):
    plan = make_plan("full", data=2, steps=30, interval_seconds=interval_seconds)
    finish(changed(plan, steps=2))
    # A limit of the file size stands in for a full disk: the write fails with an OSError half-way.
    run = start_run(plan, TEST_FILE_LIMIT_BYTES="60000")
    assert set(run.wait()) == {1}, run.output
    assert run.result.outcome is AgentPhase.FAILED
    assert re.search(r"the checkpoint of step \d+ could not be written to .*MiB are free", run.result.message)
    assert "older checkpoints are untouched" in run.result.message
    assert max(path.parent.name for path in Path(plan.checkpoint.folder).glob("*/manifest.json")) == "step-00000002"


@pytest.mark.parametrize("harm", ["cut", "overwritten"])
def test_data_that_are_harmed_while_a_run_reads_them_end_it_with_the_file_s_name(
    make_plan, start_run, data_folder, tmp_path, harm
):
    """A memory map would end it by SIGBUS, or go on with other bytes and the same checksum of samples."""
    folder = shutil.copytree(data_folder, tmp_path / "data")
    run = start_run(dataclasses.replace(make_plan("harmed", data=2, steps=3000), data_folder=str(folder)))
    run.wait_for_step(5)
    if harm == "cut":
        os.truncate(folder / "train.bin", 1000)
    else:
        (folder / "train.bin").write_bytes(bytes((folder / "train.bin").stat().st_size))
    codes = run.wait()
    assert all(code == 1 for code in codes), codes
    assert run.result.outcome is AgentPhase.FAILED
    words = "it was cut" if harm == "cut" else "the file was overwritten or is damaged|it was cut"
    assert re.search(rf"data_folder, rank \d: .*/train\.bin: .*({words})", run.result.message)


def test_a_checkpoint_of_another_model_is_refused_shape_by_shape(make_plan, finish, start_run, changed):
    plan = make_plan("other", steps=2)
    finish(plan)
    run = start_run(changed(plan, model=changed(plan.model, hidden=64)))
    assert run.wait() == [64], run.output
    assert run.result.outcome is AgentPhase.INVALID
    assert "embedding.weight is (256, 32) there and (256, 64) in the plan" in run.result.message


def test_another_seed_is_refused_because_the_sample_order_would_change(make_plan, finish, start_run, changed):
    plan = make_plan("seed", steps=2)
    finish(plan)
    run = start_run(changed(plan, seed=8, steps=4))
    assert run.wait() == [64]
    assert "seed 7, the plan has 8" in run.result.message


def test_unusable_folders_are_invalid_on_every_rank(make_plan, start_run, changed, tmp_path):
    plan = make_plan(data=2)
    nowhere = changed(plan, checkpoint=changed(plan.checkpoint, folder=str(tmp_path / "missing" / "folder")))
    no_data = changed(plan, data_folder=str(tmp_path))
    for broken, says in ((nowhere, "checkpoint.folder"), (no_data, "cost_aware_trainer.data prepare")):
        run = start_run(broken)
        assert run.wait() == [64, 64], run.output
        assert run.result.outcome is AgentPhase.INVALID
        assert says in run.result.message


@pytest.mark.alone
def test_the_phases_of_a_step_add_up_to_its_wall_time(make_plan, start_run):
    # Long enough that 2 % is far more than an observer on a busy machine is late in seeing a line.
    run = start_run(make_plan("w", data=2, steps=410, interval_seconds=0.2))
    run.wait_for_step(1)
    started, first = time.monotonic(), run.steps[-1]["step"]
    run.wait_for_step(400)
    seconds, last = time.monotonic() - started, run.steps[-1]["step"]
    assert set(run.wait()) == {0}, run.output
    ratios = [sum(step["seconds"].values()) / step["step_seconds"] for step in run.steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
    measured = [sum(step["seconds"].values()) for step in run.steps if first < step["step"] <= last]
    assert sum(measured) == pytest.approx(seconds, rel=0.02)
    # In a step in which the other rank was late, all that was waited may be its doing.
    assert all(step["seconds"]["communication"] + step["seconds"]["straggler_wait"] > 0 for step in run.steps)
    assert any(step["seconds"]["communication"] > 0 for step in run.steps)


def test_every_rank_serves_all_metrics_of_the_contract_with_its_labels(make_plan, start_run):
    run = start_run(make_plan("metrics", data=2, steps=400), CATJ_ATTEMPT="3")
    run.wait_for_step(6)
    for rank in (0, 1):
        with urllib.request.urlopen(f"http://127.0.0.1:{run.metrics_port + rank}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        for metric in Metric:
            lines = [line for line in text.splitlines() if line.startswith(f"{metric}{{")]
            assert lines, f"{metric} is not served"
            labels = dict(re.findall(r'(\w+)="([^"]*)"', lines[0]))
            expected = dict(zip(METRIC_LABELS, ("space", "job", "3", str(rank)), strict=True))
            assert expected.items() <= labels.items()
        assert {phase.value for phase in Phase} == set(re.findall(r'phase_seconds_total{[^}]*phase="(\w+)"', text))
        assert float(re.search(r"catj_rank_step{[^}]*} (\S+)", text)[1]) >= 6
        assert float(re.search(r"catj_rank_total_steps{[^}]*} (\S+)", text)[1]) == 400
        assert float(re.search(r"catj_rank_memory_bytes{[^}]*} (\S+)", text)[1]) > 1e7
    for process in run.ranks:
        os.kill(process.pid, signal.SIGTERM)
    assert run.wait() == [0, 0], run.output


def test_a_taken_metrics_port_does_not_end_training(make_plan, finish):
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        run = finish(make_plan("port", steps=2), CATJ_METRICS_PORT=str(taken.getsockname()[1]))
    assert "METRICS NOT SERVED" in run.output


def test_data_that_are_streamed_from_a_server_train_to_the_same_weights(
    make_plan, finish, final_weights, data_server, tmp_path
):
    plan = make_plan("mapped", data=2)
    finish(plan)
    data_server.faults = {"train.bin": [503, "cut"]}
    streamed = dataclasses.replace(make_plan("streamed", data=2), data_folder=data_server.address)
    run = finish(streamed, CATJ_DATA_STREAM="always", CATJ_DATA_CACHE=str(tmp_path / "cache"))
    assert final_weights(streamed) == final_weights(plan)
    assert data_server.faults == {"train.bin": []}, "both faults were met"
    assert not list((tmp_path / "cache").rglob("train.bin"))
    assert all(step["seconds"]["data"] >= 0 for step in run.steps)
