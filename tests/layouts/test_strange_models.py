"""Users' own models under a session, made by seeds, against DistributedDataParallel and against one rank."""

import numpy as np
import pytest
import torch
from tests.support.ranks.session_cases import SAMPLES
from tests.support.ranks.strange_models import recipe_of

from cost_aware_trainer.data.samples import SampleOrder, Shard

GLOBAL, STEPS = 36, 4
ALL, SOME = 100, 10


def seeds(first):
    return [pytest.param(first + n, marks=[] if n < SOME else [pytest.mark.exhaustive]) for n in range(ALL)]


def samples_of_ranks(world, micro_batches):
    """Indices of the samples by step, rank and micro-batch, as a session has them."""
    order = SampleOrder(SAMPLES, 0)
    size = GLOBAL // world // micro_batches
    shards = [Shard(GLOBAL, rank, world) for rank in range(world)]
    return [
        [[order.at(p).astype(np.int64) for p in shard.micro_batch_positions(step, size)] for shard in shards]
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("seed", seeds(1000))
def test_a_session_s_gradients_are_those_of_distributed_data_parallel(pool, tmp_path, seed):
    recipe, world = recipe_of(seed, of_any_rank=False), 2 + seed % 2
    mine = pool.run(
        *(world, "train_strange"),
        seed=seed,
        folder=str(tmp_path / "run"),
        steps=STEPS,
        global_samples=GLOBAL,
        of_any_rank=False,
    )
    order = samples_of_ranks(world, recipe.micro_batches)
    arguments = {"seed": seed, "steps": STEPS, "global_samples": GLOBAL, "order": order}
    ddp = pool.run(world, "train_strange_under_ddp", **arguments)
    for own, theirs in zip(mine, ddp, strict=True):
        for step, (had, wanted) in enumerate(zip(own["gradients"], theirs["gradients"], strict=True)):
            assert had.keys() == wanted.keys()
            for name in had:
                where = (recipe.names, step, name)
                assert (had[name] is None) == (wanted[name] is None), where
                if had[name] is not None:
                    tolerances = {"rtol": 2e-2, "atol": 1e-3} if recipe.autocast else {"rtol": 1e-4, "atol": 1e-5}
                    torch.testing.assert_close(
                        had[name], wanted[name], msg=lambda m, w=where: f"{w}: {m}", **tolerances
                    )
    for name, value in mine[0]["state"].items():
        if not name.endswith("num_batches_tracked"):
            assert all(torch.equal(value, other["state"][name]) for other in mine), (recipe.names, name)


@pytest.mark.parametrize("seed", seeds(2000))
def test_a_session_s_losses_do_not_depend_on_the_ranks_nor_on_a_change_of_their_number(pool, tmp_path, seed):
    def run(world, steps, folder):
        arguments = {"seed": seed, "folder": str(tmp_path / folder), "steps": steps, "global_samples": GLOBAL}
        return pool.run(world, "train_strange", of_any_rank=True, **arguments)[0]["losses"]

    names = recipe_of(seed, of_any_rank=True).names
    alone = run(1, 6, "alone")
    assert run(2, 6, "two") == pytest.approx(alone, abs=1e-5), names
    parts = [run(2, 2, "changed"), run(3, 4, "changed"), run(1, 6, "changed")]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert [loss for part in parts for loss in part] == pytest.approx(alone, abs=1e-5), names
