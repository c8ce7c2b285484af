import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tests.support.ranks.layouts import name_of

from cost_aware_trainer.contract import Compression, DegreesPlan, ModelPlan, Sharding
from cost_aware_trainer.models.decoder import parameter_shapes

QUANTISED = ["int8", "int4"]
MODEL = ModelPlan(layers=5, hidden=32, heads=8, kv_heads=4, ffn=48, sequence_length=16, vocabulary=256)
LARGEST_CODE = {"int8": 127, "int4": 7}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("compression", ["bf16", *QUANTISED])
def test_sums_are_those_of_fp32_to_rounding_and_equal_on_all_ranks(pool, compression, world):
    answers = pool.run(world, "compress", compression=compression, elements=5000, steps=3)
    first = answers[0]
    for answer in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answer["sums"], first["sums"], strict=True))
    error = (first["sums"][0] - first["exact"][0]).abs().max()
    # a block's largest magnitude is below 15; n - 1 parts and the sum are rounded to half a step each
    largest = float(first["exact"][0].abs().max())
    bound = (
        largest * 2**-7
        if compression == "bf16"
        else (0.51 * (world - 1) * 15 + 0.51 * largest) / LARGEST_CODE[compression]
    )
    assert 0 < error < bound


@pytest.mark.parametrize("compression", QUANTISED)
@pytest.mark.parametrize("world", [2, 4])
def test_what_all_sums_and_residuals_say_is_exactly_what_was_asked(pool, compression, world):
    """Error feedback: after any number of steps nothing is lost but what the residuals still hold."""
    answers = pool.run(world, "compress", compression=compression, elements=5000, steps=20)
    told, asked = sum(answers[0]["sums"]), sum(answers[0]["exact"])
    drained = answers[0]["drained"]
    torch.testing.assert_close(drained, sum(answer["local"] for answer in answers), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(told + drained, asked, rtol=1e-4, atol=1e-3)
    assert all(answer["left"] == 0 for answer in answers)
    assert all(torch.equal(answer["drained"], drained) for answer in answers)


@pytest.mark.parametrize("compression", QUANTISED)
def test_error_feedback_bounds_the_accumulated_error(pool, compression):
    """The same gradient again and again: the error of the sum of steps stays, without feedback it grows with each."""
    few, many = (
        pool.run(4, "compress", compression=compression, elements=2000, steps=steps, repeated=True)[0]
        for steps in (5, 40)
    )
    forgetful = pool.run(4, "compress", compression=compression, elements=2000, steps=40, repeated=True, forget=True)[0]

    def error(answer):
        return float((sum(answer["sums"]) - sum(answer["exact"])).abs().mean())

    assert error(many) < 2 * error(few)
    assert error(forgetful) > 10 * error(many)
    # unbiased: the mean of what was told goes to the gradient
    assert error(many) / 40 < 0.03 * float(many["exact"][0].abs().mean())


def test_bytes_are_those_of_the_two_hops(pool):
    int8, int4, bf16 = (
        pool.run(4, "compress", compression=c, elements=4096, steps=1)[0]["bytes"] for c in ("int8", "int4", "bf16")
    )
    assert int8 == 2 * 3 * (1024 + 4 * 2)
    assert int4 == 2 * 3 * (512 + 32 * 2)
    assert bf16 == 2 * 3 / 4 * 2 * 4096


@pytest.mark.parametrize("compression", ["bf16", *QUANTISED])
def test_buckets_under_way_together_are_those_summed_apart(pool, compression):
    sizes = [1, 300, 4096, 10_000, 2, 777]
    assert all(pool.run(4, "compress_buckets", compression=compression, sizes=sizes, steps=5))


@pytest.mark.parametrize("compression", QUANTISED)
def test_residuals_follow_their_parameters_into_other_buckets(pool, compression):
    assert max(pool.run(4, "compress_rebucketed", compression=compression)) < 1e-4


@pytest.mark.parametrize("compression", QUANTISED)
def test_residuals_are_handed_over_whole(pool, compression):
    assert max(pool.run(4, "handed_over", compression=compression)) < 1e-4


def test_what_does_not_fit_is_refused(pool):
    for fits, elements, needless in pool.run(2, "compress_wrongly"):
        assert "residual of a: 5 elements" in fits
        assert "7 elements in all, but the bucket has 6" in elements
        assert "none" in needless


@pytest.mark.parametrize("compression", ["bf16", *QUANTISED])
def test_a_ddp_hook_trains_as_well_as_ddp(pool, compression):
    answers = pool.run(4, "train_under_ddp", compression=compression, steps=60)
    losses, _ = answers[0]["none"]
    compressed, weights = answers[0][compression]
    assert all(torch.equal(answer[compression][1], weights) for answer in answers)
    assert losses[-1] < 0.5 * losses[0]
    assert sum(compressed[-10:]) == pytest.approx(sum(losses[-10:]), rel=0.02)


@pytest.mark.parametrize("compression", ["bf16", *QUANTISED])
def test_fully_shard_trains_with_a_compressed_reduce_scatter(pool, compression):
    answers = pool.run(4, "train_sharded", compression=compression, steps=60)
    exact, compressed = answers[0]["none"], answers[0][compression]
    assert all(torch.equal(answer[compression], compressed) for answer in answers)
    moved = (exact - exact.mean()).norm()
    assert 0 < (compressed - exact).norm() < 0.05 * moved


LAYOUTS = {
    "2": (DegreesPlan(data=2), {}),
    "4": (DegreesPlan(data=4), {}),
    "2-tensor-2": (DegreesPlan(data=2, tensor=2), {}),
    "2-pipeline-2": (DegreesPlan(data=2, pipeline=2), {}),
    "4-zero1": (DegreesPlan(data=4), {"sharding": Sharding.ZERO1}),
    "2-zero2": (DegreesPlan(data=2), {"sharding": Sharding.ZERO2}),
    "4-zero3": (DegreesPlan(data=4), {"sharding": Sharding.ZERO3}),
}
CLOSE = {Compression.BF16: 0.005, Compression.INT8: 0.01, Compression.INT4: 0.02}


@pytest.mark.exhaustive
@pytest.mark.parametrize("compression", list(CLOSE))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_trainer_reaches_the_loss_of_fp32_and_says_what_it_sent(train, plan_of, reference, layout, compression):
    degrees, strategy = LAYOUTS[layout]
    run = train(plan_of(degrees, steps=20, compression=compression, **strategy))
    exact = reference(MODEL)
    for key in ("loss", "heldout_loss"):
        assert run["result"][key] == pytest.approx(exact["result"][key], rel=CLOSE[compression])
        assert run["result"][key] != exact["result"][key]
    assert exact["steps"][0]["loss"] > 1.1 * exact["steps"][-1]["loss"]


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO2])
def test_gradients_are_quantised_once_the_learning_rate_has_warmed_up(train, plan_of, sharding):
    plans = {kind: plan_of(DegreesPlan(data=2), steps=5, compression=kind, sharding=sharding) for kind in Compression}
    assert {plan.optimizer.warmup_steps for plan in plans.values()} == {3}
    runs = {kind: train(plan)["steps"] for kind, plan in plans.items()}
    losses = {kind: [step["loss"] for step in steps] for kind, steps in runs.items()}
    sent = {kind: [step["bytes"]["data"] for step in steps] for kind, steps in runs.items()}
    for kind in (Compression.INT8, Compression.INT4):
        # the third step's gradient is the last that is summed as it is: the fourth step's loss shows it still
        assert losses[kind][:4] == losses[Compression.NONE][:4]
        assert losses[kind][4] != losses[Compression.NONE][4]
        assert sent[kind][:3] == sent[Compression.NONE][:3]
        assert max(sent[kind][3:]) < min(sent[kind][:3])


