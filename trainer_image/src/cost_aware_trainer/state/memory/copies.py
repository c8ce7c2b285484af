"""Copies of a rank's state in its peers' memory, so that after the loss of one node the volume is not read.

There are two kinds, made at each save:

- `RingCopies`: each rank sends its state's bytes to the next one. Any set of ranks may be lost of which no two are
  neighbours. Each rank needs memory for one more state, that of the rank before it.
- `ParityGroup`: the ranks of a group of k hold, in equal shares, the XOR of the others' states. One rank of the group may be
  lost. Each rank needs memory for about 1 / (k - 1) of a state. (Surviving two losses takes Reed–Solomon's second parity; this
  is its first.)

A state is the result of `pack` for a rank's tensors. Its SHA-256 travels with it and is compared after rebuilding. Copies lie
in memory: they outlive a rank, but not a power cut. `tier` decides when to copy and keeps the copies in files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LENGTH_BYTES = 8
_HASH_BYTES = 32


class ReplicaError(RuntimeError):
    """Lost state that cannot be rebuilt: too many ranks are lost, or the peers' copies are not what was saved."""


def pack(state: Mapping[str, Tensor]) -> Tensor:
    """Packs a state into bytes (uint8, one dimension): a JSON header of names, types and shapes, and then the values."""
    header = json.dumps(
        [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in state.items()]
    )
    text = header.encode()
    parts = [torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)]
    parts += [value.detach().cpu().contiguous().flatten().view(torch.uint8) for value in state.values()]
    return torch.cat(parts)


def unpack(packed: Tensor) -> dict[str, Tensor]:
    """Unpacks the state that `pack` packed, in CPU memory."""
    content = packed.numpy().tobytes()
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    state: dict[str, Tensor] = {}
    for name, kind, shape in json.loads(content[_LENGTH_BYTES:start]):
        values = torch.empty(shape, dtype=getattr(torch, kind))
        size_bytes = values.numel() * values.element_size()
        if size_bytes:
            piece = torch.frombuffer(bytearray(content[start : start + size_bytes]), dtype=values.dtype)
            values = piece.view(shape)
        state[name] = values
        start += size_bytes
    return state


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of a packed state."""

    size_bytes: int
    """Size in bytes."""
    sha256: bytes
    """SHA-256 of the bytes."""

    @classmethod
    def of(cls, packed: Tensor) -> Fingerprint:
        """Computes the fingerprint of a packed state."""
        return cls(packed.numel(), hashlib.sha256(packed.numpy().tobytes()).digest())

    def check(self, rebuilt: Tensor, rank: int) -> None:
        """Raises ReplicaError if a rebuilt state has another fingerprint."""
        if Fingerprint.of(rebuilt) != self:
            raise ReplicaError(
                f"rank {rank}: its rebuilt state has another SHA-256 than was saved; load the newest checkpoint instead"
            )


def exchange_fingerprints(
    mine: Fingerprint | None, group: dist.ProcessGroup, known: list[Fingerprint]
) -> list[Fingerprint]:
    """Exchanges fingerprints in the group: all ranks' own, and those of lost ranks, which bring none, from ranks that know them."""
    size = dist.get_world_size(group)
    words = torch.zeros(size, _LENGTH_BYTES + _HASH_BYTES, dtype=torch.uint8)
    for rank, fingerprint in enumerate(known):
        words[rank] = _bytes(fingerprint)
    if mine:
        words[dist.get_rank(group)] = _bytes(mine)
    # All survivors have equal fingerprints and lost ranks have zeros, so the maximum is the survivors'.
    dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    rows = [bytes(row.numpy().tobytes()) for row in words]
    return [Fingerprint(int.from_bytes(row[:_LENGTH_BYTES], "little"), row[_LENGTH_BYTES:]) for row in rows]


def _bytes(fingerprint: Fingerprint) -> Tensor:
    content = fingerprint.size_bytes.to_bytes(_LENGTH_BYTES, "little") + fingerprint.sha256
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class RingCopies:
    """Copies of each rank's state in the memory of the next one. All ranks of the gloo group call every method together.

    On several nodes the group must be ordered so that neighbours lie on different ones: one rank of each node in turn.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if self._size < 2:
            raise ReplicaError("RingCopies: a group of one has no peer; use two ranks or more")
        self.peer_state: Tensor | None = None
        """Packed state of the rank before this one."""
        self.fingerprints: list[Fingerprint] = []

    def save(self, packed: Tensor) -> None:
        """Sends this rank's state to the next rank and receives that of the one before. Blocks until both are done."""
        self.fingerprints = exchange_fingerprints(Fingerprint.of(packed), self._group, [])
        before = (self._rank - 1) % self._size
        received = torch.empty(self.fingerprints[before].size_bytes, dtype=torch.uint8)
        _swap(self._group, packed, (self._rank + 1) % self._size, received, before)
        self.fingerprints[before].check(received, before)
        self.peer_state = received

    def rebuild(self, packed: Tensor | None) -> Tensor:
        """Returns this rank's state: `packed`, or, if that is None because its memory was lost, its copy from the next rank.

        Raises:
            ReplicaError: a lost rank's copy was lost too (on all ranks), or the copy is not what was saved.
        """
        lost = _lost(self._group, packed is None)
        gone = next((rank for rank in lost if (rank + 1) % self._size in lost), None)
        if gone is not None:
            raise ReplicaError(
                f"ranks {gone} and {(gone + 1) % self._size} are neighbours and both lost; load the newest checkpoint instead"
            )
        self.fingerprints = exchange_fingerprints(None, self._group, self.fingerprints)
        waiting: list[Any] = []
        if (self._rank - 1) % self._size in lost and self.peer_state is not None:
            waiting.append(dist.isend(self.peer_state, group=self._group, group_dst=(self._rank - 1) % self._size))
        mine = packed
        if mine is None:
            mine = torch.empty(self.fingerprints[self._rank].size_bytes, dtype=torch.uint8)
            waiting.append(dist.irecv(mine, group=self._group, group_src=(self._rank + 1) % self._size))
        for work in waiting:
            work.wait()
        self.fingerprints[self._rank].check(mine, self._rank)
        return mine


