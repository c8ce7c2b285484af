"""Questions to `predict` as JSON objects: checked by name, defaulted where they are silent, answered in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cost_aware_operator.costs.models.compute import Parameters
from cost_aware_operator.costs.models.layout import Layout, Practice, Recompute, StateSharding
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.predict import Machine, fits, memory_on, predict
from cost_aware_operator.costs.request.fields import Fields, RequestError, kind, known_only
from cost_aware_operator.costs.tables.hardware import (
    Accelerator,
    AcceleratorGeneration,
    HardwareError,
    NumberFormat,
    accelerator,
)

MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence_length", "gated_mlp")
HARDWARE = (
    "gpu", "gpus_per_node", "intra_node_gbytes_per_s", "inter_node_gbit_per_s",
    "peak_tflops", "memory_gib", "memory_gbytes_per_s",
)  # fmt: skip
LAYOUT = (
    "data", "tensor", "pipeline", "context", "sharding", "interleave", "recompute", "micro_batch", "global_batch", "precision",
)  # fmt: skip
GPT2_VOCABULARY = 50_304


@dataclass(frozen=True)
class Question:
    """One checked object of the request."""

    shape: DecoderShape
    """The model."""
    machine: Machine
    """The hardware."""
    layout: Layout
    """The layout, completed."""
    assumed: dict[str, Any]
    """Values assumed for what the object left open, by dotted name."""


def answer(document: Any) -> list[dict[str, Any]]:
    """A list of objects to a list of answers, in order.

    Raises:
        RequestError: one line for each object that cannot be answered.
    """
    if not isinstance(document, list):
        raise RequestError(f"expected a list of objects {{model, hardware, layout}}, got {kind(document)}")
    errors: list[str] = []
    answers: list[dict[str, Any]] = []
    for index, entry in enumerate(document):
        try:
            answers.append(_one(read(entry)))
        except (RequestError, HardwareError) as error:
            errors.append(f"[{index}] {error}")
    if errors:
        raise RequestError("\n".join(errors))
    return answers


def _one(question: Question) -> dict[str, Any]:
    found = predict(question.shape, question.machine, question.layout)
    figures = (found.step_seconds, found.memory_gib, found.tflops_per_gpu)
    if not all(math.isfinite(f) and f > 0 for f in figures):
        raise RequestError("model, hardware, layout: the figures are so far apart that no finite time results")
    return {
        "step_seconds": found.step_seconds,
        "memory_gib": found.memory_gib,
        "feasible": found.feasible,
        "reason": found.reason,
        "tflops_per_gpu": found.tflops_per_gpu,
        "breakdown": asdict(found.breakdown),
        "memory_breakdown": asdict(found.memory),
        "assumed": question.assumed,
    }


def read(entry: Any, parameters: Parameters = FITTED) -> Question:
    """One object, checked and completed; `parameters` choose what it leaves open.

    Raises:
        RequestError, HardwareError: naming the field.
    """
    if not isinstance(entry, Mapping):
        raise RequestError(f"expected an object {{model, hardware, layout}}, got {kind(entry)}")
    known_only(entry, "", ("model", "hardware", "layout"))
    assumed: dict[str, Any] = {}
    model = Fields(entry, "model", MODEL, assumed)
    hardware = Fields(entry, "hardware", HARDWARE, assumed)
    layout = Fields(entry, "layout", LAYOUT, assumed)
    shape = _shape(model)
    degrees = {name: layout.count(name, 1) for name in ("data", "tensor", "pipeline", "context")}
    _check_degrees(shape, degrees)
    machine = _machine(hardware)
    return Question(shape, machine, _layout(layout, shape, machine, degrees, parameters), assumed)


def _shape(model: Fields) -> DecoderShape:
    hidden, layers = model.required("hidden"), model.required("layers")
    heads = model.count("heads", _usual_heads(hidden))
    if hidden % heads:
        divisors = [d for d in range(1, min(hidden, 4096) + 1) if hidden % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - heads))
        model.fail("heads", f"{heads} does not divide model.hidden ({hidden})", nearest)
    kv_heads = model.count("kv_heads", heads)
    if heads % kv_heads:
        nearest = min((d for d in range(1, heads + 1) if heads % d == 0), key=lambda d: abs(d - kv_heads))
        model.fail("kv_heads", f"{kv_heads} does not divide model.heads ({heads})", nearest)
    ffn = model.given("ffn")
    # a feed-forward layer of 4 x hidden is GPT's; any other width is a gated one's, and so is grouped-query attention
    gated = model.flag("gated_mlp", (ffn is not None and ffn != 4 * hidden) or kv_heads != heads)
    return DecoderShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=model.count("ffn", math.ceil(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden),
        sequence_length=model.count("sequence_length", 2048),
        vocabulary=model.count("vocabulary", GPT2_VOCABULARY),
        gated_mlp=gated,
        tied_embeddings=not gated,
    )


def _usual_heads(hidden: int) -> int:
    """Heads of 128 channels, or of the next smaller width that divides."""
    return hidden // next(width for width in range(min(128, hidden), 0, -1) if hidden % width == 0)


def _check_degrees(shape: DecoderShape, degrees: Mapping[str, int]) -> None:
    limits = (
        ("pipeline", shape.layers, "layers"),
        ("tensor", shape.heads, "heads"),
        ("context", shape.sequence_length, "sequence_length"),
    )
    for name, limit, of in limits:
        if degrees[name] > limit:
            raise RequestError(
                f"layout.{name}: {degrees[name]} is more than model.{of} ({limit}): write {limit} or less"
            )


def _machine(hardware: Fields) -> Machine:
    name = hardware.text("gpu")
    own = {key: hardware.positive(key) for key in ("peak_tflops", "memory_gib", "memory_gbytes_per_s")}
    try:
        gpu = accelerator(name)
    except HardwareError as error:
        missing = [key for key, value in own.items() if value is None]
        if missing:
            raise RequestError(f"hardware.gpu: {error}; hardware.{missing[0]} is missing") from None
        gpu = _unlisted(name)
    if own["peak_tflops"] is not None:
        gpu = replace(gpu, peak_tflops=dict.fromkeys(NumberFormat, own["peak_tflops"]))
    gpu = replace(
        gpu,
        memory_gib=own["memory_gib"] or gpu.memory_gib,
        memory_gbytes_per_s=own["memory_gbytes_per_s"] or gpu.memory_gbytes_per_s,
    )
    return Machine(
        accelerator=gpu,
        gpus_per_node=hardware.count("gpus_per_node", gpu.gpus_per_node),
        link_gbytes_per_s=hardware.rate("intra_node_gbytes_per_s", gpu.link_gbytes_per_s),
        network_gbit_per_s=hardware.rate("inter_node_gbit_per_s", gpu.network_gbit_per_s),
    )


def _unlisted(name: str) -> Accelerator:
    return Accelerator(
        name, AcceleratorGeneration.UNKNOWN, {}, 1.0, 1.0, None, "PCIe4", 25.0, 8, 100.0, "", "given in the object"
    )


def _layout(
    fields: Fields, shape: DecoderShape, machine: Machine, degrees: Mapping[str, int], parameters: Parameters
) -> Layout:
    peaks = machine.accelerator.peak_tflops
    usual = next(p for p in (NumberFormat.BF16, NumberFormat.FP16, NumberFormat.FP32, NumberFormat.FP8) if p in peaks)
    precision = fields.choice("precision", NumberFormat, usual)
    machine.accelerator.peak(precision)
    layout = Layout(
        data=degrees["data"],
        tensor=degrees["tensor"],
        pipeline=degrees["pipeline"],
        context=degrees["context"],
        sharding=fields.choice("sharding", StateSharding, StateSharding.DDP),
        interleave=fields.count("interleave", 1, say=False),
        recompute=fields.choice("recompute", Recompute, None),
        micro_batch=fields.count("micro_batch", 1, say=False),
        global_batch=fields.required("global_batch"),
        precision=precision,
    )
    chunks = layout.interleave * layout.pipeline
    if chunks > shape.layers:
        most = shape.layers // layout.pipeline
        fields.fail("interleave", f"{layout.interleave} chunks on {layout.pipeline} stages need {chunks} layers", most)
    if layout.data > layout.global_batch:
        fields.fail("data", f"{layout.data} ranks share a batch of {layout.global_batch}", layout.global_batch)
    if fields.given("micro_batch") is not None and layout.micro_batch > layout.global_batch:
        fields.fail(
            "micro_batch", f"{layout.micro_batch} is more than the global batch", layout.global_batch // layout.data
        )
    return _completed(layout, fields, shape, machine, parameters)


def _completed(layout: Layout, fields: Fields, shape: DecoderShape, machine: Machine, parameters: Parameters) -> Layout:
    """What is left open is assumed to have been chosen well: the fastest that fits; pipelines by their frameworks' habits."""
    open_recompute, open_micro = fields.given("recompute") is None, fields.given("micro_batch") is None
    if layout.pipeline == 1 and open_micro:
        choices = tuple(Recompute) if open_recompute else (layout.recompute,)
        layout = _fastest(layout, shape, machine, choices, parameters)
    else:
        if open_recompute:
            layout = _lightest(layout, shape, machine)
        if open_micro:
            layout = _largest_micro_batch(layout, shape, machine)
    if open_recompute:
        fields.assume("recompute", layout.recompute)
    if open_micro:
        fields.assume("micro_batch", layout.micro_batch)
    if fields.given("interleave") is None:
        layout = replace(layout, interleave=_usual_interleave(layout, shape))
        fields.assume("interleave", layout.interleave)
    return layout


