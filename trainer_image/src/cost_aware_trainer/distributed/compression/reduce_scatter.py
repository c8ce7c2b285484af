"""Compressed reduce-scatter for fully_shard: the first hop of a compressed sum, because each rank keeps only its own chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# where torch 2.15 keeps the interface of `set_custom_reduce_scatter`
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from cost_aware_trainer.contract import Compression
from cost_aware_trainer.distributed.compression.quantisation import BlockCodec
from cost_aware_trainer.distributed.compression.sums import BITS, exchange


class CompressedReduceScatter(ReduceScatter):
    """Compressed reduce-scatter of one module that `fully_shard` returned: `module.set_custom_reduce_scatter(...)`.

    Each module needs one of its own. The rounding error of the sent gradient is kept and added to the module's next gradient,
    of the next micro-batch or step. A rank's own chunk is summed in fp32 and not rounded.

    Args:
        compression: any format except none.
        block: elements that share a scale; 0 for the number in `BLOCKS`.

    Raises:
        ValueError: compression none: leave fully_shard its own reduce-scatter.
    """

    def __init__(self, compression: Compression, block: int = 0) -> None:
        if compression is Compression.NONE:
            raise ValueError("compression: none; leave fully_shard its own reduce-scatter")
        self._codec = BlockCodec(BITS[compression], block) if compression in BITS else None
        self._carry: Tensor | None = None
        self._width = 0
        self.is_uncompressed = False
        """Whether gradients are summed as they are, on all ranks. A residual waits meanwhile."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates a buffer, as torch's own reduce-scatter does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sums (or averages, as `op` says) chunk r of all ranks' flat inputs (n × chunk) into rank r's output (chunk).

        Raises:
            ValueError: asked for another operation, or to return before it is done.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"compressed reduce-scatter: op {op}, async_op {async_op}; it sums or averages, at once")
        if self.is_uncompressed:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())
            return
        codec = self._codec
        summed = self._reduce(input_tensor, group, codec) if codec else self._reduce_halves(input_tensor, group)
        output_tensor.copy_(summed[: output_tensor.numel()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    def residual(self) -> Tensor | None:
        """Copies this rank's residual, in the layout of `__call__`'s input, (n, chunk); None if nothing was rounded."""
        return None if self._carry is None else self._carry[:, : self._width].clone()

    def drain(self, group: dist.ProcessGroup) -> Tensor | None:
        """Takes the residual out and sums it over the group in fp32; returns this rank's chunk. All ranks must call it."""
        residual, self._carry = self.residual(), None
        if residual is None:
            return None
        chunk = torch.empty(residual.shape[1], device=residual.device)
        dist.reduce_scatter_tensor(chunk, residual.flatten(), group=group)
        return chunk

    def _reduce(self, flat: Tensor, group: dist.ProcessGroup, codec: BlockCodec) -> Tensor:
        rows, own = flat.view(group.size(), -1), group.rank()
        shape = (group.size(), codec.padded(rows.shape[1]))
        if self._carry is None or self._carry.shape != shape:
            self._carry = torch.zeros(shape, dtype=torch.float32, device=flat.device)
        self._width = rows.shape[1]
        self._carry[:, : rows.shape[1]].add_(rows)
        exchange(self._carry, own, codec, group)
        summed = self._carry[own].clone()
        # its own chunk was summed without rounding, so nothing of it is left over
        self._carry[own].zero_()
        return summed

    def _reduce_halves(self, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sums bf16 values in fp32, after an all-to-all."""
        received = torch.empty(flat.numel(), dtype=torch.bfloat16, device=flat.device)
        dist.all_to_all_single(received, flat.bfloat16(), group=group)
        return received.view(group.size(), -1).float().sum(dim=0)
