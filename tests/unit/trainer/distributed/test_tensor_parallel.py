"""Losses of a large vocabulary are computed a piece at a time and come out as if they were not."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cost_aware_trainer.distributed import tensor_parallel
from cost_aware_trainer.distributed.tensor_parallel import TensorAxis
from cost_aware_trainer.telemetry.traffic import Traffic

TOKENS, VOCABULARY, HIDDEN = (2, 350), 5000, 32


@pytest.fixture
def axis():
    return TensorAxis(None, 0, 1, Traffic(torch.device("cpu")))


def drawn(dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(*TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = (0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    return inputs, head, torch.randint(0, VOCABULARY, TOKENS, generator=generator)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows", [1, 64, 699])
def test_pieces_give_the_losses_and_gradients_of_the_whole(axis, monkeypatch, dtype, error, rows):
    inputs, head, targets = drawn(dtype)
    whole = F.cross_entropy(F.linear(inputs, head).flatten(0, 1).float(), targets.flatten(), reduction="none")
    wanted = torch.autograd.grad(whole.sum() * 0.01, (inputs, head))
    monkeypatch.setattr(tensor_parallel, "LOGITS_BYTES", rows * VOCABULARY * 4)
    losses = axis.losses(F.linear(inputs, head), targets)
    found = torch.autograd.grad(losses.sum() * 0.01, (inputs, head))
    torch.testing.assert_close(losses, whole, rtol=1e-6, atol=1e-5)
    for gradient, expected in zip(found, wanted, strict=True):
        assert (gradient - expected).abs().max() <= error * expected.abs().max()


def test_a_second_backward_pass_is_refused_because_the_first_has_overwritten_the_logits(axis, monkeypatch):
    inputs, head, targets = drawn(torch.float32)
    monkeypatch.setattr(tensor_parallel, "LOGITS_BYTES", 64 * VOCABULARY * 4)
    loss = axis.summed_loss(F.linear(inputs, head), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss.backward()