def _fastest(
    layout: Layout, shape: DecoderShape, machine: Machine, recompute: tuple[Recompute, ...], parameters: Parameters
) -> Layout:
    """The fastest micro-batch (a power of two that divides a rank's share) and recompute that fit; else the least memory."""
    share = round(layout.global_batch / layout.data)
    sizes = [2**i for i in range(10) if share % 2**i == 0]
    candidates = [replace(layout, micro_batch=size, recompute=r) for size in sizes for r in recompute]
    fitting = [c for c in candidates if _fits(c, shape, machine)]
    if not fitting:
        return replace(layout, micro_batch=1, recompute=recompute[-1])
    return min(fitting, key=lambda c: predict(shape, machine, c, parameters).step_seconds)


def _fits(layout: Layout, shape: DecoderShape, machine: Machine) -> bool:
    practice = Practice.of(layout, machine.accelerator.generation, gated_mlp=shape.gated_mlp)
    return fits(memory_on(shape, machine, layout, practice), machine)


def _lightest(layout: Layout, shape: DecoderShape, machine: Machine) -> Layout:
    """The least recompute that fits memory, full where none does."""
    candidates = [replace(layout, recompute=r) for r in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)]
    return next((c for c in candidates if _fits(c, shape, machine)), candidates[-1])


