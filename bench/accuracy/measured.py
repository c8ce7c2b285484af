"""The measured configurations as questions to the predictor, and the scores of its answers."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cost_aware_operator.costs.models.calibrate import MeasuredStep
from cost_aware_operator.costs.models.compute import Parameters, model_flops
from cost_aware_operator.costs.request.questions import Question, read

DATA = Path(__file__).with_name("measured_configs.csv")
REPOSITORY = re.compile(r"^(Megatron-Bridge|huggingface nanotron|torchtitan|llm-foundry)")
GPUS = (
    ("V100-32GB", "V100-SXM2-32GB"), ("A100-40GB", "A100-SXM-40GB"), ("A100-80GB", "A100-SXM-80GB"),
    ("H100-96GB", "H100-SXM-96GB"), ("H100-80GB", "H100-SXM-80GB"), ("H200", "H200-SXM-141GB"),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One row."""

    source: str
    name: str
    question: Question
    document: dict[str, Any]
    step_seconds: float
    memory_gib: float | None
    gpu: str
    page: str = ""
    """What was published, as the row names it."""
    precision: str = ""
    """Number type and kind of kernels, in the row's words."""

    @property
    def group(self) -> tuple[Any, ...]:
        """Layouts of one model, accelerators, batch and source: what a planner chooses among."""
        layout, shape = self.question.layout, self.question.shape
        return (self.source, shape, self.gpu.split("(")[0], layout.ranks, layout.global_batch, layout.precision)

    def observation(self, weight: float = 1.0) -> MeasuredStep:
        q = self.question
        return MeasuredStep(q.shape, q.machine, q.layout, self.step_seconds, weight)


@cache
def rows() -> tuple[Measured, ...]:
    """Every row whose quality is not noisy or suspect."""
    with DATA.open(encoding="utf-8") as file:
        return tuple(_row(row) for row in csv.DictReader(file) if row["quality"] not in ("noisy", "suspect"))


def _row(row: dict[str, str]) -> Measured:
    document = _document(row)
    question = read(document, Parameters())  # what rows leave open is not chosen by parameters that saw them
    seconds = row["iteration_seconds"] or row["iteration_seconds_derived"]
    step = float(seconds) if seconds else _from_tflops(row, question)
    # publications are one source each; many pages of one repository are one source together
    found = REPOSITORY.match(row["source"])
    source = found.group(1) if found else re.split(r"[;(,§]", row["source"])[0].strip()
    memory = float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None
    return Measured(source, row["model"], question, document, step, memory, row["gpu"], row["source"], row["precision"])


def _from_tflops(row: dict[str, str], question: Question) -> float:
    flops = model_flops(question.shape, question.layout.global_batch)
    if row["recompute"] == "full":
        flops *= 4 / 3
    return flops / float(row["achieved_tflops_per_gpu"]) / question.layout.ranks / 1e12


def _document(row: dict[str, str]) -> dict[str, Any]:
    def number(column: str) -> int | None:
        return int(row[column]) if row[column] else None

    gpu = next(name for text, name in GPUS if row["gpu"].startswith(text))
    ffn = number("ffn")
    network = 400.0 if "Jean Zay" in row["gpu"] else 800.0 if "V100" in gpu else None
    recompute = row["recompute"] if row["recompute"] != "unknown" else ""
    return {
        "model": {
            "layers": number("layers"), "hidden": number("hidden"), "heads": number("heads"), "kv_heads": number("kv_heads"),
            "ffn": ffn or 4 * int(row["hidden"]), "vocabulary": number("vocab"), "sequence_length": number("seq"),
            "gated_mlp": ffn is not None,
        },
        "hardware": {
            "gpu": gpu, "gpus_per_node": number("gpus_per_node"),
            "intra_node_gbytes_per_s": None, "inter_node_gbit_per_s": network,
        },
        "layout": {
            "data": number("dp"), "tensor": number("tp"), "pipeline": number("pp"), "context": number("cp") or 1,
            "sharding": _sharding(row["dp_sharding"]), "interleave": _interleave(row),
            "recompute": recompute or None, "micro_batch": number("micro_batch"), "global_batch": number("global_batch"),
            "precision": _precision(row["precision"]),
        },
    }  # fmt: skip


def _interleave(row: dict[str, str]) -> int | None:
    if row["interleave"]:
        return int(row["interleave"])
    # the notes name the schedule where the column is silent; torch's looped schedules have two stages a rank
    return 2 if "Interleaved1F1B" in row["notes"] else None


def _precision(text: str) -> str:
    if text.startswith(("float8", "fp8")):
        return "fp8"
    return "fp16" if text == "fp16" else "bf16"


def _sharding(text: str) -> str:
    if "ZeRO-2" in text:
        return "zero2"
    if text.startswith("fsdp"):
        return "zero3"
    return text[:5] if text.startswith("zero") else "ddp"


def log_error(predicted: float, measured: float) -> float:
    return math.log(predicted / measured)