def test_the_steps_log_counts_compressed_bytes(train, plan_of):
    sent = {
        compression: train(plan_of(DegreesPlan(data=2), steps=4, compression=compression))["steps"][3]["bytes"]["data"]
        for compression in Compression
    }
    assert sent["none"] == pytest.approx(2 * sent["bf16"], rel=0.01)
    assert sent["none"] / sent["int8"] == pytest.approx(3.97, rel=0.02)
    assert sent["none"] / sent["int4"] == pytest.approx(7.11, rel=0.02)


def whole(shapes, parts):
    """Whole tensors, as sums over parts: (name, offsets, sizes) and values."""
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for (name, offsets, sizes), values in parts:
        slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        tensors[name.removesuffix(" (copy)")][slices] += values
    return tensors


CHANGES = [
    (DegreesPlan(data=4), DegreesPlan(data=2, tensor=2), "none", {"compression": Compression.INT4}),
    (DegreesPlan(data=2, tensor=2), DegreesPlan(data=2, pipeline=2), "none", {"compression": Compression.INT8}),
    (DegreesPlan(data=2, pipeline=2), DegreesPlan(data=4), "none", {}),
    (DegreesPlan(data=2, tensor=2), DegreesPlan(data=4), "none", {"sharding": Sharding.ZERO3}),
    (DegreesPlan(data=2, pipeline=2), DegreesPlan(tensor=4), "none", {}),
    (DegreesPlan(data=4), DegreesPlan(data=2, tensor=2), "zero1", {"compression": Compression.INT4}),
    (DegreesPlan(data=2, tensor=2), DegreesPlan(data=4), "zero3", {"sharding": Sharding.ZERO3}),
    (DegreesPlan(data=2, pipeline=2), DegreesPlan(data=4), "zero2", {}),
]
HANDED_OVER = [
    pytest.param(
        *change,
        by_checkpoint,
        # each change by one of the two ways in every run, by the other among the exhaustive tests
        marks=[] if by_checkpoint == (number % 2 == 1) else [pytest.mark.exhaustive],
        id=f"{name_of(change[0])}-{name_of(change[1])}-{number}-{'from-checkpoint' if by_checkpoint else 'in-process'}",
    )
    for number, change in enumerate(CHANGES)
    for by_checkpoint in (False, True)
]


