"""What a step holds and sends, seen from the operations that torch dispatches."""

import weakref
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cost_aware_trainer.distributed.gradients import local

# operations whose result is what their operand was, in another type, place or order
MOVES = ("_to_copy", "cat", "copy_", "_foreach_copy_", "clone", "split_with_sizes_copy", "add")
ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
PRODUCTS = ("mm", "addmm", "bmm")


@dataclass(frozen=True)
class Collective:
    """One use of a process group."""

    name: str
    """Operation of torch."""
    axis: str
    """Axis of the mesh."""
    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    products: int
    """Matrix products that were done before it."""


class Observed(TorchDispatchMode):
    """Bytes of all storages that live, by what they hold, and each collective.

    A tensor made from weights alone is weights, one of a weight's shape that is made of anything else a gradient, one whose last
    dimension is the vocabulary logits, and the rest activations. What is only allocated is named by what is first written to it.
    """

    def __init__(self, shapes, vocabulary, axes):
        super().__init__()
        self.now_bytes, self.products, self.collectives = 0, 0, []
        self._live, self._kinds, self._changes = {}, [], []
        self._shapes, self._vocabulary, self._axes = shapes, vocabulary, axes

    def see(self, tensor, kind=None):
        storage = local(tensor).untyped_storage()
        key = id(storage)
        if key not in self._live:
            self._live[key] = (len(self._kinds), 0)
            self._kinds.append(kind)
            self._grow(key, storage.nbytes())
            weakref.finalize(storage, self._end, key)
        elif kind is not None:
            self._kinds[self._live[key][0]] = kind

    def peak(self):
        """Bytes of each kind at the moment when most are held."""
        now, total, largest, at_peak = {}, 0, 0, {}
        for number, change in self._changes:
            kind = self._kinds[number] or "activations"
            now[kind] = now.get(kind, 0) + change
            total += change
            if total > largest:
                largest, at_peak = total, dict(now)
        return at_peak

    def _kind_of(self, tensor):
        place = self._live.get(id(local(tensor).untyped_storage()))
        return self._kinds[place[0]] if place else None

    def _grow(self, key, size_bytes):
        number, before = self._live[key]
        self._live[key] = (number, size_bytes)
        self.now_bytes += size_bytes - before
        self._changes.append((number, size_bytes - before))

    def _end(self, key):
        self._grow(key, 0)
        del self._live[key]

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resized(storage, size_bytes):
            # fully_shard frees gathered weights so
            if id(storage) in self._live:
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
        name = function.name().split("::")[1].split(".")[0]
        self.products += name in PRODUCTS
        operands = [t for t in tree_leaves((arguments, keywords)) if isinstance(t, torch.Tensor)]
        if function.namespace == "c10d":
            self._note(name, arguments)
        moves = name in MOVES or function.namespace in ("c10d", "fsdp")
        held = {kind for kind in map(self._kind_of, operands) if kind} if moves else set()
        passed = None
        if held:
            passed = "weights" if held <= {"weights", "masters"} else "gradients" if held == {"gradients"} else None
        answers = [t for t in tree_leaves(answer) if isinstance(t, torch.Tensor)]
        for tensor in answers + (operands if moves else []):
            if self._kind_of(tensor) is None:
                self.see(tensor, passed or (None if name in ALLOCATES else self._by_shape(tensor)))
        return answer

    def _by_shape(self, tensor):
        if tuple(tensor.shape) in self._shapes:
            return "gradients"
        return "logits" if tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary else None

    def _note(self, name, arguments):
        leaves = tree_leaves(arguments)
        sizes = tuple(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
        group = dist.ProcessGroup.unbox(next(x for x in leaves if isinstance(x, torch.ScriptObject)))
        self.collectives.append(Collective(name, self._axes[group.group_name], sizes, self.products))
