"""Weights of a Llama-style decoder, as transformers names them, to and from the bundled decoder's names.

python examples/convert_llama.py to-bundled model.pt bundled.pt --config config.json

Both files hold one state dict of `torch.save`; `config.json` is transformers' own, beside the weights. Matrices are not changed:
both models turn the two halves of a head (not even and odd elements) by the positions' angles, so that queries and keys need no
permutation. The model's fields of a run plan are printed. What the bundled decoder does not compute is refused by name: scaled
rotary positions, heads that are not hidden / heads wide, biases, other activations, sliding windows, quantised weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
OF_A_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.query.weight",
    "self_attn.k_proj.weight": "attention.key.weight",
    "self_attn.v_proj.weight": "attention.value.weight",
    "self_attn.o_proj.weight": "attention.output.weight",
    "post_attention_layernorm.weight": "feed_forward_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.gate.weight",
    "mlp.up_proj.weight": "feed_forward.up.weight",
    "mlp.down_proj.weight": "feed_forward.down.weight",
}


class ConversionError(ValueError):
    """A state dict that is not that of such a decoder; the text names the tensors."""


FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1.0, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attention_dropout": (0.0, None),
    "quantization_config": (None,),
}
"""Fields of a config that decide what is computed, and the values that the bundled decoder computes."""
READ = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_parameters", "rms_norm_eps", "head_dim",
}  # fmt: skip
WITHOUT_EFFECT = {
    "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "torch_dtype",
    "dtype", "transformers_version", "use_cache", "_name_or_path", "_attn_implementation",
}  # fmt: skip


def model_plan(config: Mapping[str, Any], sequence_length: int | None = None) -> dict[str, Any]:
    """The `model` of a run plan for a config of transformers.

    Raises:
        ConversionError: the config asks for something that the bundled decoder does not compute, or lacks a field.
    """
    rope = dict(config.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta", 10_000.0))
    problems = [
        f"{name} is {config[name]!r}, supported is {allowed[0]!r}"
        for name, allowed in FIXED.items()
        if name in config and config[name] not in allowed
    ]
    if rope.pop("rope_type", "default") != "default" or rope:
        problems.append(f"rope_parameters is {config['rope_parameters']!r}, supported is rope_type 'default'")
    problems += [f"{name} is not known here" for name in sorted(config.keys() - FIXED.keys() - READ - WITHOUT_EFFECT)]
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        if size * heads != hidden:
            problems.append(f"head_dim is {size}, supported is hidden_size / num_attention_heads = {hidden / heads:g}")
        if problems:
            raise ConversionError(f"config: {'; '.join(problems)}")
        return {
            "layers": config["num_hidden_layers"],
            "hidden": hidden,
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "ffn": config["intermediate_size"],
            "sequence_length": sequence_length or config["max_position_embeddings"],
            "vocabulary": config["vocab_size"],
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "rope_theta": float(theta),
            "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        }
    except KeyError as error:
        raise ConversionError(f"config: {error.args[0]} is missing") from None


def names(layers: int, *, tied: bool) -> dict[str, str]:
    """The bundled name of each of transformers' names, for a model of so many layers."""
    pairs = {theirs: ours for theirs, ours in OUTSIDE.items() if not (tied and ours == "head.weight")}
    for layer in range(layers):
        pairs |= {f"model.layers.{layer}.{theirs}": f"layers.{layer}.{ours}" for theirs, ours in OF_A_LAYER.items()}
    return pairs


def to_bundled(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Transformers' state dict under the bundled decoder's names, in float32.

    With tied embeddings `lm_head.weight` may be there, as a second name of the embedding, and is left out.

    Raises:
        ConversionError: the config is not supported, or tensors are missing, of another shape, or none of such a decoder's.
    """
    model = model_plan(config, 1)
    tied = model["tied_embeddings"]
    kept = {
        name: value
        for name, value in state.items()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    renamed = _renamed(kept, names(model["layers"], tied=tied))
    _check_shapes(renamed, model)
    return {ours: value.float() for ours, value in renamed.items()}


def to_transformers(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The bundled decoder's state dict under transformers' names; raises as `to_bundled`."""
    model = model_plan(config, 1)
    _check_shapes(state, model)
    pairs = names(model["layers"], tied=model["tied_embeddings"])
    return _renamed(state, {ours: theirs for theirs, ours in pairs.items()})


def _check_shapes(state: Mapping[str, Tensor], model: Mapping[str, Any]) -> None:
    hidden, keys = model["hidden"], model["hidden"] // model["heads"] * model["kv_heads"]
    rows, columns = model["vocabulary"], model["ffn"]
    shapes = {
        "embedding": (rows, hidden), "head": (rows, hidden), "norm": (hidden,), "query": (hidden, hidden), "key": (keys, hidden),
        "value": (keys, hidden), "output": (hidden, hidden), "gate": (columns, hidden), "up": (columns, hidden),
        "down": (hidden, columns), "attention_norm": (hidden,), "feed_forward_norm": (hidden,),
    }  # fmt: skip
    for name, value in state.items():
        expected = shapes.get(name.split(".")[-2])
        if expected is not None and tuple(value.shape) != expected:
            raise ConversionError(f"{name} is {tuple(value.shape)}, by the config it is {expected}")


def _renamed(state: Mapping[str, Tensor], pairs: Mapping[str, str]) -> dict[str, Tensor]:
    missing, unknown = sorted(pairs.keys() - state.keys()), sorted(state.keys() - pairs.keys())
    if missing or unknown:
        raise ConversionError(
            f"missing: {', '.join(missing[:5]) or 'none'}; unknown: {', '.join(unknown[:5]) or 'none'}; "
            "the config's num_hidden_layers and tie_word_embeddings must be those of the weights"
        )
    return {new: state[old] for old, new in pairs.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=["to-bundled", "to-transformers"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="config.json of transformers")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    convert = to_bundled if options.direction == "to-bundled" else to_transformers
    state = torch.load(options.source, map_location="cpu", weights_only=True)
    try:
        torch.save(convert(state, config), options.target)
    except ConversionError as error:
        raise SystemExit(f"not converted: {error}") from None
    print(json.dumps({"model": model_plan(config)}))


if __name__ == "__main__":
    main()
