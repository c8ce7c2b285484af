"""Gradient compression: sums over replicas in which bf16, int8 or int4 travels instead of fp32.

A quantised sum has two hops, as ZeRO++'s (2306.10209). Each rank owns one of n equal chunks of a bucket. First every rank
sends each owner its part of that owner's chunk, quantised (an all-to-all). The owner adds them up in fp32, its own part
unrounded. Then it sends the sum, quantised again, to all (an all-gather). So an element crosses a rank's network twice
(n − 1) / n times, as in a ring, and not n − 1 times, as in an all-gather of all quantised gradients. All ranks decode the
same bytes, so their sums are equal to the last bit.

The rounding error is the *residual*. It stays with the rank that rounded: the first hop's in the other owners' chunks, the
second hop's in its own. It is added to the rank's next gradient. One copy of the gradients per rank holds the residuals of
both hops. Summed over the ranks, it is the part of the gradients that has not reached the weights yet.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from cost_aware_trainer.contract import Compression
from cost_aware_trainer.distributed.collectives import TIMEOUT, ring_bytes
from cost_aware_trainer.distributed.compression.quantisation import BLOCKS, SCALE_BYTES, BlockCodec

BITS = {Compression.INT8: 8, Compression.INT4: 4}

BucketLayout = tuple[tuple[str, int], ...]
"""Names and element counts of a bucket's parameters (or of this rank's parts of them), in order."""


def element_bytes(compression: Compression) -> float:
    """Bytes on the wire of one gradient element, with its part of a scale."""
    if compression in BITS:
        bits = BITS[compression]
        return bits / 8 + SCALE_BYTES / BLOCKS[bits]
    return 2.0 if compression is Compression.BF16 else 4.0


def exchange(carry: Tensor, own: int, codec: BlockCodec, group: dist.ProcessGroup) -> None:
    """Does the first hop, in place: row `own` of `carry` (n, chunk) becomes the group's sum, and the other rows residuals.

    Blocks until the others' parts have come.
    """
    ranks, chunk = carry.shape
    row_bytes = codec.row_bytes(chunk)
    others = [rows for rows in (carry[:own], carry[own + 1 :]) if len(rows)]
    sent = torch.cat([codec.encode(rows) for rows in others])
    received = torch.empty_like(sent)
    splits = [0 if rank == own else row_bytes for rank in range(ranks)]
    dist.all_to_all_single(received.view(-1), sent.view(-1), splits, splits, group=group)
    for part in received:
        # one at a time: memory for one decoded row, not for all
        carry[own].add_(codec.decode(part.unsqueeze(0), chunk)[0])


def gather(carry: Tensor, own: int, codec: BlockCodec, group: dist.ProcessGroup) -> Tensor:
    """Does the second hop: returns all ranks' sums, fp32 (n, chunk), equal on all ranks. Row `own` of `carry` becomes a residual."""
    ranks, chunk = carry.shape
    mine = codec.encode(carry[own : own + 1])
    gathered = torch.empty(ranks * mine.numel(), dtype=torch.uint8, device=carry.device)
    dist.all_gather_into_tensor(gathered, mine.view(-1), group=group)
    return codec.decode(gathered.view(ranks, -1), chunk)


class Sum:
    """Sum that is under way."""

    def __init__(self, done: concurrent.futures.Future[None], event: torch.cuda.Event | None = None) -> None:
        self._done, self._event = done, event

    def wait(self) -> None:
        """Waits until the bucket holds the sum (on CUDA: makes the current stream wait); raises the sum's error, if there was one."""
        self._done.result()
        if self._event is not None:
            self._event.wait()

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """Calls back with the error, or None, from the thread that ends the sum."""
        self._done.add_done_callback(lambda done: call(done.exception()))


