"""The arithmetic of one plan, line by line: what, how much, how it was worked out, and where the formula or figure is from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_aware_operator.costs.models.compute import Computer, model_flops
from cost_aware_operator.costs.models.layout import Practice, Recompute, StateSharding
from cost_aware_operator.costs.models.model_parallel import ModelParallelCostAnalyzer
from cost_aware_operator.costs.models.predict import FORWARD, usable_gib
from cost_aware_operator.costs.search.combinations import Offer
from cost_aware_operator.costs.search.three_d import RECOVERY_SECONDS, Ranking, checkpointing
from cost_aware_operator.costs.tables.hardware import NumberFormat
from cost_aware_operator.planning.report import RankedPlan

FIT = "fitted, docs/design/20261121-cost-models.md"


@dataclass(frozen=True)
class Line:
    """One step of the arithmetic."""

    what: str
    """Quantity."""
    value: str
    """Its value with the unit."""
    how: str
    """How the value was worked out."""
    source: str = ""
    """Page that the formula or figure is from; empty where it needs none."""


@dataclass(frozen=True)
class Section:
    """Lines that belong together."""

    title: str
    """Heading."""
    lines: tuple[Line, ...]
    """Lines in order."""


def arithmetic(ranking: Ranking, plan: RankedPlan) -> tuple[Section, ...]:
    """Everything that a plan's seconds, GiB and dollars came from."""
    teller = _Teller(ranking, plan)
    return (
        Section("The model", tuple(teller.model())),
        Section("The hardware", tuple(teller.hardware())),
        Section("One layer, one micro-batch, on one rank", tuple(teller.layer())),
        Section("One step", tuple(teller.step())),
        Section("Memory of the fullest rank", tuple(teller.memory())),
        Section("The run in dollars", tuple(teller.dollars())),
    )


