"""Reads of a tensor's values by the host. On a GPU each of them waits until all that was started before has ended."""

import traceback

import torch
from torch.overrides import TorchFunctionMode

_READING = (
    *("item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose"),
    *("__float__", "__int__", "__bool__", "__index__", "__contains__", "__repr__"),
)


class HostReads(TorchFunctionMode):
    """Notes who reads values of tensors. A copy by `.to("cpu")` is a read too."""

    def __init__(self):
        super().__init__()
        self._inside, self.places = 0, []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        # on a CPU a rank's own device looks the same: only a copy to what is written as "cpu" is one to the host
        named = [value for value in (*arguments[1:], *(keywords or {}).values()) if isinstance(value, str)]
        is_read = name in _READING or (name == "to" and "cpu" in named)
        # an optimizer that is not fused keeps its count of steps on the host
        is_read = is_read and not any("torch/optim/" in f.filename for f in traceback.extract_stack()[-4:])
        if is_read and not self._inside:
            # above this frame lies who reads
            self.places.append(next(f"{f.filename.rpartition('/')[2]}:{f.lineno} {name}" for f in _own_frames()))
        self._inside += is_read
        try:
            return function(*arguments, **(keywords or {}))
        finally:
            self._inside -= is_read


def _own_frames():
    frames = [frame for frame in reversed(traceback.extract_stack()) if "host_reads" not in frame.filename]
    return [frame for frame in frames if "cost_aware_trainer" in frame.filename] + frames


def reads_of_steps(run_step, steps):
    """Who reads in each of so many steps."""
    found = []
    for _ in range(steps):
        with HostReads() as reads:
            run_step()
        found.append(reads.places)
    return found


def check_that_reads_are_seen():
    with HostReads() as reads:
        value = torch.ones(2)
        float(value[0]), value.sum().item(), value.tolist(), bool(value[1] > 0), value.to("cpu")
    assert len(reads.places) == 5, reads.places