@pytest.mark.parametrize(("before", "after", "sharding", "strategy", "by_checkpoint"), HANDED_OVER)
def test_residuals_of_compression_are_carried_whole_through_a_change_of_degrees(
    pool, plan_of, before, after, sharding, strategy, by_checkpoint
):
    model = dataclasses.replace(MODEL, tied_embeddings=True)
    first = plan_of(before, model=model, compression=Compression.INT4, sharding=Sharding(sharding))
    second = plan_of(after, model=model, folder=first.checkpoint.folder, **strategy)
    plans = {"plan": first.to_json(), "successor": second.to_json()}
    answers = pool.run(4, "hand_residuals_over", **plans, steps=4, by_checkpoint=by_checkpoint)
    shapes = parameter_shapes(model)
    # every rank's own rounding counts once, whichever rank it happened on
    summed = whole(shapes, [item for own, _ in answers for item in own.items()])
    assert all(float(tensor.abs().max()) > 0 for tensor in summed.values())
    for _, parts in answers:
        for (name, offsets, sizes), values in parts.items():
            slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            torch.testing.assert_close(values, summed[name][slices], rtol=1e-4, atol=1e-6)
    held = {name for _, parts in answers for name, _, _ in parts}
    assert held == set(shapes)


def test_a_checkpoint_of_a_stop_holds_what_compression_owes_and_that_of_the_end_does_not(train, plan_of):
    plan = plan_of(DegreesPlan(data=2), steps=8, compression=Compression.INT8)

    def saved(step):
        manifest = json.loads((Path(plan.checkpoint.folder) / f"step-{step:08d}/manifest.json").read_text())
        return {name.removeprefix("residual.") for name in manifest["tensors"] if name.startswith("residual.")}

    train(plan, stop_after=6)
    assert saved(6) == set(parameter_shapes(plan.model))
    train(plan)
    assert saved(8) == set()
