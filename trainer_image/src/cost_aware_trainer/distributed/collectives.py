"""Process groups of the ranks, and the few small collectives with which they agree."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from cost_aware_trainer.contract import ENV_PULSE_FOLDER
from cost_aware_trainer.contract.heartbeat import Heartbeat
from cost_aware_trainer.distributed.meetings import Meeting, Meetings, StorageError

ENV_COLLECTIVE_TIMEOUT = "CATJ_COLLECTIVE_TIMEOUT_SECONDS"
TIMEOUT = timedelta(seconds=float(os.environ.get(ENV_COLLECTIVE_TIMEOUT, "60")))
"""Time-out of a collective. One that takes longer has lost a peer. Every other rank would pay for torch's own 30 minutes."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of the run, as this rank sees them: its own place, and the process groups of all."""

    rank: int
    """Number of this rank."""
    size: int
    """Number of ranks in the run."""
    local_rank: int
    """Number of this rank on its node."""
    device: torch.device
    """Device on which this rank computes."""
    background: dist.ProcessGroup | None
    """Group over gloo, used only by asynchronous checkpoints: collectives of two threads on one group would interleave differently
    on different ranks. None for a run of one rank."""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None, 0))
    """Heartbeat, by which the agent sees progress. Every wait for other ranks is marked in it."""
    meetings: Meetings = field(default_factory=lambda: Meetings(None, 0, 1, TIMEOUT))
    """Meetings around storage, whose waits end by the progress that ranks show and not after `TIMEOUT`."""

    def meet(self, name: str) -> Meeting:
        """Calls for the next meeting of a name on the main thread, which shows its waits in the heartbeat."""
        return self.meetings.call(name).beating(self.heartbeat)

    def told_by_first(self, name: str, work: Callable[[], Any]) -> Any:
        """Lets rank 0 ask the storage and tells all ranks its answer, JSON values.

        Raises:
            StorageError: the storage answered with an error, or not at all.
        """
        meeting, answer, problem = self.meet(name), None, ""
        if self.is_first:
            try:
                answer = work()
            except OSError as error:
                problem = f"storage: {error}"
        problem = meeting.agree(problem)
        if problem:
            raise StorageError(problem)
        return self.broadcast_json(answer)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides and writes for all."""
        return self.rank == 0

    def synchronise(self) -> None:
        """Waits until the device has finished all its work. Does nothing on a CPU."""
        if self.device.type == "cuda":
            # The device itself waits for other ranks in NCCL's kernels, and the host cannot tell that from work.
            with self.heartbeat.waiting():
                torch.cuda.synchronize(self.device)

    def sum(self, values: list[float]) -> list[float]:
        """Sums each value over all ranks, in float64."""
        if self.size == 1:
            return values
        with self.heartbeat.waiting():
            sums: list[float] = self.sum_tensor(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()
        return sums

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in place."""
        if self.size > 1:
            with self.heartbeat.waiting():
                dist.all_reduce(tensor)
        return tensor

    def to_device(self, values: Tensor) -> Tensor:
        """Copies values from the host to the device without waiting for it."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, values: Tensor) -> tuple[Tensor, Any]:
        """Copies values from the device to the host without waiting for it.

        Returns:
            the copy, and the event after which it holds the values; None if it holds them already.
        """
        if self.device.type != "cuda":
            return values, None
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return copy, event

    def broadcast_json(self, document: Any) -> Any:
        """Sends rank 0's document to every rank, as JSON in a byte tensor, so that nothing is unpickled."""
        if self.size == 1:
            return document
        content = json.dumps(document).encode() if self.is_first else b""
        with self.heartbeat.waiting():
            length = torch.tensor([len(content)], dtype=torch.int64, device=self.device)
            dist.broadcast(length, src=0)
            buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
            if self.is_first:
                buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            dist.broadcast(buffer, src=0)
            received = bytes(buffer.cpu().numpy())
        return json.loads(received)

    def first_problem(self, problem: str) -> str:
        """Returns on every rank the problem of the lowest rank that has one; empty if none has."""
        if self.size == 1:
            return problem
        texts = [torch.zeros(1024, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        mine = problem.encode()[:1024].ljust(1024, b"\0")
        with self.heartbeat.waiting():
            dist.all_gather(texts, torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device))
        problems = [bytes(text.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for text in texts]
        return next((text for text in problems if text), "")

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            with self.heartbeat.waiting():
                dist.barrier()


@dataclass(frozen=True)
class Rendezvous:
    """Meeting place of a run's ranks. It outlives process groups, so that living processes can make new ones."""

    store: Store | None
    """Store of torch's rendezvous; None for a run of one rank."""
    rank: int
    """Number of this rank."""
    size: int
    """Number of ranks in the run."""
    local_rank: int
    """Number of this rank on its node."""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None, 0))
    """Heartbeat of this rank."""

    @classmethod
    def from_environment(cls) -> Self:
        """Opens the store that torchrun's environment names. A single rank needs none."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        folder = os.environ.get(ENV_PULSE_FOLDER)
        heartbeat = Heartbeat(Path(folder) if folder else None, rank)
        store = next(rendezvous("env://", timeout=TIMEOUT))[0] if size > 1 else None
        return cls(store, rank, size, int(os.environ.get("LOCAL_RANK", "0")), heartbeat)

    def join(self, generation: str) -> Ranks:
        """Makes the run's process groups: nccl if CUDA is available, gloo otherwise.

        All ranks must name the same `generation`, and never one that was used before.
        """
        has_cuda = torch.cuda.is_available()
        device = torch.device("cuda", self.local_rank) if has_cuda else torch.device("cpu")
        if has_cuda:
            torch.cuda.set_device(device)
        if self.store is None:
            return Ranks(self.rank, self.size, self.local_rank, device, None, self.heartbeat)
        store = PrefixStore(f"generation/{generation}", self.store)
        backend = "nccl" if has_cuda else "gloo"
        with self.heartbeat.waiting():
            # bound to its device from the start: NCCL connects at once, and an error names the rank's own device
            bound = device if has_cuda else None
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT, device_id=bound
            )
            background = dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert isinstance(background, dist.ProcessGroup)  # noqa: S101  every rank is a member
        meetings = Meetings(PrefixStore("meetings", store), self.rank, self.size, TIMEOUT)
        return Ranks(self.rank, self.size, self.local_rank, device, background, self.heartbeat, meetings)


def disconnect() -> None:
    """Destroys the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ring_bytes(payload_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce: 2 (n-1) / n × payload."""
    return 2 * (ranks - 1) / ranks * payload_bytes
