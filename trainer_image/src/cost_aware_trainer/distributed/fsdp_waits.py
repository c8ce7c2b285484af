"""Waits for weights and gradients that fully_shard moves, and bytes of weights. torch moves both inside of forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from cost_aware_trainer.telemetry.traffic import Axis, Traffic

WAITING = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
"""Methods of torch 2.15 that gather weights, wait for them, scatter gradients, and wait for those. Gathers and scatters that run
behind computation take only the time of their launch and copies here."""


@contextmanager
def waits_timed(traffic: Traffic) -> Iterator[None]:
    """Counts the waits of fully_shard inside the block as exposed on the data axis, and the bytes of each gather.

    How often weights are gathered is torch's affair: a schedule with several stages on a rank keeps those of three of them.
    """
    originals = {name: getattr(FSDPParamGroup, name) for name in WAITING}
    depth = [0]

    def unshard(group: FSDPParamGroup, *arguments: Any, **named: Any) -> None:
        was_under_way = group._all_gather_result is not None
        originals["unshard"](group, *arguments, **named)
        if not was_under_way and group._all_gather_result is not None:
            gathered, ranks = group._all_gather_result.all_gather_output, group._all_gather_process_group.size()
            traffic.count(Axis.DATA, gathered.nbytes * (ranks - 1) / ranks)

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            if depth[0]:
                # these methods call each other: only the outer call is counted
                return original(*arguments, **named)
            depth[0] += 1
            try:
                with traffic.exposed(Axis.DATA):
                    return original(*arguments, **named)
            finally:
                depth[0] -= 1

        return call

    for name, original in originals.items():
        setattr(FSDPParamGroup, name, timed(unshard if name == "unshard" else original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)