def _largest_micro_batch(layout: Layout, shape: DecoderShape, machine: Machine) -> Layout:
    """The largest power of two that divides and fits.

    Up to 8,192 tokens, and leaving a pipeline four micro-batches a stage. Under ZeRO-3, which gathers weights for every
    micro-batch, up to all that fits; its pipelines take as many micro-batches as stages, torch's default.
    """
    share = layout.global_batch // layout.data
    sharded = layout.sharding is StateSharding.ZERO3
    best, size = layout, 2
    while share % size == 0 and (sharded or size * shape.sequence_length / layout.context <= 8192):
        candidate = replace(layout, micro_batch=size)
        if layout.pipeline > 1 and candidate.micro_batches < (1 if sharded else 4) * layout.pipeline:
            break
        if not _fits(candidate, shape, machine):
            break
        best, size = candidate, size * 2
    return best


def _usual_interleave(layout: Layout, shape: DecoderShape) -> int:
    """The fewest chunks a stage that bring the bubble under a quarter of the work, as many as layers allow; 1 otherwise."""
    if layout.pipeline == 1 or layout.sharding is StateSharding.ZERO3:
        return 1
    most = max(1, shape.layers // layout.pipeline)
    wanted = math.ceil(4 * (layout.pipeline - 1) / layout.micro_batches)
    return min(most, wanted) if 4 * (layout.pipeline - 1) > 1.5 * layout.micro_batches else 1
