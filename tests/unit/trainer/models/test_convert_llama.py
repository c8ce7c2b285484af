"""The bundled decoder with converted weights computes what a Llama does, by a reference written from the papers."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.support import ROOT

from cost_aware_trainer.contract import ModelPlan
from cost_aware_trainer.models.decoder import Decoder, whole

PATH = ROOT / "examples/convert_llama.py"
SPECIFICATION = importlib.util.spec_from_file_location("convert_llama", PATH)
convert = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(convert)

HEADS, KV_HEADS, SIZE, HIDDEN, FFN, VOCABULARY, LAYERS = 4, 2, 8, 32, 48, 300, 3


def random_llama(*, tied):
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": 1 + matrix(HIDDEN)}
    for layer in range(LAYERS):
        state |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "input_layernorm.weight": 1 + matrix(HIDDEN),
                "self_attn.q_proj.weight": matrix(HEADS * SIZE, HIDDEN),
                "self_attn.k_proj.weight": matrix(KV_HEADS * SIZE, HIDDEN),
                "self_attn.v_proj.weight": matrix(KV_HEADS * SIZE, HIDDEN),
                "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * SIZE),
                "post_attention_layernorm.weight": 1 + matrix(HIDDEN),
                "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
                "mlp.up_proj.weight": matrix(FFN, HIDDEN),
                "mlp.down_proj.weight": matrix(HIDDEN, FFN),
            }.items()
        }
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if tied else matrix(VOCABULARY, HIDDEN)
    return state


def normalised(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x):
    """As transformers does it: x · cos + rotate_half(x) · sin, angles repeated over both halves; x (heads, positions, size)."""
    angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.cat([angles, angles], -1)
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def llama(state, tokens):
    """Logits (positions, vocabulary) of one sample, with attention spelled out."""
    x = state["model.embed_tokens.weight"][tokens]
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
    for layer in range(LAYERS):
        w = {name.split(".", 3)[3]: value for name, value in state.items() if name.startswith(f"model.layers.{layer}.")}
        y = normalised(x, w["input_layernorm.weight"])
        query, key, value = (
            (y @ w[f"self_attn.{kind}_proj.weight"].T).view(len(tokens), -1, SIZE).transpose(0, 1) for kind in "qkv"
        )
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (turned(key), value))
        scores = (turned(query) @ key.transpose(1, 2) / SIZE**0.5 + mask).softmax(-1)
        x = x + (scores @ value).transpose(0, 1).reshape(len(tokens), -1) @ w["self_attn.o_proj.weight"].T
        y = normalised(x, w["post_attention_layernorm.weight"])
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + gated @ w["mlp.down_proj.weight"].T
    return normalised(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


@pytest.mark.parametrize("tied", [False, True])
def test_converted_weights_give_the_reference_s_logits_and_convert_back(tied):
    state = random_llama(tied=tied)
    model = ModelPlan(
        layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, ffn=FFN, sequence_length=11,
        vocabulary=VOCABULARY, tied_embeddings=tied,
    )  # fmt: skip
    decoder = Decoder(*whole(model))
    bundled = convert.to_bundled(state, LAYERS, tied=tied)
    decoder.load_state_dict(bundled)
    tokens = torch.randint(0, VOCABULARY, (11,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(decoder(tokens[None])[0], llama(state, tokens), atol=1e-4, rtol=1e-4)
    again = convert.to_transformers(bundled, LAYERS, tied=tied)
    assert again.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(value, state[name]) for name, value in again.items())


def test_what_does_not_fit_is_named():
    state = random_llama(tied=False)
    with pytest.raises(convert.ConversionError, match=r"unknown: model\.layers\.2\."):
        convert.to_bundled(state, LAYERS - 1)
    del state["lm_head.weight"]
    with pytest.raises(convert.ConversionError, match=r"missing: lm_head\.weight.*--tied"):
        convert.to_bundled(state, LAYERS)
