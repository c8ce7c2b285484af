"""Plans of 8 and 70 billion parameters, sharded over many ranks: what one rank holds and sends, without the memory that they need."""

import dataclasses

import pytest

from cost_aware_trainer.contract import (
    BatchPlan,
    CheckpointPlan,
    DegreesPlan,
    ModelPlan,
    Precision,
    Recompute,
    RunPlan,
    Sharding,
    StrategyPlan,
)
from cost_aware_trainer.models.decoder import parameter_shapes

GIB = 2**30
LLAMA_8B = ModelPlan(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, sequence_length=4096, vocabulary=128256, rope_theta=5e5
)
LLAMA_70B = dataclasses.replace(LLAMA_8B, layers=80, hidden=8192, heads=64, ffn=28672)
CASES = [
    pytest.param(LLAMA_8B, 8, Sharding.ZERO3, id="8B-zero3"),
    pytest.param(LLAMA_8B, 16, Sharding.ZERO1, id="8B-zero1"),
    pytest.param(LLAMA_70B, 64, Sharding.ZERO3, id="70B-zero3", marks=pytest.mark.exhaustive),
    pytest.param(LLAMA_70B, 64, Sharding.ZERO2, id="70B-zero2", marks=pytest.mark.exhaustive),
]


def elements_of(model):
    total = 0
    for shape in parameter_shapes(model).values():
        count = 1
        for length in shape:
            count *= length
        total += count
    return total


@pytest.mark.parametrize(("model", "data", "sharding"), CASES)
def test_a_rank_holds_its_share_and_sends_what_is_counted(pool, model, data, sharding):
    plan = RunPlan(
        steps=1,
        model=model,
        batch=BatchPlan(global_samples=2 * data, micro_samples=1),
        checkpoint=CheckpointPlan(folder="/checkpoints/large"),
        data_folder="/data",
        degrees=DegreesPlan(data=data),
        strategy=StrategyPlan(precision=Precision.BF16, sharding=sharding, recompute=Recompute.FULL),
        evaluate_every_steps=1,
        evaluation_samples=1,
        seed=0,
    )
    (seen,) = pool.run(1, "fake_step", plan=plan.to_json(), timeout=400)
    share = elements_of(model) / data
    # weights and two moments in fp32; after the step the gradient too
    assert seen["state_bytes"] == pytest.approx(3 * 4 * share, rel=0.01)
    assert seen["after_bytes"] == pytest.approx(4 * 4 * share, rel=0.01), "gathered weights are freed again"
    sent = {"_allgather_base_": 0, "_reduce_scatter_base_": 0}
    for name, sizes in seen["collectives"]:
        if name in sent:
            sent[name] += (data - 1) * min(sizes)
    assert seen["counted_bytes"] == pytest.approx(sum(sent.values()), rel=0.01)
    names = [name for name, _ in seen["collectives"] if name in sent]
    assert names[0] == "_allgather_base_"
    assert names[-1] == "_reduce_scatter_base_"
