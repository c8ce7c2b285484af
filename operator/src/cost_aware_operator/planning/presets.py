"""Model shapes by name."""

from __future__ import annotations

from cost_aware_operator.api.spec import ModelPreset, ModelSpec
from cost_aware_operator.costs.models.model_parallel import DecoderShape

PRESETS = {
    ModelPreset.BYTE_GPT: DecoderShape(
        layers=4, hidden=128, heads=4, kv_heads=2, ffn=344, sequence_length=128, vocabulary=256
    ),
    # Llama 3.2 1B and Llama 3.1 8B as published by Meta; sequence lengths of their usual pre-training
    ModelPreset.LLAMA_1B: DecoderShape(
        layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, sequence_length=8192, vocabulary=128256
    ),
    ModelPreset.LLAMA_8B: DecoderShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, sequence_length=8192, vocabulary=128256
    ),
}


def shape_of(model: ModelSpec) -> DecoderShape:
    """The shape that a manifest's model names or spells out; the schema guarantees one of the two."""
    if model.preset is not None:
        return PRESETS[model.preset]
    return DecoderShape(
        layers=model.layers or 0,
        hidden=model.hidden or 0,
        heads=model.heads or 0,
        kv_heads=model.kv_heads or model.heads or 0,
        ffn=model.ffn or 0,
        sequence_length=model.sequence_length or 0,
        vocabulary=model.vocabulary or 0,
        tied_embeddings=model.tied_embeddings,
    )