@dataclass
class _Lane:
    """Thread that makes its calls one after the other, in the same order on every rank, as collectives need it."""

    name: str
    """Name of the thread."""
    _pool: concurrent.futures.ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=self.name)

    def put(self, call: Callable[[], None]) -> concurrent.futures.Future[None]:
        return self._pool.submit(call)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class CompressedSum:
    """Compressed sum of gradient buckets over the ranks of a group.

    Buckets are summed in the order in which they are started. All ranks must start the same buckets in the same order. On a CPU
    each hop has a thread, so that quantisation, both hops and the backward pass overlap. On CUDA they are enqueued on a stream
    of their own. While sums are under way nothing else may use the group.

    Args:
        group: two ranks or more. A second group of the same ranks is made, so all of them must build this object.
        compression: any format except none.
        block: elements that share a scale; 0 for the number in `BLOCKS`.

    Raises:
        ValueError: a compression that is none, or a group of one rank: sum without this class.
    """

    def __init__(self, group: dist.ProcessGroup, compression: Compression, block: int = 0) -> None:
        if compression is Compression.NONE or group.size() < 2:
            raise ValueError(f"compression: {compression} over {group.size()} ranks needs no compressed sum")
        self._group, self.ranks, self._own = group, group.size(), group.rank()
        self._codec = BlockCodec(BITS[compression], block) if compression in BITS else None
        self._second = _twin(group) if self._codec else group
        self._lanes = _Lane("exchange"), _Lane("gather")
        self._stream: torch.cuda.Stream | None = None
        self._carries: dict[BucketLayout, Tensor] = {}
        self._inherited: dict[str, Tensor] = {}

    def start(self, layout: BucketLayout, bucket: Tensor) -> Sum:
        """Starts to replace a flat bucket, with the elements of the layout, by its sum over the group."""
        codec = self._codec
        if codec is None:
            return self._launch(bucket, lambda: self._reduce_halves(bucket), None)
        carry = self._carry(layout, bucket, codec)

        def first() -> None:
            carry.view(-1)[: bucket.numel()].add_(bucket)
            exchange(carry, self._own, codec, self._group)

        def second() -> None:
            bucket.copy_(gather(carry, self._own, codec, self._second).view(-1)[: bucket.numel()])

        return self._launch(bucket, first, second)

    def sent_bytes(self, elements: int) -> float:
        """Bytes that this rank sends for a bucket of that many elements."""
        if self._codec is None:
            return ring_bytes(2 * elements, self.ranks)
        return float(2 * (self.ranks - 1) * self._codec.row_bytes(self._chunk(elements, self._codec)))

    def residuals(self) -> dict[str, Tensor]:
        """Copies this rank's residual of each parameter, flat fp32; empty for bf16. No sum may be under way."""
        found = dict(self._inherited)
        for layout, carry in self._carries.items():
            sizes = [elements for _, elements in layout]
            parts = carry.view(-1)[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
            found |= {name: part.clone() for (name, _), part in zip(layout, parts, strict=True)}
        return found

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Replaces this rank's residuals; each is added to the next gradient of its name. No sum may be under way.

        A residual of another size than its parameter raises ValueError at the parameter's next sum.
        """
        self._carries.clear()
        self._inherited = {name: residual.detach().float().flatten().clone() for name, residual in residuals.items()}

    def drain(self) -> dict[str, Tensor]:
        """Takes all residuals out and sums them over the group in fp32: equal on all ranks, and whole under any degrees.

        To hand them over when degrees change: drain on all ranks, keep the sums like other state of a parameter's shape, and
        under the new degrees give them to `load_residuals` on *one* rank of each data group.
        """
        drained = self.residuals()
        self.load_residuals({})
        if drained:
            joined = torch.cat(list(drained.values()))
            dist.all_reduce(joined, group=self._group)
            parts = joined.split([part.numel() for part in drained.values()])  # type: ignore[no-untyped-call]
            drained = dict(zip(drained, parts, strict=True))
        return drained

    def close(self) -> None:
        """Ends the threads. Calls that still wait in them are dropped."""
        for lane in self._lanes:
            lane.close()

    def _chunk(self, elements: int, codec: BlockCodec) -> int:
        return codec.padded(-(-elements // self.ranks))

    def _carry(self, layout: BucketLayout, bucket: Tensor, codec: BlockCodec) -> Tensor:
        """Residuals of a bucket, (n, chunk), made at its first sum from those that its parameters had in other buckets."""
        if layout in self._carries:
            return self._carries[layout]
        if set(layout) & {part for known in self._carries for part in known}:
            self.load_residuals(self.residuals())
        carry = torch.zeros(self.ranks, self._chunk(bucket.numel(), codec), dtype=torch.float32, device=bucket.device)
        start = 0
        for name, elements in layout:
            residual = self._inherited.pop(name, None)
            if residual is not None:
                if residual.numel() != elements:
                    raise ValueError(f"residual of {name}: {residual.numel()} elements, its gradient has {elements}")
                carry.view(-1)[start : start + elements].copy_(residual)
            start += elements
        if start != bucket.numel():
            raise ValueError(f"layout: {start} elements in all, but the bucket has {bucket.numel()}")
        self._carries[layout] = carry
        return carry

    def _reduce_halves(self, bucket: Tensor) -> None:
        halves = bucket.bfloat16()
        dist.all_reduce(halves, group=self._group)
        bucket.copy_(halves)

    def _launch(self, bucket: Tensor, first: Callable[[], None], second: Callable[[], None] | None) -> Sum:
        if bucket.is_cuda:
            return self._enqueue(bucket, first, second)
        done = self._lanes[0].put(first)
        if second is None:
            return Sum(done)
        call, exchanged = second, done

        def after() -> None:
            exchanged.result()
            call()

        return Sum(self._lanes[1].put(after))

    def _enqueue(self, bucket: Tensor, first: Callable[[], None], second: Callable[[], None] | None) -> Sum:
        """Starts a sum on CUDA, where collectives do not block the host and a stream keeps their order: no thread is needed."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(bucket.device))
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            first()
            if second is not None:
                second()
            event.record()
        bucket.record_stream(self._stream)
        done.set_result(None)
        return Sum(done, event)


def _twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes a second group of the same ranks. Only they need to take part."""
    ranks = dist.get_process_group_ranks(group)
    twin = dist.new_group(ranks, timeout=TIMEOUT, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)  # noqa: S101  this rank is a member
    return twin


def ddp_hook(
    names: Mapping[torch.nn.Parameter, str],
) -> Callable[[CompressedSum, GradBucket], torch.futures.Future[Tensor]]:
    """Makes a communication hook for DistributedDataParallel. Register it with a CompressedSum over DDP's group as its state.

    DDP wants means, so the gradient is divided by the number of ranks *before* it is summed, and residuals are of means too.
    DDP also forms its buckets again after the first step; residuals move along, by the parameters' names.
    """

    # Without annotations: torch compares them with its own classes, and here they would be strings.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        flat = bucket.buffer().div_(state.ranks)
        layout = tuple((names[parameter], parameter.numel()) for parameter in bucket.parameters())
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        started = state.start(layout, flat)

        def finish(problem: BaseException | None) -> None:
            if problem is not None:
                future.set_exception(problem)  # type: ignore[arg-type]  # torch declares it by its result
            else:
                started.wait()
                future.set_result(flat)

        started.then(finish)
        return future

    return hook
