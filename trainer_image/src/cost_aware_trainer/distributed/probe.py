"""Measurement of the links between ranks at the start: the seconds that a message waits (alpha), and the bytes a second.

Ranks of one host are on the level `node`, ranks of different hosts on `network`. On each level ranks pair up and play
ping-pong, all pairs at once, because training also uses all links of a node at once. So a rank's bytes a second are its share.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from cost_aware_trainer.contract import ENV_NODE, LinkLevel
from cost_aware_trainer.distributed.collectives import Ranks
from cost_aware_trainer.telemetry.metrics import LinkFacts

BUDGET_SECONDS = 0.2
"""Seconds for one level. A size that would not fit into the time left is not tried, so that a slow link takes no longer than a
fast one."""
SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
REPEATS = 5

_HOST_BYTES = 256


def probe_links(
    ranks: Ranks, host: str | None = None, budget_seconds: float = BUDGET_SECONDS
) -> dict[LinkLevel, LinkFacts]:
    """Measures every level that the run has. All ranks must call it and get equal results; empty for one rank.

    Args:
        ranks: the run's ranks, whose default group must not be in use.
        host: a text that ranks of one host have in common; if None, the node's name that the pod was given, or the host's.
        budget_seconds: seconds for one level, about. One round trip of the smallest size is made in any case.
    """
    if ranks.size == 1:
        return {}
    hosts = _gather_hosts(ranks, host if host is not None else os.environ.get(ENV_NODE) or socket.gethostname())
    found = {}
    for level, pairs in (
        (LinkLevel.NODE, pairs_of_hosts(hosts)),
        (LinkLevel.NETWORK, pairs_between_hosts(hosts)),
    ):
        if pairs:
            found[level] = _probe_level(ranks, pairs, budget_seconds)
    return found


def pairs_of_hosts(hosts: list[str]) -> list[tuple[int, int]]:
    """Pairs neighbours on each host, each rank at most once. `hosts` are in the order of ranks."""
    return [pair for members in _members(hosts) for pair in zip(members[::2], members[1::2], strict=False)]


def pairs_between_hosts(hosts: list[str]) -> list[tuple[int, int]]:
    """Pairs ranks of one host with their counterparts on the next, each rank at most once."""
    members = _members(hosts)
    return [
        pair
        for first, second in zip(members[::2], members[1::2], strict=False)
        for pair in zip(first, second, strict=False)
    ]


def _members(hosts: list[str]) -> list[list[int]]:
    """Lists the ranks of each host, in the order of their first ranks."""
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def _gather_hosts(ranks: Ranks, host: str) -> list[str]:
    name = host.encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    texts = [torch.zeros(_HOST_BYTES, dtype=torch.uint8, device=ranks.device) for _ in range(ranks.size)]
    dist.all_gather(texts, torch.frombuffer(bytearray(name), dtype=torch.uint8).to(ranks.device))
    return [bytes(text.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for text in texts]


def _probe_level(ranks: Ranks, pairs: list[tuple[int, int]], budget_seconds: float) -> LinkFacts:
    latency_seconds = bytes_per_second = 0.0
    # Together, so that all pairs load the links at the same time.
    ranks.barrier()
    for first, second in pairs:
        if ranks.rank == first:
            latency_seconds, bytes_per_second = fit(_serve(ranks, second, budget_seconds))
        elif ranks.rank == second:
            _return(ranks, first)
    # One slot for each pair, which its first rank alone fills: their sum is everyone's answer.
    slots = [0.0] * (2 * len(pairs))
    for index, (first, _) in enumerate(pairs):
        if ranks.rank == first:
            slots[2 * index : 2 * index + 2] = latency_seconds, bytes_per_second
    slots = ranks.sum(slots)
    return LinkFacts(statistics.median(slots[::2]), statistics.median(slots[1::2]), len(pairs))


def fit(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """Fits a line through the first and last sample (bytes, one-way seconds): seconds of an empty message, and bytes a second.

    The time of the smallest size is nearly all waiting. The additional time of the largest is transfer.
    """
    (small_bytes, small_seconds), (large_bytes, large_seconds) = samples[0], samples[-1]
    if large_bytes == small_bytes or large_seconds <= small_seconds:
        return small_seconds, large_bytes / max(large_seconds, 1e-9)
    bytes_per_second = (large_bytes - small_bytes) / (large_seconds - small_seconds)
    return max(0.0, small_seconds - small_bytes / bytes_per_second), bytes_per_second


def _serve(ranks: Ranks, peer: int, budget_seconds: float) -> list[tuple[int, float]]:
    """Plays the first of a pair: decides sizes and repeats, and measures (bytes, one-way seconds)."""
    deadline_seconds = time.perf_counter() + budget_seconds
    samples: list[tuple[int, float]] = []
    for size_bytes in SIZES_BYTES:
        # The first round of a size may open connections and allocate; a slow link has no time for it.
        expected_seconds = 2 * samples[-1][1] * size_bytes / samples[-1][0] if samples else 0.0
        left_seconds = deadline_seconds - time.perf_counter()
        repeats = (
            REPEATS + 1 if not samples else min(REPEATS + 1, math.floor(left_seconds / max(expected_seconds, 1e-6)))
        )
        if repeats < 1:
            break
        _exchange(ranks, _number(ranks, size_bytes), peer, is_first=True)
        _exchange(ranks, _number(ranks, repeats), peer, is_first=True)
        payload = torch.zeros(size_bytes, dtype=torch.uint8, device=ranks.device)
        times = [_exchange(ranks, payload, peer, is_first=True) / 2 for _ in range(repeats)]
        samples.append((size_bytes, statistics.median(times[1:] or times)))
    _exchange(ranks, _number(ranks, 0), peer, is_first=True)
    return samples


def _return(ranks: Ranks, peer: int) -> None:
    """Plays the second of a pair: sends everything back, until it gets a size of 0."""
    while True:
        size, repeats = _number(ranks, 0), _number(ranks, 0)
        _exchange(ranks, size, peer, is_first=False)
        if not size.item():
            return
        _exchange(ranks, repeats, peer, is_first=False)
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=ranks.device)
        for _ in range(int(repeats.item())):
            _exchange(ranks, payload, peer, is_first=False)


def _number(ranks: Ranks, number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device=ranks.device)


def _exchange(ranks: Ranks, message: Tensor, peer: int, *, is_first: bool) -> float:
    """Sends a message there and back; returns the seconds that it took."""
    started_seconds = time.perf_counter()
    for sends in (is_first, not is_first):
        if sends:
            dist.send(message, peer)
        else:
            dist.recv(message, peer)
            # on CUDA receiving does not block, so wait for the data before sending them back
            ranks.synchronise()
    return time.perf_counter() - started_seconds
