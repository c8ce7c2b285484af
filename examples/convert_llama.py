"""Weights of a Llama-style decoder, as transformers names them, to and from the bundled decoder's names.

python examples/convert_llama.py to-bundled model.pt bundled.pt --layers 16 [--tied]

Both files hold one state dict of `torch.save`. Matrices are not changed: both models turn the two halves of a head (not
even and odd elements) by the positions' angles, so that queries and keys need no permutation. The bundled decoder fixes
what a checkpoint's config may set otherwise: rope_theta 10000 without scaling, rms_norm_eps 1e-6, no biases.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

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


def names(layers: int, *, tied: bool) -> dict[str, str]:
    """The bundled name of each of transformers' names, for a model of so many layers."""
    pairs = {theirs: ours for theirs, ours in OUTSIDE.items() if not (tied and ours == "head.weight")}
    for layer in range(layers):
        pairs |= {f"model.layers.{layer}.{theirs}": f"layers.{layer}.{ours}" for theirs, ours in OF_A_LAYER.items()}
    return pairs


def to_bundled(state: Mapping[str, Tensor], layers: int, *, tied: bool = False) -> dict[str, Tensor]:
    """Transformers' state dict under the bundled decoder's names, in float32.

    With tied embeddings `lm_head.weight` may be there, as a second name of the embedding, and is left out.

    Raises:
        ConversionError: tensors are missing or are none of such a decoder's.
    """
    kept = {
        name: value
        for name, value in state.items()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    return {ours: value.float() for ours, value in _renamed(kept, names(layers, tied=tied)).items()}


def to_transformers(state: Mapping[str, Tensor], layers: int, *, tied: bool = False) -> dict[str, Tensor]:
    """The bundled decoder's state dict under transformers' names; raises as `to_bundled`."""
    return _renamed(state, {ours: theirs for theirs, ours in names(layers, tied=tied).items()})


def _renamed(state: Mapping[str, Tensor], pairs: Mapping[str, str]) -> dict[str, Tensor]:
    missing, unknown = sorted(pairs.keys() - state.keys()), sorted(state.keys() - pairs.keys())
    if missing or unknown:
        raise ConversionError(
            f"missing: {', '.join(missing[:5]) or 'none'}; unknown: {', '.join(unknown[:5]) or 'none'}; "
            "give the model's number of layers, and --tied if it has no lm_head.weight of its own"
        )
    return {new: state[old] for old, new in pairs.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=["to-bundled", "to-transformers"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding matrix")
    options = parser.parse_args()
    convert = to_bundled if options.direction == "to-bundled" else to_transformers
    state = torch.load(options.source, map_location="cpu", weights_only=True)
    torch.save(convert(state, options.layers, tied=options.tied), options.target)


if __name__ == "__main__":
    main()
