"""`catj predict`: answers in order, defaults said, errors that name the field; nothing gets slower on a faster machine."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cost_aware_operator.cli.main import main
from cost_aware_operator.costs.request.fields import LIMITS, MOST, RequestError
from cost_aware_operator.costs.request.questions import HARDWARE, LAYOUT, MODEL, answer

ENTRY: dict[str, Any] = {
    "model": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 128256,
        "sequence_length": 8192, "gated_mlp": True,
    },
    "hardware": {
        "gpu": "H100-SXM-80GB", "gpus_per_node": 8, "intra_node_gbytes_per_s": 450, "inter_node_gbit_per_s": 3200,
    },
    "layout": {
        "data": 4, "tensor": 2, "pipeline": 2, "context": 1, "sharding": "zero1", "interleave": 1, "recompute": "full",
        "micro_batch": 1, "global_batch": 64, "precision": "bf16",
    },
}  # fmt: skip
ANSWER = {
    "step_seconds",
    "memory_gib",
    "feasible",
    "reason",
    "tflops_per_gpu",
    "breakdown",
    "memory_breakdown",
    "assumed",
}


def entry(**changes: Any) -> dict[str, Any]:
    """The entry with fields changed by `section_field`."""
    found = copy.deepcopy(ENTRY)
    for name, value in changes.items():
        section, _, field = name.partition("_")
        found[section][field] = value
    return found


def one(**changes: Any) -> dict[str, Any]:
    return answer([entry(**changes)])[0]


def test_answers_keep_the_order_and_their_parts_add_up() -> None:
    found = answer([entry(layout_global_batch=b) for b in (256, 64, 128)])
    assert [round(a["step_seconds"] / found[1]["step_seconds"]) for a in found] == [4, 1, 2]
    for a in found:
        assert set(a) == ANSWER
        assert sum(a["breakdown"].values()) == pytest.approx(a["step_seconds"])
        assert sum(a["memory_breakdown"].values()) == pytest.approx(a["memory_gib"])
        assert a["assumed"] == {}


def test_what_is_absent_or_null_is_assumed_and_said() -> None:
    bare = {
        "model": {"layers": 32, "hidden": 4096},
        "hardware": {"gpu": "A100-SXM-80GB"},
        "layout": {"global_batch": 64},
    }
    nulls = copy.deepcopy(bare)
    for section, names in (("model", MODEL), ("hardware", HARDWARE), ("layout", LAYOUT)):
        nulls[section] = {**dict.fromkeys(names), **bare[section]}
    first, second = answer([bare, nulls])
    assert first == second
    assert first["assumed"]["layout.precision"] == "bf16"
    assert first["assumed"]["hardware.inter_node_gbit_per_s"] == 1600
    assert {"layout.recompute", "layout.micro_batch", "layout.interleave", "model.heads"} <= set(first["assumed"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_layrs": 3}, "model.layrs: unknown field; did you mean model.layers?"),
        ({"layout_zero": 3}, "layout.zero: unknown field; known are data"),
        ({"model_heads": 30}, "model.heads: 30 does not divide model.hidden (4096): write 32"),
        ({"model_kv_heads": 7}, "model.kv_heads: 7 does not divide model.heads (32): write 8"),
        ({"model_layers": 0}, "model.layers: must be from 1 to 100,000, got 0: write 1"),
        ({"model_layers": 2.5}, "model.layers: must be a whole number, got float 2.5: write 2"),
        ({"model_hidden": None}, "model.hidden: is missing"),
        ({"model_gated_mlp": 1}, "model.gated_mlp: must be true or false"),
        ({"layout_pipeline": 33}, "layout.pipeline: 33 is more than model.layers (32): write 32 or less"),
        ({"layout_tensor": 64}, "layout.tensor: 64 is more than model.heads (32): write 32 or less"),
        ({"layout_interleave": 20}, "layout.interleave: 20 chunks on 2 stages need 40 layers: write 16"),
        ({"layout_data": 128}, "layout.data: 128 ranks share a batch of 64: write 64"),
        (
            {"layout_sharding": "zero4"},
            "layout.sharding: must be one of ddp, zero1, zero2, zero3, got zero4: write zero",
        ),
        ({"layout_precision": ["bf16"]}, "layout.precision: must be one of fp32, fp16, bf16, fp8"),
        ({"hardware_gpu": "H100"}, "hardware.gpu: 'H100' is not in accelerators.csv (nearest: H100-SXM"),
        ({"hardware_inter_node_gbit_per_s": 0}, "hardware.inter_node_gbit_per_s: must be a number from"),
        ({"hardware_intra_node_gbytes_per_s": float("nan")}, "hardware.intra_node_gbytes_per_s: must be a number from"),
        (
            {"hardware_gpu": "V100-SXM2-16GB"},
            "V100-SXM2-16GB has no peak for bf16: write precision as one of fp16, fp32",
        ),
    ],
)
def test_a_bad_field_is_named_with_the_nearest_that_would_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        one(**changes)
    assert str(error.value).startswith(f"[0] {message}")


def test_every_bad_object_is_named_at_once() -> None:
    with pytest.raises(RequestError) as error:
        answer([entry(model_heads=30), ENTRY, entry(model_hidden=0), 7])
    assert [line[:3] for line in str(error.value).splitlines()] == ["[0]", "[2]", "[3]"]


def test_layouts_that_do_not_fit_are_predicted_and_said_to_be_infeasible() -> None:
    big = one(layout_micro_batch=16, layout_recompute="none")
    assert not big["feasible"]
    assert big["reason"].startswith("memory: ")
    assert one(hardware_memory_gib=1000, layout_micro_batch=16, layout_recompute="none")["feasible"]
    odd = one(layout_global_batch=66)
    assert odd["reason"] == "layout.global_batch: 66 is not divisible by data x micro_batch (4 x 1): write 64"


def test_an_unlisted_gpu_needs_its_peaks() -> None:
    own = {
        "hardware_gpu": "MI300X",
        "hardware_peak_tflops": 1307,
        "hardware_memory_gib": 192,
        "hardware_memory_gbytes_per_s": 5300,
    }
    assert one(**own)["feasible"]
    for missing in ("peak_tflops", "memory_gib", "memory_gbytes_per_s"):
        with pytest.raises(RequestError, match=rf"hardware\.{missing} is missing"):
            one(**{**own, f"hardware_{missing}": None})


def test_the_command_prints_json_and_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layouts.json"
    file.write_text(json.dumps([ENTRY, ENTRY]), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(file)])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == answer([ENTRY, ENTRY])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"), ("{}", "expected a list"), ("[NaN]", "NaN is no number"), ("[" * 100_000, "is not JSON"),
        ('[{"model": {"layers": 1, "layers": 2}}]', "layers: is given twice"), ('[{"modle": {}}]', "[0] modle: unknown field"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong_and_exits_2(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layouts.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(file)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"catj: {file}")
    assert message in err


POSSIBLE = st.fixed_dictionaries(
    {
        "layout_data": st.sampled_from([1, 2, 4, 8, 64]),
        "layout_tensor": st.sampled_from([1, 2, 8, 16]),
        "layout_pipeline": st.sampled_from([1, 2, 3, 5, 8]),
        "layout_context": st.sampled_from([1, 2, 8]),
        "layout_sharding": st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
        "layout_interleave": st.sampled_from([1, 2, 4]),
        "layout_recompute": st.sampled_from(["none", "selective", "full"]),
        "layout_micro_batch": st.sampled_from([1, 2, 8]),
        "layout_global_batch": st.sampled_from([64, 512, 1000]),
        "layout_precision": st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
        "model_gated_mlp": st.booleans(),
        "model_layers": st.sampled_from([32, 33, 62]),
        "model_sequence_length": st.sampled_from([2048, 32768]),
        "hardware_gpus_per_node": st.sampled_from([1, 4, 8]),
    }
)
MACHINE = {
    "intra_node_gbytes_per_s": 100,
    "inter_node_gbit_per_s": 100,
    "peak_tflops": 300,
    "memory_gbytes_per_s": 1000,
}


@pytest.mark.parametrize("faster", list(MACHINE))
@given(layout=POSSIBLE, factor=st.floats(1, 50))
@example(layout={"layout_data": 8, "layout_tensor": 2, "layout_pipeline": 3, "layout_context": 2}, factor=2.0)
@example(layout={"layout_data": 4, "layout_pipeline": 8, "layout_context": 8, "model_layers": 33}, factor=10.0)
def test_a_faster_part_never_makes_a_step_slower(faster: str, layout: dict[str, Any], factor: float) -> None:
    machine = {f"hardware_{k}": v for k, v in MACHINE.items()}
    slow = one(**layout, **machine)
    fast = one(**layout, **{**machine, f"hardware_{faster}": MACHINE[faster] * factor})
    assert fast["step_seconds"] <= slow["step_seconds"] * (1 + 1e-9)
    assert fast["memory_gib"] == slow["memory_gib"]
    for part in (slow["breakdown"], slow["memory_breakdown"]):
        assert all(math.isfinite(x) and x >= 0 for x in part.values())


def test_sends_between_chunks_hide_behind_the_next_chunk_and_those_between_stages_do_not() -> None:
    slow = {"hardware_inter_node_gbit_per_s": 200.0, "hardware_gpus_per_node": 1, "layout_tensor": 1}

    def sends(**layout: Any) -> float:
        return float(one(**slow, **layout)["breakdown"]["pipeline_communication"])

    assert sends(layout_interleave=1) > 0
    assert sends(layout_interleave=4) == 0
    # frameworks of the time of fp16 did not overlap them, so four chunks send four times as much
    assert sends(layout_interleave=4, layout_precision="fp16") == pytest.approx(
        4 * sends(layout_interleave=1, layout_precision="fp16")
    )


def test_memory_grows_with_the_micro_batch_without_jumps_where_leaner_kernels_make_room() -> None:
    found = [one(layout_micro_batch=b, layout_recompute="none", layout_global_batch=64) for b in (1, 2, 4, 8, 16)]
    memory = [f["memory_gib"] for f in found]
    assert memory == sorted(memory)
    assert [f["feasible"] for f in found] == sorted((f["feasible"] for f in found), reverse=True)
    roomy = one(layout_micro_batch=16, layout_recompute="none", hardware_memory_gib=1000)
    tight = one(layout_micro_batch=16, layout_recompute="none", hardware_memory_gib=0.9 * roomy["memory_gib"])
    assert tight["feasible"]
    assert tight["memory_gib"] == pytest.approx(0.985 * 0.9 * roomy["memory_gib"])


@given(layout=POSSIBLE, memory=st.floats(1, 200), more=st.floats(1, 10))
def test_what_fits_fits_in_more_memory(layout: dict[str, Any], memory: float, more: float) -> None:
    if one(**layout, hardware_memory_gib=memory)["feasible"]:
        assert one(**layout, hardware_memory_gib=memory * more)["feasible"]


POWERS = st.sampled_from([2**k for k in range(20)])
NUMBERS = st.one_of(
    st.none(), st.integers(-2, 200), st.integers(), st.floats(), st.booleans(), st.text(max_size=4), POWERS
)
SECTIONS = {"model": MODEL, "hardware": HARDWARE, "layout": LAYOUT}
SECTION = {name: st.dictionaries(st.sampled_from(fields), NUMBERS) for name, fields in SECTIONS.items()}


def answered(document: Any) -> dict[str, Any] | None:
    """The first answer, or None where the document was refused; anything else than a refusal is a failure."""
    try:
        return next(iter(answer(document)), None)
    except RequestError:
        return None


@given(changes=st.fixed_dictionaries(SECTION))
def test_anything_gets_a_finite_answer_or_an_error_that_names_it(changes: dict[str, dict[str, Any]]) -> None:
    fuzzed = {section: {**ENTRY[section], **changes[section]} for section in ENTRY}
    found = answered([fuzzed])
    if found is None:
        return
    for value in (found["step_seconds"], found["memory_gib"], found["tflops_per_gpu"]):
        assert math.isfinite(value)
        assert value > 0
    json.dumps(found, allow_nan=False)


EDGES = st.sampled_from([1, 2, 3, 7, 8, 64, 97, 1000, 2**16, *LIMITS.values(), MOST])
RATES = st.sampled_from([1e-6, 1.0, 1e9])
EXTREMES = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"layers": EDGES, "hidden": EDGES},
            optional=dict.fromkeys(MODEL[2:7], EDGES) | {"gated_mlp": st.booleans()},
        ),
        "hardware": st.fixed_dictionaries(
            {
                "gpu": st.sampled_from(["H100-SXM-80GB", "V100-SXM2-16GB", "CPU", "unheard of"]),
                **dict.fromkeys(HARDWARE[2:], RATES),
            },
            optional={"gpus_per_node": EDGES},
        ),
        "layout": st.fixed_dictionaries(
            {"global_batch": EDGES},
            optional=dict.fromkeys(("data", "tensor", "pipeline", "context", "interleave", "micro_batch"), EDGES)
            | {
                "sharding": st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
                "recompute": st.sampled_from(["none", "selective", "full"]),
                "precision": st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
            },
        ),
    }
)


@given(document=EXTREMES)
def test_extreme_figures_give_finite_parts_that_are_not_negative(document: dict[str, dict[str, Any]]) -> None:
    found = answered([document])
    if found is not None:
        assert 0 < found["step_seconds"] < math.inf
        assert 0 < found["memory_gib"] < math.inf
        for part in (found["breakdown"], found["memory_breakdown"]):
            assert all(math.isfinite(x) and x >= 0 for x in part.values()), part


HUGE = 10**5000
DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]
JUNK: dict[str, Any] = {
    "huge": HUGE, "negative": -HUGE, "list": [HUGE], "deep": DEEP, "long": "x" * 10**6, "object": {"a": HUGE},
    "infinite": math.inf, "bytes": b"x",
}  # fmt: skip


@pytest.mark.parametrize("junk", list(JUNK))
@pytest.mark.parametrize(
    "name", ["model_layers", "hardware_gpu", "hardware_peak_tflops", "layout_sharding", "layout_data"]
)
def test_junk_of_any_size_is_refused_by_name_in_a_short_line(name: str, junk: str) -> None:
    section, _, field = name.partition("_")
    with pytest.raises(RequestError) as error:
        answer([{**ENTRY, section: {**ENTRY[section], field: JUNK[junk]}}])
    assert str(error.value).startswith(f"[0] {section}.{field}: ")
    assert len(str(error.value)) < 400


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@given(document=JSON)
def test_any_json_is_answered_or_refused(document: Any) -> None:
    answered(document)
