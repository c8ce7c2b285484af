"""Stand-ins for two operations that a GPU runs as one kernel, and a CPU's fake tensors as several that keep more."""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812


class _Attention(torch.autograd.Function):
    """FlashAttention keeps its inputs, its output and one number in fp32 for each query."""

    @staticmethod
    def forward(ctx, query, key, value):
        samples, heads, positions, size = query.shape
        attended = query.new_empty(samples, positions, heads, size).transpose(1, 2)
        sums = query.new_empty(samples, heads, positions, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, attended, sums)
        return attended

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Norm(torch.autograd.Function):
    """The fused norm keeps its inputs and one number in fp32 for each row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _attend(query, key, value, is_causal, enable_gqa):
    assert is_causal
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return _Attention.apply(query, key, value)


def _normalise(x, shape, weight, eps):
    assert shape == x.shape[-1:] == weight.shape
    assert eps > 0
    return _Norm.apply(x, weight)


@contextlib.contextmanager
def kernels_fused():
    with (
        mock.patch.object(F, "scaled_dot_product_attention", _attend),
        mock.patch.object(F, "rms_norm", _normalise),
    ):
        yield
