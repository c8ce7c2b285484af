"""Fit of the model's parameters to measured steps. They are few, stay near plausible values, and a job's own steps refit them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cost_aware_operator.costs.models.compute import Efficiency, Parameters
from cost_aware_operator.costs.models.layout import Layout
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.step import step_seconds


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step."""

    shape: DecoderShape
    """The model."""
    machine: Machine
    """The hardware."""
    layout: Layout
    """How the model was laid out."""
    step_seconds: float
    """Measured seconds of one step."""
    weight: float = 1.0
    """How much the measurement counts in the fit; 1 is a usual one."""


@dataclass(frozen=True)
class Knob:
    """One parameter of the fit, with its bounds."""

    name: str
    """Dotted name of the parameter in `Parameters`."""
    low: float
    """Smallest value allowed."""
    high: float
    """Largest value allowed."""
    spread: float
    """How far the value may move before data must insist, in log units."""


KNOBS = (
    Knob("volta.matmul", 0.4, 0.95, 0.15),
    Knob("ampere.matmul", 0.4, 0.95, 0.15),
    Knob("hopper.matmul", 0.4, 0.95, 0.15),
    Knob("blackwell.matmul", 0.4, 0.95, 0.15),
    Knob("ada.matmul", 0.4, 0.95, 0.15),
    Knob("cpu.matmul", 0.1, 0.95, 0.3),
    Knob("ampere.attention", 0.2, 0.8, 0.25),
    Knob("hopper.attention", 0.15, 0.8, 0.25),
    Knob("hopper_attention", 1.0, 2.2, 0.15),
    Knob("fp8", 0.4, 0.95, 0.15),
    Knob("memory", 0.6, 0.95, 0.1),
    Knob("passes", 0.5, 6.0, 0.4),
    Knob("legacy_passes", 1.0, 20.0, 0.4),
    Knob("layer_seconds", 1e-6, 5e-3, 0.7),
    Knob("step_seconds", 1e-4, 0.5, 0.7),
    Knob("node_link", 0.4, 0.9, 0.15),
    Knob("network", 0.3, 0.95, 0.2),
    Knob("tensor_overlap", 0.02, 0.9, 0.5),
    Knob("reduction_overlap", 0.1, 0.95, 0.3),
    Knob("gather_overlap", 0.3, 0.95, 0.2),
    Knob("gather_slowdown", 0.01, 0.5, 0.5),
    Knob("context_loss", 0.01, 0.5, 0.5),
    Knob("straggler", 0.001, 0.05, 0.5),
)
NOISE = 0.06
"""Spread of one measurement about the model, in log units, as the fit weighs it against the priors."""
TAIL = 0.10
"""Residuals beyond this pull with constant force (Huber): one odd row must not bend the model."""


@dataclass(frozen=True)
class Calibration:
    """Refitted parameters and the errors they leave."""

    parameters: Parameters
    """The refitted parameters."""
    median_error_percent_before: float
    """Median error of predicted steps before the fit, percent of the measured step."""
    median_error_percent_after: float
    """Median error of predicted steps after the fit, percent of the measured step."""


def value(parameters: Parameters, name: str) -> float:
    """A parameter by its dotted name."""
    head, _, tail = name.partition(".")
    found = getattr(parameters, head)
    return float(getattr(found, tail) if tail else found)


def changed(parameters: Parameters, values: Mapping[str, float]) -> Parameters:
    """Parameters with some of them replaced, by dotted name."""
    flat: dict[str, float | Efficiency] = {}
    for name, number in values.items():
        head, _, tail = name.partition(".")
        if tail:
            efficiency = flat.get(head, getattr(parameters, head))
            flat[head] = replace(efficiency, **{tail: number})
        else:
            flat[head] = number
    return replace(parameters, **flat)  # type: ignore[arg-type]


def calibrate(
    observations: Sequence[MeasuredStep],
    start: Parameters = FITTED,
    *,
    noise: float = NOISE,
    iterations: int = 4,
    knobs: Sequence[Knob] = KNOBS,
) -> Calibration:
    """The parameters that explain the observations best while staying near `start`.

    Maximum a posteriori in log parameters: minimise sum w r^2 / noise^2 + sum (x - x0)^2 / spread^2 over residuals
    r = log(predicted / measured), by Gauss-Newton with a Huber weight. What no observation touches keeps its value.

    Raises:
        ValueError: no observation, or a step that is not a positive number of seconds.
    """
    if not observations:
        raise ValueError("observations: write one measured step or more")
    for index, one in enumerate(observations):
        if not (math.isfinite(one.step_seconds) and one.step_seconds > 0):
            raise ValueError(f"observations[{index}].step_seconds must be a positive number, got {one.step_seconds!r}")

    def residuals(parameters: Parameters) -> list[float]:
        return [
            math.log(float(step_seconds(o.shape, o.machine, o.layout, parameters).total) / o.step_seconds)
            for o in observations
        ]

    prior = [math.log(value(start, k.name)) for k in knobs]
    point, parameters = list(prior), start
    before = current = residuals(start)
    for _ in range(iterations):
        jacobian = _jacobian(residuals, parameters, point, current, knobs)
        step = _gauss_newton(jacobian, current, [o.weight for o in observations], point, prior, knobs, noise)
        point = [min(max(x + s, math.log(k.low)), math.log(k.high)) for x, s, k in zip(point, step, knobs, strict=True)]
        parameters = changed(start, {k.name: math.exp(x) for k, x in zip(knobs, point, strict=True)})
        current = residuals(parameters)
    return Calibration(parameters, _median_percent(before), _median_percent(current))


def _jacobian(
    residuals: Callable[[Parameters], list[float]],
    parameters: Parameters,
    point: Sequence[float],
    current: Sequence[float],
    knobs: Sequence[Knob],
) -> NDArray[np.float64]:
    """Derivatives of the residuals, shape (observations, knobs), by steps of 2 % of each parameter."""
    moved = [
        residuals(changed(parameters, {knob.name: math.exp(x + 0.02)})) for knob, x in zip(knobs, point, strict=True)
    ]
    derivatives: NDArray[np.float64] = (np.array(moved).T - np.array(current)[:, None]) / 0.02
    return derivatives


def _gauss_newton(
    jacobian: NDArray[np.float64],
    current: Sequence[float],
    weights: Sequence[float],
    point: Sequence[float],
    prior: Sequence[float],
    knobs: Sequence[Knob],
    noise: float,
) -> list[float]:
    """One step of every knob, in log units."""
    residual, spread = np.array(current), np.array([knob.spread for knob in knobs])
    pull = np.array(weights) / noise**2 * np.minimum(1.0, TAIL / np.maximum(np.abs(residual), 1e-9))
    weighted = (jacobian * pull[:, None]).T
    matrix = weighted @ jacobian + np.diag(1 / spread**2)
    right = -weighted @ residual - (np.array(point) - np.array(prior)) / spread**2
    step: list[float] = np.linalg.solve(matrix, right).tolist()
    return step


def _median_percent(residuals: Sequence[float]) -> float:
    return 100 * statistics.median(abs(math.expm1(r)) for r in residuals)
