"""Model FLOPs, against the closed form for a decoder."""

import dataclasses

import pytest

from cost_aware_trainer.contract import ModelPlan
from cost_aware_trainer.models.decoder import model_flops_per_token

MODEL = ModelPlan(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, sequence_length=32, vocabulary=300)


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_count_every_product_once_whether_the_head_is_tied_or_not(tied):
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    products = 3 * per_layer + 300 * 64
    model = dataclasses.replace(MODEL, tied_embeddings=tied)
    assert model_flops_per_token(model) == 6 * products + 12 * 3 * 64 * 32
