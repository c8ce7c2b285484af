"""What the planner promises: the cheapest plan that fits, or a refusal that says what to write instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.factories.facts import BOOK, job

from cost_aware_operator.costs.models.layout import Layout, Recompute, StateSharding
from cost_aware_operator.costs.models.machines import machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape, ModelParallelCostAnalyzer
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.tables.hardware import NumberFormat
from cost_aware_operator.planning.buckets import bucket_mib
from cost_aware_operator.planning.plan import Plan, PlanInput, Refusal, make_plan
from cost_aware_operator.planning.presets import PRESETS


def plan_of(**spec: Any) -> Plan | Refusal:
    return make_plan(PlanInput(job(**spec).spec, BOOK))


def test_the_fewest_nodes_that_divide_the_batch_are_chosen() -> None:
    plan = plan_of(nodes={"min": 1, "max": 8})
    assert isinstance(plan, Plan)
    assert (plan.nodes, plan.data) == (1, 1)


def test_a_node_count_that_does_not_divide_the_batch_is_skipped() -> None:
    plan = plan_of(nodes={"min": 3, "max": 4}, batch={"global": 32})
    assert isinstance(plan, Plan)
    assert plan.nodes == 4


def test_the_degrees_of_the_manifest_choose_the_node_count() -> None:
    plan = plan_of(nodes={"min": 1, "max": 8, "ranksPerNode": 2}, parallelism={"data": 8})
    assert isinstance(plan, Plan)
    assert (plan.nodes, plan.ranks) == (4, 8)


def test_degrees_that_no_node_count_gives_are_refused_with_the_nearest_ones() -> None:
    refusal = plan_of(nodes={"min": 2, "max": 2, "ranksPerNode": 4}, parallelism={"data": 6})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "DegreesMismatch"
    assert "write data: 8" in refusal.message


def test_a_batch_that_nothing_divides_is_refused_with_the_nearest_one() -> None:
    refusal = plan_of(batch={"global": 33, "micro": 4})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "BatchNotDivisible"
    assert "write 32" in refusal.message


def test_a_batch_that_no_replicas_divide_is_refused_where_the_model_may_not_be_split() -> None:
    refusal = plan_of(batch={"global": 7}, parallelism={"tensor": 1, "pipeline": 1})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "BatchNotDivisible"
    assert "write 8" in refusal.message
    split = plan_of(batch={"global": 7})
    assert isinstance(split, Plan)
    assert split.tensor * split.pipeline == 2


def test_cpu_ranks_share_out_states_only_where_memory_asks_for_it() -> None:
    model = {
        "preset": None,
        "layers": 8,
        "hidden": 1024,
        "heads": 8,
        "kvHeads": 8,
        "ffn": 4096,
        "sequenceLength": 64,
        "vocabulary": 256,
    }
    roomy, tight = (
        plan_of(
            model=model,
            template={"resources": {"limits": {"memory": memory}}},
            parallelism={"tensor": 1, "pipeline": 1},
        )
        for memory in ("8Gi", "2200Mi")
    )
    assert isinstance(roomy, Plan)
    assert isinstance(tight, Plan)
    assert roomy.sharding == "ddp"
    assert tight.sharding != "ddp"


def test_copies_of_states_take_memory_of_cpu_ranks_on_several_nodes() -> None:
    given: dict[str, Any] = {
        "model": {"preset": None, "layers": 8, "hidden": 1024, "heads": 8, "kvHeads": 8, "ffn": 4096}
        | {"sequenceLength": 64, "vocabulary": 256},
        "parallelism": {"data": 2, "tensor": 1, "pipeline": 1},
        "nodes": {"min": 2, "max": 2},
        "template": {"resources": {"limits": {"memory": "6Gi"}}},
    }
    alone, copied = plan_of(**given), plan_of(**given, checkpoint={"redundancy": "Replica"})
    assert isinstance(alone, Plan)
    # 107 million parameters in fp32 with both moments are 1.2 GiB, of which each node would hold four besides its own
    assert alone.sharding == "ddp"
    assert not isinstance(copied, Plan) or copied.sharding != "ddp"


def test_buckets_are_planned_where_replicas_sum_gradients_themselves() -> None:
    resources = {"resources": {"limits": {"memory": "8Gi"}}}
    summed, split = (
        plan_of(nodes={"min": 2, "max": 2}, parallelism=degrees, template=resources)
        for degrees in ({"data": 2, "tensor": 1, "pipeline": 1}, {"data": 1, "tensor": 2, "pipeline": 1})
    )
    assert isinstance(summed, Plan)
    assert isinstance(split, Plan)
    assert summed.sharding == "ddp"
    assert summed.bucket_mib is not None
    assert 1 <= summed.bucket_mib <= 256
    assert split.bucket_mib is None


def test_a_slow_start_of_collectives_asks_for_larger_buckets_and_a_slow_link_hides_behind_small_ones() -> None:
    layout = Layout(
        data=16, tensor=1, pipeline=1, context=1, sharding=StateSharding.DDP, interleave=1, recompute=Recompute.NONE,
        micro_batch=4, global_batch=256, precision=NumberFormat.BF16,
    )  # fmt: skip
    shape, node = PRESETS["llama-1b"], machine("p5.48xlarge")
    usual = bucket_mib(shape, node, layout, FITTED)
    slow = replace(FITTED, network_latency_seconds=100 * FITTED.network_latency_seconds)
    late = bucket_mib(shape, node, layout, slow)
    assert usual is not None
    assert late is not None
    assert late >= usual
    assert bucket_mib(shape, node, replace(layout, sharding=StateSharding.ZERO3), FITTED) is None


def test_an_unknown_instance_type_is_refused_with_similar_names() -> None:
    refusal = plan_of(nodes={"instanceTypes": ["p3.2xlrge"]})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "UnknownInstanceType"
    assert "spec.nodes.instanceTypes[0]" in refusal.message
    assert "p3.2xlarge" in refusal.message


def test_a_model_that_cannot_fit_is_refused_with_the_memory_it_needs() -> None:
    refusal = plan_of(model={"preset": "llama-8b"}, template={"resources": {"limits": {"memory": "2Gi"}}})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "MemoryExceeded"
    assert "spec.template.resources.limits.memory" in refusal.message
    assert "GiB" in refusal.message


def test_a_gpu_s_memory_bounds_the_plan() -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    small = plan_of(model={"preset": "llama-8b"}, nodes={"instanceTypes": ["p3.2xlarge"]}, template=gpu)
    assert isinstance(small, Refusal)
    assert "p3.2xlarge" in small.message
    assert isinstance(plan_of(nodes={"instanceTypes": ["p3.2xlarge"]}, template=gpu), Plan)


def test_an_absent_micro_batch_is_the_fastest_that_fits() -> None:
    roomy = plan_of(batch={"global": 96})
    tight = plan_of(batch={"global": 96}, template={"resources": {"limits": {"memory": "700Mi"}}})
    assert isinstance(roomy, Plan)
    assert isinstance(tight, Plan)
    assert tight.micro_batch < roomy.micro_batch


def test_a_quantity_that_is_none_is_refused_by_name() -> None:
    refusal = plan_of(template={"resources": {"limits": {"memory": "lots"}}})
    assert isinstance(refusal, Refusal)
    assert "spec.template.resources.limits.memory" in refusal.message


def test_presets_have_the_published_parameter_counts() -> None:
    # Llama ties nothing in our shape: the 1B preset's published 1.24 B counts its tied embedding once, ours twice
    assert PRESETS["llama-8b"].parameters == pytest.approx(8.03e9, rel=0.005)
    tied = PRESETS["llama-1b"].parameters - 128256 * 2048
    assert tied == pytest.approx(1.236e9, rel=0.005)


@given(st.integers(1, 64), st.integers(1, 64))
def test_memory_grows_with_the_micro_batch(a: int, b: int) -> None:
    shape = DecoderShape(2, 64, 4, 4, 128, 32, 256)
    analyzer = ModelParallelCostAnalyzer()
    small, large = sorted((a, b))
    assert analyzer.memory_gib(shape, small).total <= analyzer.memory_gib(shape, large).total


@given(
    st.integers(1, 512),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 16)),
    st.one_of(st.none(), st.integers(1, 32)),
)
def test_every_plan_keeps_the_global_batch_and_stays_within_the_nodes(
    batch: int, fewest: int, more: int, ranks: int, micro: int | None, data: int | None
) -> None:
    nodes = {"min": fewest, "max": fewest + more, "ranksPerNode": ranks}
    spec: dict[str, Any] = {"batch": {"global": batch} | ({"micro": micro} if micro else {}), "nodes": nodes}
    if data:
        spec["parallelism"] = {"data": data}
    answer = plan_of(**spec)
    if isinstance(answer, Refusal):
        assert answer.message
        assert "write" in answer.message.lower()
    else:
        assert batch % (answer.data * answer.micro_batch) == 0
        assert fewest <= answer.nodes <= fewest + more
        assert answer.data * answer.tensor * answer.pipeline == answer.ranks == answer.nodes * ranks
        assert data in (None, answer.data)
        assert micro in (None, answer.micro_batch)
