"""Scores of the predictor on the measured configurations; `python -m bench.accuracy` prints them, test_accuracy.py asserts them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from bench.accuracy.measured import Measured, rows

from cost_aware_operator.costs.models.calibrate import MeasuredStep, calibrate
from cost_aware_operator.costs.models.compute import Parameters, model_flops
from cost_aware_operator.costs.models.predict import predict
from cost_aware_operator.costs.tables.hardware import NumberFormat

LITERATURE = Parameters()
"""Where every fit starts: figures of papers and data sheets, not of the rows."""
ITERATIONS = 2
ONE = 0.01
"""Spread of a single observation, in log units: it is trusted more than the priors."""


@dataclass(frozen=True)
class Scored:
    """One row and what two models said of it, neither of which saw its source."""

    row: Measured
    seconds: float
    naive_seconds: float
    memory_gib: float
    parameters: Parameters

    @property
    def error(self) -> float:
        return self.seconds / self.row.step_seconds - 1

    @property
    def naive_error(self) -> float:
        return self.naive_seconds / self.row.step_seconds - 1


@dataclass(frozen=True)
class Ranking:
    """Layouts of one model, accelerators and batch."""

    name: str
    size: int
    tau: float
    regret: float
    naive_tau: float
    naive_mape: float
    mape: float


def observations(chosen: Sequence[Measured]) -> list[MeasuredStep]:
    """Rows for a fit; a source counts by the root of its rows, so that a large table does not outvote all others."""
    count = Counter(r.source for r in chosen)
    return [r.observation(count[r.source] ** -0.5) for r in chosen]


def seconds(row: Measured, parameters: Parameters) -> float:
    q = row.question
    return predict(q.shape, q.machine, q.layout, parameters).step_seconds


def naive(training: Sequence[Measured]) -> Callable[[Measured], float]:
    """A constant fraction of peak by GPU generation and whether fp8: the median of the rows it may see, or of all of them."""

    def utilisation(r: Measured) -> float:
        layout = r.question.layout
        peak = r.question.machine.accelerator.peak(layout.precision) * 1e12
        return model_flops(r.question.shape, layout.global_batch) / r.step_seconds / layout.ranks / peak

    def kind(r: Measured) -> tuple[str, bool]:
        return (r.question.machine.accelerator.generation, r.question.layout.precision is NumberFormat.FP8)

    seen: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for r in training:
        seen[kind(r)].append(utilisation(r))
    fallback = statistics.median(utilisation(r) for r in training)

    def guess(r: Measured) -> float:
        layout = r.question.layout
        found = seen.get(kind(r))
        fraction = statistics.median(found) if found else fallback
        peak = r.question.machine.accelerator.peak(layout.precision) * 1e12
        return model_flops(r.question.shape, layout.global_batch) / layout.ranks / peak / fraction

    return guess


@cache
def leave_one_source_out() -> tuple[Scored, ...]:
    """Every row scored by parameters that were fitted without its source."""
    scored = []
    for source in dict.fromkeys(r.source for r in rows()):
        training = [r for r in rows() if r.source != source]
        parameters = calibrate(observations(training), LITERATURE, iterations=ITERATIONS).parameters
        guess = naive(training)
        for r in rows():
            if r.source == source:
                q = r.question
                memory = predict(q.shape, q.machine, q.layout, parameters).memory_gib
                scored.append(Scored(r, seconds(r, parameters), guess(r), memory, parameters))
    return tuple(scored)


def after_one_observation(scored: Sequence[Scored]) -> list[float]:
    """Errors after `calibrate` with one observation of each machine: the middle row of each source, GPU and precision.

    Calibration starts from the parameters that were fitted without the source. The observation itself is not scored.
    """
    machines: dict[tuple[str, str, str], list[Scored]] = defaultdict(list)
    for s in scored:
        machines[s.row.source, s.row.gpu, s.row.question.layout.precision].append(s)
    errors = []
    for group in machines.values():
        if len(group) < 2:
            continue
        observed = group[len(group) // 2]
        parameters = calibrate([observed.row.observation()], observed.parameters, noise=ONE).parameters
        errors += [seconds(s.row, parameters) / s.row.step_seconds - 1 for s in group if s is not observed]
    return errors


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Tau-b: concordant less discordant pairs over the pairs, ties taken out."""
    concordant = discordant = tied_first = tied_second = 0
    for i in range(len(first)):
        for j in range(i):
            a, b = first[i] - first[j], second[i] - second[j]
            if a * b > 0:
                concordant += 1
            elif a * b < 0:
                discordant += 1
            elif a:
                tied_second += 1
            elif b:
                tied_first += 1
    both = concordant + discordant
    whole = math.sqrt((both + tied_first) * (both + tied_second))
    return (concordant - discordant) / whole if whole else 0.0


def rankings(scored: Sequence[Scored]) -> list[Ranking]:
    """Groups of two or more different layouts."""
    groups: dict[object, list[Scored]] = defaultdict(list)
    for s in scored:
        groups[s.row.group].append(s)
    found = []
    for group in groups.values():
        if len({s.row.question.layout for s in group}) < 2:
            continue
        measured = [s.row.step_seconds for s in group]
        chosen = min(group, key=lambda s: s.seconds)
        found.append(
            Ranking(
                name=f"{group[0].row.source}: {group[0].row.name} on {group[0].row.question.layout.ranks}",
                size=len(group),
                tau=kendall_tau([s.seconds for s in group], measured),
                regret=chosen.row.step_seconds / min(measured) - 1,
                naive_tau=kendall_tau([s.naive_seconds for s in group], measured),
                naive_mape=percent(s.naive_error for s in group),
                mape=percent(s.error for s in group),
            )
        )
    return found


def percent(errors: object, centre: Callable[[Sequence[float]], float] = statistics.mean) -> float:
    """Mean (or median) absolute error in percent."""
    return 100 * centre([abs(e) for e in errors])  # type: ignore[attr-defined]


def memory_error(scored: Sequence[Scored]) -> float:
    """Mean absolute error of peak memory in percent, where it was measured."""
    return percent(s.memory_gib / s.row.memory_gib - 1 for s in scored if s.row.memory_gib)


def by_source(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Rows by their source."""
    sources: dict[str, list[Scored]] = defaultdict(list)
    for s in scored:
        sources[s.row.source].append(s)
    return dict(sources)