class _Teller:
    def __init__(self, ranking: Ranking, plan: RankedPlan) -> None:
        self.plan, self.layout, self.work = plan, plan.layout, ranking.work
        self.shape = ranking.work.shape
        self.offer: Offer = ranking.offer(plan.row)
        self.machine, self.parameters = self.offer.machine, ranking.parameters
        gpu = self.machine.accelerator
        self.practice = Practice.of(self.layout, gpu.generation, gated_mlp=self.shape.gated_mlp)
        self.computer = Computer(gpu, self.layout.precision, self.practice, self.parameters)
        self.seconds = self.computer.layer(self.shape, self.layout)
        self.tokens = self.layout.micro_batch * self.shape.sequence_length

    def model(self) -> Iterator[Line]:
        s = self.shape
        width = s.hidden // s.heads
        kind = "3 h f (gated)" if s.gated_mlp else "2 h f"
        yield Line(
            "weights of a layer",
            f"{s.layer_parameters:,}",
            f"2 h^2 + 2 h k + {kind} + 2 h, with h = {s.hidden}, f = {s.ffn}, k = {s.kv_heads} kv heads x {width}",
            "counted",
        )
        tables = "1 table (tied)" if s.tied_embeddings else "2 tables"
        yield Line(
            "weights of the model",
            f"{s.parameters:,}",
            f"{s.layers} layers x {s.layer_parameters:,} + {tables} x {s.vocabulary:,} x {s.hidden} + {s.hidden}",
            "counted",
        )
        yield Line(
            "model FLOPs of a step",
            f"{model_flops(s, self.layout.global_batch):.4g}",
            f"(6 N + 12 L h s) tokens, {self.layout.global_batch} samples of {s.sequence_length} tokens",
            "Kaplan et al. 2020; Narayanan et al. 2021",
        )

    def hardware(self) -> Iterator[Line]:
        gpu, p, m = self.machine.accelerator, self.parameters, self.machine
        peak = gpu.peak(self.layout.precision)
        fractions = p.of(gpu.generation)
        share = fractions.matmul * (p.fp8 if self.layout.precision is NumberFormat.FP8 else 1.0)
        yield Line(
            f"{gpu.name}, {self.layout.precision}", f"{peak:g} TFLOP/s", "dense peak", f"{gpu.source}, {gpu.as_of}"
        )
        yield Line("large products reach", f"{peak * share:.4g} TFLOP/s", f"{share:.3g} x {peak:g}", FIT)
        yield Line(
            "memory-bound kernels reach",
            f"{gpu.memory_gbytes_per_s * p.memory:,.0f} GB/s",
            f"{p.memory:.3g} x {gpu.memory_gbytes_per_s:g}",
            FIT,
        )
        yield Line(
            "link inside the node",
            f"{m.link_gbytes_per_s * p.node_link:,.0f} GB/s a rank",
            f"{p.node_link:.3g} x {m.link_gbytes_per_s:g}; {m.gpus_per_node} ranks a node",
            FIT,
        )
        yield Line(
            "network between nodes",
            f"{m.network_gbit_per_s * p.network:,.0f} Gbit/s a node",
            f"{p.network:.3g} x {m.network_gbit_per_s:g}",
            FIT,
        )

    def layer(self) -> Iterator[Line]:
        s, layout, c, t = self.shape, self.layout, self.computer, self.layout.tensor
        kv = s.kv_heads * (s.hidden // s.heads)
        inner = (2 if s.gated_mlp else 1) * s.ffn
        yield Line("tokens", f"{self.tokens:,}", f"{layout.micro_batch} samples x {s.sequence_length}")
        for name, k, n in (
            ("queries, keys and values", s.hidden, (s.hidden + 2 * kv) / t),
            ("attention's output", s.hidden / t, s.hidden),
            ("into the feed-forward layer", s.hidden, inner / t),
            ("out of it", s.ffn / t, s.hidden),
        ):
            yield Line(
                name,
                _time(c.matmul(self.tokens, k, n)),
                f"{self.tokens:,} x {k:,.0f} x {n:,.0f}: 2 m k n / (e P) + bytes / (b M)",
                "roofline",
            )
        kernels = "half of the scores, fused" if self.practice.flash_attention else "all scores, through memory"
        yield Line("attention", _time(self.seconds.attention_forward), kernels, "Dao et al. 2022")
        yield Line("forward", _time(self.seconds.forward), "products + attention + memory-bound kernels + launch")
        yield Line("backward", _time(self.seconds.backward), "2 x products, 2.5 x attention, 2 x memory-bound kernels")
        if layout.recompute is not Recompute.NONE:
            yield Line(
                "computed again", _time(self.seconds.again), f"{layout.recompute} recompute", "Korthikanti et al. 2022"
            )

    def step(self) -> Iterator[Line]:
        b, layout, plan = self.plan.prediction.breakdown, self.layout, self.plan
        m, stages = layout.micro_batches, plan.stage_layers
        yield Line(
            "micro-batches of a replica", f"{m}", f"{layout.global_batch} / ({layout.data} x {layout.micro_batch})"
        )
        for axis, level in plan.placement.items():
            yield Line(
                f"{axis} ranks meet", level, f"{getattr(layout, axis)} of them, {self.machine.gpus_per_node} a node"
            )
        if layout.pipeline > 1:
            split = f"even, {stages[0]} each" if len(set(stages)) == 1 else ", ".join(map(str, stages))
            yield Line(
                "layers of the stages", split, f"{self.shape.layers} over {layout.pipeline}, the head weighed in"
            )
        yield Line(
            "computing",
            _time(b.compute),
            f"{m} micro-batches x the busiest stage's {max(stages)} layers, head on the last",
        )
        if layout.tensor > 1:
            count = 6 if layout.recompute is Recompute.FULL else 4
            yield Line(
                "tensor-parallel communication",
                _time(b.tensor_communication),
                f"{count} all-reduces of {_size(self._tensor_bytes())} a layer and micro-batch over {layout.tensor}",
                "Shoeybi et al. 2019",
            )
        if layout.pipeline > 1:
            yield Line(
                "pipeline bubble",
                _time(b.bubble),
                f"{plan.schedule}: {layout.pipeline - 1} stages wait; forward is {FORWARD[layout.recompute]:.2f} of a pass",
                "Narayanan et al. 2021",
            )
            yield Line("sends between stages", _time(b.pipeline_communication), "not hidden behind computing")
        if layout.data > 1:
            what = {
                StateSharding.DDP: "all-reduce of gradients",
                StateSharding.ZERO1: "reduce-scatter of gradients, all-gather of weights",
                StateSharding.ZERO2: "reduce-scatter of gradients, all-gather of weights",
                StateSharding.ZERO3: "all-gather of weights twice and reduce-scatter of gradients, layer by layer",
            }[layout.sharding]
            yield Line(
                "gradients and weights",
                _time(b.data_communication),
                f"{what} over {layout.data}; what stays exposed",
                FIT,
            )
        yield Line("optimizer", _time(b.optimizer), "34 bytes a weight through memory", "AdamW, counted")
        yield Line("stragglers and fixed cost", _time(b.other), f"{plan.nodes} nodes", FIT)
        yield Line("step", _time(b.total), "the sum", f"{plan.prediction.tflops_per_gpu:,.1f} model TFLOP/s a rank")

    def _tensor_bytes(self) -> float:
        return float(ModelParallelCostAnalyzer().tensor_bytes(self.shape, self.layout, self.practice)[0])

    def memory(self) -> Iterator[Line]:
        m, layout = self.plan.prediction.memory, self.layout
        shared = {
            StateSharding.DDP: "nothing",
            StateSharding.ZERO1: "moments",
            StateSharding.ZERO2: "moments and gradients",
        }
        over = shared.get(layout.sharding, "moments, gradients and weights")
        states = f"{layout.sharding}: {over} shared by {layout.data} ranks"
        for name, how, source in (
            ("weights", states, "Rajbhandari et al. 2020"),
            ("gradients", states, "Rajbhandari et al. 2020"),
            ("optimizer", states, "Rajbhandari et al. 2020"),
            (
                "activations",
                f"{layout.recompute} recompute, live micro-batches of the stage",
                "Korthikanti et al. 2022",
            ),
            ("logits", f"{self.tokens:,} tokens x {self.shape.vocabulary:,} / {layout.tensor}", "counted"),
            ("framework", "context, communicators, workspaces", "measured"),
        ):
            yield Line(name, f"{getattr(m, name):.3f} GiB", how, source)
        yield Line("needed", f"{m.total:.3f} GiB", f"of {usable_gib(self.machine):,.1f} usable", "the sum")

    def dollars(self) -> Iterator[Line]:
        plan, cost, work = self.plan, self.plan.cost, self.work
        stall, interval = checkpointing(work, self.offer, plan.nodes)
        mtbf = 1 / (plan.nodes * self.offer.failures_per_hour)
        yield Line("steps", f"{work.steps:,}", "of the manifest")
        yield Line(
            "a failure every",
            f"{mtbf:,.1f} h",
            f"{plan.nodes} nodes x {self.offer.failures_per_hour:.3g} an hour",
            "Llama 3 paper; spot traces of SkyPilot",
        )
        yield Line(
            "a checkpoint every",
            f"{interval:,.0f} s",
            f"blocking {stall:.2f} s: {work.state_gib / plan.nodes:,.2f} GiB a node to host memory",
            "Young 1974, Daly 2006",
        )
        yield Line(
            "productive share of time", f"{plan.goodput:.4f}", f"{RECOVERY_SECONDS:.0f} s to recover", "Daly 2006"
        )
        yield Line(
            "hours",
            f"{plan.hours:,.3f}",
            f"{work.steps:,} x {plan.prediction.step_seconds:.4g} s / {plan.goodput:.4f} / 3600",
        )
        yield Line(
            "nodes an hour", f"${plan.hourly_usd:,.4f}", f"{plan.nodes} x ${self.offer.hourly_usd:,.4f}", "price book"
        )
        for name, how in (
            ("compute", "arithmetic, optimizer, bubble"),
            ("communication", "exposed communication"),
            ("storage", "stalls of checkpoints, and what they occupy"),
            ("management", "time lost to failures, control plane"),
        ):
            yield Line(name, f"${getattr(cost, f'{name}_usd'):,.4f}", f"{how}: {cost.shares[name]:.1%}")
        yield Line("dollars", f"${cost.total_usd:,.4f}", "the sum")


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:,.4g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:,.3g} ns"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.4g} MB"
