"""Memory of the bundled trainer by formula. tests/layouts/test_large_plans.py holds it to steps of the trainer itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_aware_operator.costs.models.layout import Layout, Recompute, StateSharding
from cost_aware_operator.costs.models.memory import GIB
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.trainer_memory import layer_elements, trainer_memory
from cost_aware_operator.costs.tables.hardware import AcceleratorGeneration, NumberFormat

LLAMA_8B = DecoderShape(32, 4096, 32, 8, 14336, 4096, 128256)
LAYOUT = Layout(2, 2, 4, 1, StateSharding.DDP, 1, Recompute.NONE, 1, 16, NumberFormat.BF16)


def test_every_axis_takes_its_share_but_gathered_inputs_stay_whole() -> None:
    one = replace(LAYOUT, data=1, tensor=1, pipeline=1)
    for axis in ("tensor", "pipeline"):
        assert trainer_memory(LLAMA_8B, replace(one, **{axis: 4})).total < trainer_memory(LLAMA_8B, one).total
    assert layer_elements(LLAMA_8B, 8) > layer_elements(LLAMA_8B, 1) / 8 + LLAMA_8B.hidden


def test_in_a_pipeline_gradients_are_whole_until_its_last_micro_batch() -> None:
    for sharding in (StateSharding.ZERO1, StateSharding.ZERO2, StateSharding.ZERO3):
        layout = replace(LAYOUT, sharding=sharding)
        found = trainer_memory(LLAMA_8B, layout)
        held = LLAMA_8B.layers / 4 * LLAMA_8B.layer_parameters + LLAMA_8B.embedding_parameters
        assert found.gradients == pytest.approx(4 * held / 2 / GIB, rel=0.01)


def test_more_sharding_never_holds_more() -> None:
    alone = replace(LAYOUT, data=8, tensor=1, pipeline=1)
    totals = [trainer_memory(LLAMA_8B, replace(alone, sharding=sharding)).total for sharding in StateSharding]
    assert totals == sorted(totals, reverse=True)


def test_one_replica_shares_nothing_out() -> None:
    alone = replace(LAYOUT, data=1)
    assert trainer_memory(LLAMA_8B, replace(alone, sharding=StateSharding.ZERO3)) == trainer_memory(LLAMA_8B, alone)


def test_scores_are_held_only_where_no_kernel_is_fused() -> None:
    """fp32 on a GPU, where query heads share keys; selective recompute drops them again."""
    full = replace(LAYOUT, precision=NumberFormat.FP32)
    on_gpu = trainer_memory(LLAMA_8B, full, AcceleratorGeneration.VOLTA)
    assert on_gpu.activations > 2 * trainer_memory(LLAMA_8B, full, AcceleratorGeneration.CPU).activations
    selective = replace(full, recompute=Recompute.SELECTIVE)
    assert trainer_memory(LLAMA_8B, selective, AcceleratorGeneration.VOLTA).activations < on_gpu.activations / 2
    whole_heads = replace(LLAMA_8B, kv_heads=32)
    for generation in (AcceleratorGeneration.VOLTA, AcceleratorGeneration.CPU):
        assert trainer_memory(whole_heads, full, generation) == trainer_memory(whole_heads, full)
