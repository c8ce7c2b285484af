"""Weights are cast to the precision of compute once for all passes, and their gradients add up in fp32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_aware_trainer.contract import ModelPlan, Precision, Recompute, StrategyPlan
from cost_aware_trainer.models.decoder import Decoder, shape_of, whole

PASSES = 3


class Casts(TorchDispatchMode):
    def __init__(self, weights):
        super().__init__()
        self.of, self.count = {weight.data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        is_cast = function.name() == "aten::_to_copy" and arguments[0].data_ptr() in self.of
        self.count += is_cast
        return function(*arguments, **(keywords or {}))


def decoder_of(precision, recompute=Recompute.NONE, *, tied=False):
    model = ModelPlan(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence_length=16, vocabulary=64, tied_embeddings=tied
    )
    shape, stage = whole(model)
    torch.manual_seed(0)
    decoder = Decoder(shape_of(model, StrategyPlan(precision=precision, recompute=recompute), shape.tensor), stage)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return decoder


def run(decoder):
    torch.manual_seed(1)
    for _ in range(PASSES):
        decoder(torch.randint(0, 64, (2, 16))).float().square().mean().backward()
    return {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", list(Recompute))
def test_each_weight_is_cast_once_for_all_passes_and_gradients_are_as_if_it_were_not(recompute, tied):
    apart, together = (decoder_of(Precision.BF16, recompute, tied=tied) for _ in range(2))
    expected = run(apart)
    # the rows of an embedding are cast after they are looked up
    weights = [w for name, w in together.named_parameters() if tied or not name.startswith("embedding")]
    with Casts(weights) as casts, together.weights_cast():
        found = run(together)
    assert casts.count == len(weights)
    for name, gradient in expected.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, found[name]), name


def test_gradients_of_later_layers_are_complete_before_the_pass_comes_to_earlier_ones():
    """Buckets travel behind computation only if so, and no gradient waits in bf16 until the pass is done."""
    decoder, done = decoder_of(Precision.BF16), []
    for name, parameter in decoder.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: done.append(name))
    with decoder.weights_cast():
        run(decoder)
    order = done[: len(done) // PASSES]
    layers = [name.split(".")[1] if name.startswith("layers.") else name.split(".")[0] for name in order]
    assert sorted(set(layers), key=layers.index) == ["head", "norm", "1", "0", "embedding"]
    assert layers.index("0") == len(layers) - layers[::-1].index("1"), "all of layer 1 before any of layer 0"


def test_outside_of_the_block_a_changed_weight_is_seen():
    decoder = decoder_of(Precision.BF16)
    tokens = torch.arange(16).reshape(1, 16)
    with decoder.weights_cast():
        before = decoder(tokens)
    with torch.no_grad():
        decoder.head.weight.mul_(2)
    assert torch.equal(decoder(tokens), before * 2)


def test_a_model_in_fp32_has_nothing_to_cast_and_no_parameter_more():
    decoder = decoder_of(Precision.FP32)
    names = [name for name, _ in decoder.named_parameters()]
    with Casts(decoder.parameters()) as casts, decoder.weights_cast():
        run(decoder)
        assert [name for name, _ in decoder.named_parameters()] == names
    assert casts.count == 0
