"""Collectives: NCCL on one rank and on all GPUs gives the right sums and sizes, and how fast it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench.gpu_check.check import Found, Setting
from bench.gpu_check.processes import on_ranks

ELEMENT_BYTES = 4
REPEATS = 10


def collectives(setting: Setting) -> Found:
    """All-reduce, all-gather and reduce-scatter with one rank, and with all."""
    elements = 2**14 if setting.small else 2**26
    figures: dict[str, Any] = {"payload_bytes": elements * ELEMENT_BYTES}
    problems: list[str] = []
    for world in setting.worlds:
        first, *_ = answers = on_ranks(setting, world, try_collectives, setting.device, elements)
        figures |= {f"ranks_{world}_{name}": value for name, value in first["figures"].items()}
        problems += [f"rank {rank} of {world}: {said}" for rank, told in enumerate(answers) for said in told["wrong"]]
    return Found(figures, problems, setting.left_out_worlds)


def try_collectives(device_type: str, elements: int) -> dict[str, Any]:
    """Does each collective on this rank: what was wrong, and how fast it was."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, device_id=device if device.type == "cuda" else None)
    mine = torch.full((elements,), float(rank + 1), device=device)
    whole = torch.empty(elements * world, device=device)
    part = torch.empty(elements // world, device=device)
    reduced = mine.clone()
    dist.all_reduce(reduced)
    dist.all_gather_into_tensor(whole, mine)
    dist.reduce_scatter_tensor(part, mine[: part.numel() * world])
    total = float(sum(range(1, world + 1)))
    expected = torch.arange(1.0, world + 1.0, device=device).repeat_interleave(elements)
    rightness = {
        "all_reduce: the sum": bool((reduced == total).all()),
        "all_gather: the values": bool((whole == expected).all()),
        "all_gather: the bytes": whole.nbytes == mine.nbytes * world,
        "reduce_scatter: the sum": bool((part == total).all()),
        "reduce_scatter: the bytes": part.nbytes == mine.nbytes // world,
    }
    # the share of a payload that each rank sends in a ring
    share = (world - 1) / world
    ways: dict[str, tuple[Callable[[], Any], float, float]] = {
        "all_reduce": (lambda: dist.all_reduce(reduced), mine.nbytes, 2 * share),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, mine), whole.nbytes, share),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, mine[: part.numel() * world]), mine.nbytes, share),
    }
    figures: dict[str, float] = {}
    for name, (call, payload_bytes, sent_share) in ways.items():
        seconds = seconds_of(call, device)
        figures[f"{name}_seconds"] = seconds
        figures[f"{name}_gbytes_per_s"] = payload_bytes / seconds / 1e9
        figures[f"{name}_bus_gbytes_per_s"] = payload_bytes * sent_share / seconds / 1e9
    dist.destroy_process_group()
    return {"wrong": [f"{what} is wrong" for what, is_right in rightness.items() if not is_right], "figures": figures}


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, over many that follow each other; the first ones, which make connections, do not count."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()

    for _ in range(3):
        call()
    settle()
    began_seconds = time.perf_counter()
    for _ in range(REPEATS):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began_seconds) / REPEATS
