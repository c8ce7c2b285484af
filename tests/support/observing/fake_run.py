"""A step of a plan for many ranks in one process, without the memory that it needs: fake tensors, and a group of one real rank."""

import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cost_aware_trainer.contract import RunPlan
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.distributed.gradients import local
from cost_aware_trainer.models.decoder import parameter_shapes
from cost_aware_trainer.telemetry.traffic import Axis
from cost_aware_trainer.training import rank_model


class Observed(TorchDispatchMode):
    """Bytes of all storages that live, and each collective with the bytes that this rank puts in and gets out."""

    def __init__(self):
        super().__init__()
        self.live, self.now_bytes, self.peak_bytes, self.collectives = {}, 0, 0, []

    def see(self, tensor):
        storage = local(tensor).untyped_storage()
        key = id(storage)
        if key not in self.live:
            self._grow(key, storage.nbytes())
            weakref.finalize(storage, self._end, key)

    def _grow(self, key, size_bytes):
        self.now_bytes += size_bytes - self.live.get(key, 0)
        self.live[key] = size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _end(self, key):
        self.now_bytes -= self.live.pop(key, 0)

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resized(storage, size_bytes):
            # fully_shard frees gathered weights so
            if id(storage) in self.live:
                self._grow(id(storage), size_bytes)
            return resize(storage, size_bytes)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised):
        self._patch.stop()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        answer = function(*arguments, **(keywords or {}))
        if function.namespace == "c10d":
            sizes = [t.numel() * t.element_size() for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
            self.collectives.append((function.name().removeprefix("c10d::"), sizes))
        for tensor in tree_leaves(answer):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return answer


def step_of(plan):
    """What rank 0 holds, and what it sends, in a step of a plan."""
    plan = RunPlan.from_json(plan)
    size = plan.degrees.ranks
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    ranks = Ranks(0, size, 0, torch.device("cpu"), None)
    mesh = rank_model.build_mesh(ranks, plan)
    observed = Observed()
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(rank_model, "build_mesh", return_value=mesh):
        model = rank_model.RankModel(plan, ranks, parameter_shapes(plan.model))
        with observed:
            for part in model.parts():
                observed.see(part.values)
            state_bytes = observed.now_bytes
            tokens = (plan.batch.micro_samples, plan.model.sequence_length + 1)
            model.accumulate(10**6, (torch.zeros(tokens, dtype=torch.int64) for _ in range(plan.micro_batches)))
    sent_bytes = model.mesh.traffic.take_bytes()[Axis.DATA]
    return {
        "state_bytes": state_bytes,
        "after_bytes": observed.now_bytes,
        "peak_bytes": observed.peak_bytes,
        "collectives": observed.collectives,
        "counted_bytes": sent_bytes,
    }
