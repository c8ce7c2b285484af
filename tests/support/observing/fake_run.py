"""A step of a plan for many ranks in one process, without the memory that it needs: fake tensors, and a group of one real rank."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.observing.fused import kernels_fused
from tests.support.observing.observed import Observed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from cost_aware_trainer.contract import Precision, RunPlan
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.models.decoder import parameter_shapes
from cost_aware_trainer.training import rank_model

TO_EMPTY = nn.Module.to_empty


def to_empty(module, *, device):
    """Does what to_empty does. torch swaps fake tensors in place, which it cannot where something refers to them weakly."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return TO_EMPTY(module, device=device)
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.empty_like(parameter, device=device)))
    return module


@contextlib.contextmanager
def faked(mesh):
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(rank_model, "build_mesh", return_value=mesh),
        mock.patch.object(nn.Module, "to_empty", to_empty),
        kernels_fused(),
    ):
        yield


def matrices(model):
    """Shapes of the weights that a rank gathers or holds, and of their transposes."""
    shapes = {tuple(held.parameter.shape) for held in model.part.parameters}
    return {way for shape in shapes if len(shape) == 2 for way in (shape, shape[::-1])}


def blocks(at_peak, precision):
    """Bytes as the planner divides them: of fp32 weights beside bf16 ones, and both moments, the optimizer's."""
    found = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "logits"), 0.0) | at_peak
    states = found.pop("masters")
    used = states / 3 if precision is Precision.FP32 else 0.0
    return found | {"weights": found["weights"] + used, "optimizer": states - used}


def step_of(plan, rank):
    """What a rank holds, and what it sends, in a step of a plan."""
    plan = RunPlan.from_json(plan)
    dist.init_process_group("fake", rank=rank, world_size=plan.degrees.ranks, store=FakeStore())
    ranks = Ranks(rank, plan.degrees.ranks, 0, torch.device("cpu"), None)
    mesh = rank_model.build_mesh(ranks, plan)
    with faked(mesh):
        model = rank_model.RankModel(plan, ranks, parameter_shapes(plan.model))
        axes = {group.group_name: axis.value for axis, group in mesh.groups.items()}
        with Observed(matrices(model), plan.model.vocabulary // plan.degrees.tensor, axes) as observed:
            for part in model.parts():
                observed.see(part.values, "masters")
            state_bytes = observed.now_bytes
            tokens = (plan.batch.micro_samples, plan.model.sequence_length + 1)
            model.accumulate(10**6, (torch.zeros(tokens, dtype=torch.int64) for _ in range(plan.micro_batches)))
    return {
        "state_bytes": state_bytes,
        "after_bytes": observed.now_bytes,
        "blocks": blocks(observed.peak(), plan.strategy.precision),
        "collectives": observed.collectives,
        "products": observed.products,
        "counted_bytes": {axis.value: sent for axis, sent in mesh.traffic.take_bytes().items()},
    }
