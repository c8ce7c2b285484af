"""Order of samples: a seeded order that no degree can change, and a checksum that proves it.

Sample positions count from 0 over the whole run: step s trains positions `s * global_samples ...`. Epoch e of a data
set of W windows maps its W positions onto its W windows by a bijection that is computed, not stored, so any rank of
any attempt knows any part of the order at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Uint64Array = NDArray[np.uint64]

FEISTEL_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def mix64(values: Uint64Array) -> Uint64Array:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    mixed = values.astype(np.uint64, copy=True)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def permute(indices: Uint64Array, size: int, key: int) -> Uint64Array:
    """Maps 0 … size-1 onto itself, one to one, as `key` says: a Feistel network over the next even power of two, cycle-walked.

    Cycle-walking applies the network again to values outside of the range. At most three of four values are.

    Raises:
        ValueError: an index outside 0 … size-1.
    """
    if indices.size and int(indices.max()) >= size:
        raise ValueError(f"index {int(indices.max())} is outside of 0 … {size - 1}")
    half_bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    walked = _feistel(indices.astype(np.uint64), half_bits, key)
    outside = walked >= np.uint64(size)
    while outside.any():
        walked[outside] = _feistel(walked[outside], half_bits, key)
        outside = walked >= np.uint64(size)
    return walked


def _feistel(values: Uint64Array, half_bits: int, key: int) -> Uint64Array:
    """Applies the network once to words of 2 × half_bits bits."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_index in range(FEISTEL_ROUNDS):
        round_key = np.uint64((key + (round_index + 1) * _GOLDEN) & _MASK64)
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right


@dataclass(frozen=True)
class SampleOrder:
    """Order of a run's samples, shuffled again in each epoch."""

    windows: int
    """Number of distinct samples."""
    seed: int
    """Seed that chooses the order of each epoch."""

    def at(self, positions: Uint64Array) -> Uint64Array:
        """Windows that are trained at global positions."""
        epochs, offsets = np.divmod(positions.astype(np.uint64), np.uint64(self.windows))
        result = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(offsets[chosen], self.windows, self._epoch_key(int(epoch)))
        return result

    def _epoch_key(self, epoch: int) -> int:
        seeded = mix64(np.array([(self.seed ^ (epoch * _GOLDEN)) & _MASK64], dtype=np.uint64))
        return int(seeded[0])


@dataclass(frozen=True)
class Shard:
    """Contiguous slice of each global batch that one data-parallel rank trains."""

    global_samples: int
    """Samples of one step, on all ranks."""
    rank: int
    """Place of the rank on the data axis."""
    degree: int
    """Number of ranks on the data axis."""

    def positions(self, step: int) -> Uint64Array:
        """Global positions of this rank's samples of a step (counted from 0)."""
        each = self.global_samples // self.degree
        first = step * self.global_samples + self.rank * each
        return np.arange(first, first + each, dtype=np.uint64)

    def micro_batch_positions(self, step: int, micro_batch: int) -> Iterator[Uint64Array]:
        """Global positions of this rank's samples of a step (counted from 0), one micro-batch at a time."""
        positions = self.positions(step)
        for start in range(0, len(positions), micro_batch):
            yield positions[start : start + micro_batch]


def checksum(positions: Uint64Array, windows: Uint64Array) -> int:
    """Hashes (position, window) pairs without regard to their order: the sum of the pairs' hashes modulo 2^64.

    A pair that is trained twice, left out or exchanged changes it. The sums of shards add up to the sum of the whole.
    """
    hashed = mix64(positions * np.uint64(_GOLDEN) + mix64(windows + np.uint64(1)))
    return int(hashed.sum(dtype=np.uint64))


def expected_checksum(windows: int, seed: int, global_samples: int, steps: int) -> int:
    """Checksum of a run that trained every position of its first `steps` steps exactly once."""
    positions = np.arange(steps * global_samples, dtype=np.uint64)
    return checksum(positions, SampleOrder(windows, seed).at(positions))


def checksum_text(value: int) -> str:
    """Writes a checksum as results and manifests have it: 16 hexadecimal digits."""
    return f"{value & _MASK64:016x}"


def add_checksums(*values: int) -> int:
    """Checksum of the union of disjoint samples."""
    return sum(values) & _MASK64
