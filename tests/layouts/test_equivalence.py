"""Every layout trains the same run: the same losses, and states that any other layout goes on from."""

import dataclasses
import shutil

import pytest
from tests.support.ranks.layouts import MODELS, TOLERANCE, assert_same_run, layouts, losses, name_of

from cost_aware_trainer.contract import DegreesPlan, Precision, Recompute, Schedule, Sharding

SAVED_STEP = 10
CONTINUED_STEPS = 2


LAYOUTS = [pytest.param(degrees, id=name_of(degrees)) for world in (4, 8) for degrees in layouts(world)]
RING = [DegreesPlan(), *layouts(4)]
"""Each of these is saved under and loaded into once in every run; every one into every other is an exhaustive test."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("degrees", LAYOUTS)
def test_every_layout_has_one_rank_s_losses(train, plan_of, reference, degrees, tied):
    model = dataclasses.replace(MODELS[degrees.ranks], tied_embeddings=tied)
    run = train(plan_of(degrees, model=model))
    assert len(run["steps"]) == 20
    assert_same_run(run, reference(model))
    assert_only_these_axes_send(run, degrees)


@pytest.mark.parametrize("degrees", layouts(4), ids=name_of)
def test_only_the_axes_of_a_layout_send_anything(train, plan_of, degrees):
    run = train(plan_of(degrees, steps=2))
    assert_only_these_axes_send(run, degrees)


def assert_only_these_axes_send(run, degrees):
    sent = run["steps"][0]["bytes"]
    assert {axis for axis, bytes_sent in sent.items() if bytes_sent > 1000} == {
        axis for axis in ("data", "tensor", "pipeline") if getattr(degrees, axis) > 1
    }


STRATEGIES = [
    (DegreesPlan(pipeline=4), {"schedule": Schedule.GPIPE}),
    (DegreesPlan(pipeline=4), {"stage_layers": (1, 2, 1, 1)}),
    (DegreesPlan(pipeline=2, data=2), {"schedule": Schedule.INTERLEAVED, "interleave": 2}),
    (DegreesPlan(pipeline=2, data=2), {"schedule": Schedule.ZERO_BUBBLE, "interleave": 2}),
    (DegreesPlan(pipeline=4), {"schedule": Schedule.ZERO_BUBBLE}),
    (DegreesPlan(pipeline=2, tensor=2), {"schedule": Schedule.ZERO_BUBBLE_V, "interleave": 2, "micro": 2}),
    (DegreesPlan(pipeline=2, data=2), {"schedule": Schedule.ZERO_BUBBLE_V, "interleave": 2, "micro": 2}),
    (DegreesPlan(data=4), {"sharding": Sharding.ZERO1}),
    (DegreesPlan(data=2, tensor=2), {"sharding": Sharding.ZERO2}),
    (DegreesPlan(data=2, pipeline=2), {"sharding": Sharding.ZERO3, "recompute": Recompute.FULL}),
    (DegreesPlan(data=4), {"sharding": Sharding.ZERO3, "recompute": Recompute.SELECTIVE}),
    (DegreesPlan(tensor=2, pipeline=2), {"recompute": Recompute.FULL}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("degrees", "strategy"), STRATEGIES)
def test_every_strategy_has_one_rank_s_losses(train, plan_of, reference, degrees, strategy, tied):
    model = dataclasses.replace(MODELS[4], tied_embeddings=tied)
    assert_same_run(train(plan_of(degrees, model=model, **strategy)), reference(model))


def test_uneven_stages_have_one_rank_s_losses(train, plan_of, reference):
    run = train(plan_of(DegreesPlan(pipeline=4), stage_layers=(1, 2, 1, 1)))
    assert_same_run(run, reference(MODELS[4]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", [DegreesPlan(data=2, tensor=2), DegreesPlan(tensor=2, pipeline=2)], ids=name_of)
def test_bf16_follows_one_rank_s_bf16_and_is_not_fp32(train, plan_of, reference, degrees):
    run, alone = train(plan_of(degrees, precision=Precision.BF16)), reference(MODELS[4], precision=Precision.BF16)
    assert losses(run) == pytest.approx(losses(alone), abs=0.01)
    assert losses(alone) != pytest.approx(losses(reference(MODELS[4])), abs=TOLERANCE)


@pytest.mark.exhaustive
def test_compiled_layers_have_the_same_losses(train, plan_of, reference):
    run = train(plan_of(DegreesPlan(tensor=2), compile=True), timeout=300)
    assert_same_run(run, reference(MODELS[4]))


def continue_under(train, plan, saved, folder, expected):
    """Goes on from a copy of a checkpoint under another layout."""
    shutil.copytree(saved["folder"], folder)
    run = train(plan, stop_after=CONTINUED_STEPS)
    assert run["loaded"] == saved["checksums"]
    continued = losses(expected)[SAVED_STEP : SAVED_STEP + CONTINUED_STEPS]
    assert losses(run) == pytest.approx(continued, abs=TOLERANCE)


@pytest.fixture(scope="session")
def save_under(train, plan_of):
    """A checkpoint of step 10 and its checksums, made once for each layout."""
    made = {}

    def save(degrees, model, **strategy):
        key = (degrees, model, *strategy.items())
        if key not in made:
            plan = plan_of(degrees, model=model, **strategy)
            made[key] = train(plan, stop_after=SAVED_STEP) | {"folder": plan.checkpoint.folder}
        return made[key]

    return save


@pytest.mark.parametrize(
    ("saver", "loader", "tied"),
    [(saver, RING[number - 1], number % 2 == 1) for number, saver in enumerate(RING)],
    ids=lambda value: name_of(value) or ("tied" if value else "untied"),
)
def test_a_ring_of_layouts_goes_on_from_each_other_s_checkpoints(
    train, plan_of, reference, save_under, tmp_path, saver, loader, tied
):
    model, folder = dataclasses.replace(MODELS[4], tied_embeddings=tied), tmp_path / "run"
    saved = save_under(saver, model)
    continue_under(train, plan_of(loader, model=model, folder=folder), saved, folder, reference(model))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("saver", LAYOUTS)
def test_every_layout_goes_on_from_every_other_s_checkpoint(
    train, plan_of, reference, save_under, tmp_path, saver, tied
):
    if tied and saver.ranks == 8:
        pytest.skip("four ranks show it for tied embeddings")
    model = dataclasses.replace(MODELS[saver.ranks], tied_embeddings=tied)
    saved = save_under(saver, model)
    for loader in [*layouts(saver.ranks), DegreesPlan()]:
        folder = tmp_path / name_of(loader)
        continue_under(train, plan_of(loader, model=model, folder=folder), saved, folder, reference(model))


MIXED = [
    (DegreesPlan(data=4), {"sharding": Sharding.ZERO3}, DegreesPlan(data=2, tensor=2), {"sharding": Sharding.ZERO2}),
    pytest.param(
        DegreesPlan(data=8), {"sharding": Sharding.ZERO3}, DegreesPlan(tensor=4), {}, marks=pytest.mark.exhaustive
    ),
    (
        DegreesPlan(pipeline=2, data=2),
        {"schedule": Schedule.ZERO_BUBBLE_V, "interleave": 2, "micro": 2},
        DegreesPlan(data=2),
        {"sharding": Sharding.ZERO3},
    ),
    (DegreesPlan(data=2), {}, DegreesPlan(pipeline=4), {"stage_layers": (2, 1, 1, 1)}),
    pytest.param(DegreesPlan(), {}, DegreesPlan(data=2, tensor=2, pipeline=2), {}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(
    "tied", [pytest.param(False, id="untied"), pytest.param(True, id="tied", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("saver", "of_saver", "loader", "of_loader"), MIXED)
def test_checkpoints_cross_strategies_and_numbers_of_ranks(
    train, plan_of, reference, save_under, tmp_path, saver, of_saver, loader, of_loader, tied
):
    model = dataclasses.replace(MODELS[4], tied_embeddings=tied)
    saved, folder = save_under(saver, model, **of_saver), tmp_path / "run"
    continue_under(train, plan_of(loader, model=model, folder=folder, **of_loader), saved, folder, reference(model))
