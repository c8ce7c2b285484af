"""Names of torch that are not public, which the trainer uses: a release that moves one must be noticed here and not in a run."""

import inspect

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import schedules

from cost_aware_trainer.distributed.fsdp_waits import WAITING

WAIT = "_wait_batch_p2p"


@pytest.mark.parametrize("name", WAITING)
def test_fully_shard_waits_in_the_methods_that_are_timed(name):
    assert inspect.isfunction(getattr(FSDPParamGroup, name))


def test_schedules_wait_for_neighbours_through_one_function_of_their_module():
    assert list(inspect.signature(getattr(schedules, WAIT)).parameters) == ["work"]
    source = inspect.getsource(schedules)
    # called by its name in the module, so that replacing it there is seen by every schedule
    assert source.count(f"{WAIT}(") > 5


@pytest.mark.parametrize("name", ["_foreach_norm", "_foreach_copy_", "_foreach_mul_"])
def test_torch_has_the_functions_over_lists_that_gradients_are_summed_with(name):
    assert callable(getattr(torch, name))