class ParityGroup:
    """XOR of a group's states, spread over its ranks as RAID 5 spreads it. All ranks call every method together.

    Each rank cuts its state into k - 1 pieces. Stripe s is the XOR of one piece of every rank except s, and rank s holds it.
    So one stripe is lost with a rank, and each of the rank's own pieces lies in the stripe of another rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if self._size < 2:
            raise ReplicaError("ParityGroup: a group of one has no peer; use two ranks or more")
        self.parity: Tensor | None = None
        """Stripe that this rank holds."""
        self.fingerprints: list[Fingerprint] = []

    def save(self, packed: Tensor) -> None:
        """Makes the stripes of the group's states."""
        self.fingerprints = exchange_fingerprints(Fingerprint.of(packed), self._group, [])
        pieces = self._pieces(packed)
        for stripe in range(self._size):
            summed = self._xor(pieces.get(stripe))
            if stripe == self._rank:
                self.parity = summed

    def rebuild(self, packed: Tensor | None) -> Tensor:
        """Returns this rank's state: `packed`, or, if that is None because its memory was lost, rebuilt from all others.

        Raises:
            ReplicaError: two or more ranks are lost (on all ranks), or the rebuilt state is not what was saved.
        """
        lost = _lost(self._group, packed is None)
        if len(lost) > 1:
            raise ReplicaError(f"ranks {lost} are lost, one parity rebuilds one; load the newest checkpoint instead")
        if not lost:
            assert packed is not None  # noqa: S101  nobody is lost
            return packed
        (gone,) = lost
        self.fingerprints = exchange_fingerprints(None, self._group, self.fingerprints)
        pieces = self._pieces(packed) if packed is not None else {}
        # The lost rank's own stripe is lost too, but holds none of its pieces.
        rebuilt = [
            self._xor(self.parity if stripe == self._rank else pieces.get(stripe))
            for stripe in range(self._size)
            if stripe != gone
        ]
        if packed is not None:
            return packed
        mine = torch.cat(rebuilt)[: self.fingerprints[gone].size_bytes]
        self.fingerprints[gone].check(mine, gone)
        return mine

    def _piece_bytes(self) -> int:
        longest = max(fingerprint.size_bytes for fingerprint in self.fingerprints)
        return -(-longest // (self._size - 1))

    def _pieces(self, packed: Tensor) -> dict[int, Tensor]:
        """Cuts this rank's state into pieces by stripe, all of one length, the last ones filled up with zeros."""
        each = self._piece_bytes()
        padded = torch.zeros(each * (self._size - 1), dtype=torch.uint8)
        padded[: packed.numel()] = packed
        stripes = [stripe for stripe in range(self._size) if stripe != self._rank]
        return dict(zip(stripes, torch.split(padded, each), strict=True))

    def _xor(self, piece: Tensor | None) -> Tensor:
        """XOR of the pieces of all ranks of the group. A rank without one counts as zeros."""
        gathered = [torch.empty(self._piece_bytes(), dtype=torch.uint8) for _ in range(self._size)]
        brought = piece if piece is not None else torch.zeros(self._piece_bytes(), dtype=torch.uint8)
        dist.all_gather(gathered, brought.contiguous(), group=self._group)
        summed = gathered[0]
        for other in gathered[1:]:
            summed = summed ^ other
        return summed


def _lost(group: dist.ProcessGroup, is_lost: bool) -> list[int]:
    """Lists the ranks of the group that have lost their memory; equal on all ranks."""
    flags = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    flags[dist.get_rank(group)] = int(is_lost)
    dist.all_reduce(flags, group=group)
    return [rank for rank, flag in enumerate(flags.tolist()) if flag]


def _swap(group: dist.ProcessGroup, sent: Tensor, target: int, received: Tensor, source: int) -> None:
    waiting = [dist.isend(sent, group=group, group_dst=target), dist.irecv(received, group=group, group_src=source)]
    for work in waiting:
        if work is not None:
            work.wait()
