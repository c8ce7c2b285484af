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


def config_of(*, tied=False, **changes):
    return {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 11, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "rope_scaling": None, "attention_bias": False, "torch_dtype": "float32",
    } | changes  # fmt: skip


def normalised(x, weight, epsilon):
    return weight * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def turned(x, theta):
    """As transformers does it: x · cos + rotate_half(x) · sin, angles repeated over both halves; x (heads, positions, size)."""
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.cat([angles, angles], -1)
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def llama(state, tokens, theta=10_000.0, epsilon=1e-6):
    """Logits (positions, vocabulary) of one sample, with attention spelled out."""
    x = state["model.embed_tokens.weight"][tokens]
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
    for layer in range(LAYERS):
        w = {name.split(".", 3)[3]: value for name, value in state.items() if name.startswith(f"model.layers.{layer}.")}
        y = normalised(x, w["input_layernorm.weight"], epsilon)
        query, key, value = (
            (y @ w[f"self_attn.{kind}_proj.weight"].T).view(len(tokens), -1, SIZE).transpose(0, 1) for kind in "qkv"
        )
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (turned(key, theta), value))
        scores = (turned(query, theta) @ key.transpose(1, 2) / SIZE**0.5 + mask).softmax(-1)
        x = x + (scores @ value).transpose(0, 1).reshape(len(tokens), -1) @ w["self_attn.o_proj.weight"].T
        y = normalised(x, w["post_attention_layernorm.weight"], epsilon)
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + gated @ w["mlp.down_proj.weight"].T
    return normalised(x, state["model.norm.weight"], epsilon) @ state["lm_head.weight"].T


@pytest.mark.parametrize(
    ("tied", "changes"),
    [
        (False, {}),
        (True, {}),
        (False, {"rope_theta": 500_000.0}),
        (False, {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}),
        (False, {"rms_norm_eps": 1e-2}),
    ],
)
def test_converted_weights_give_the_reference_s_logits_and_convert_back(tied, changes):
    state, config = random_llama(tied=tied), config_of(tied=tied, **changes)
    model = ModelPlan(**convert.model_plan(config))
    decoder = Decoder(*whole(model))
    bundled = convert.to_bundled(state, config)
    decoder.load_state_dict(bundled)
    tokens = torch.randint(0, VOCABULARY, (11,), generator=torch.Generator().manual_seed(1))
    reference = llama(state, tokens, model.rope_theta, model.rms_norm_eps)
    with torch.no_grad():
        assert torch.allclose(decoder(tokens[None])[0], reference, atol=1e-4, rtol=1e-4)
    again = convert.to_transformers(bundled, config)
    assert again.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(value, state[name]) for name, value in again.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
        {"head_dim": 16},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"sliding_window": 4096},
        {"model_type": "qwen2"},
        {"quantization_config": {"bits": 4}},
        {"logits_scaling": 8.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_bundled_decoder_does_not_compute_is_refused_by_name(changes):
    with pytest.raises(convert.ConversionError, match=next(iter(changes))):
        convert.to_bundled(random_llama(tied=False), config_of(**changes))


def test_what_does_not_fit_is_named():
    state = random_llama(tied=False)
    with pytest.raises(convert.ConversionError, match=r"unknown: model\.layers\.2\."):
        convert.to_bundled(state, config_of(num_hidden_layers=LAYERS - 1))
    with pytest.raises(
        convert.ConversionError, match=r"query\.weight is \(32, 32\), by the config it is \(64, 64\)|embedding"
    ):
        convert.to_bundled(state, config_of(hidden_size=64))
    del state["lm_head.weight"]
    with pytest.raises(convert.ConversionError, match=r"missing: lm_head\.weight.*tie_word_embeddings"):
        convert.to_bundled(state, config_of())
