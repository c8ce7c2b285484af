"""The planner's machines, corrected by what the job's own ranks measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_aware_operator.costs.models.layout import Layout
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.parameters import FITTED
from cost_aware_operator.costs.models.predict import Machine, step_seconds
from cost_aware_operator.costs.search.combinations import Offer

FASTEST, SLOWEST = 1e4, 1e-4
"""How far a network may be from its listed rate, as factors."""
ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    """One step as the ranks measured it, without checkpoints, evaluation and waiting for data."""

    step_seconds: float
    """Seconds of the step on the busiest rank: work, exposed communication and bubbles."""
    working_seconds: float
    """Seconds in which the busiest rank computes or updates weights."""
    network_bytes_per_second: float | None = None
    """A rank's share of its node's network, as the ranks' probe found it before the first step; None where none was made."""


@dataclass(frozen=True)
class Calibrated:
    """An offer of nodes, corrected by what was measured on them."""

    offer: Offer
    """The offer with its machine as measured."""
    error: float
    """Predicted over measured step, less one, before the correction."""


def calibrated(shape: DecoderShape, offer: Offer, layout: Layout, measured: Measured) -> Calibrated:
    """The offer whose prediction of the measured layout is what was measured.

    First arithmetic is scaled until the working seconds agree, then the links until the whole step does. Where a layout hardly
    communicates, nothing is learnt of the links from its steps: the network then has the rate that the ranks' probe found, or
    without one its listed rate.
    """
    before = float(step_seconds(shape, offer.machine, layout).total)
    offer = replace(offer, machine=_probed(offer.machine, measured.network_bytes_per_second))
    machine = offer.machine
    for _ in range(ROUNDS):
        # fixed costs do not scale, and hidden traffic slows computing, so that one round of each is not enough
        for _ in range(ROUNDS):
            found = step_seconds(shape, machine, layout)
            machine = faster(machine, float(found.compute + found.optimizer) / measured.working_seconds)
        listed = replace(offer.machine, accelerator=machine.accelerator)
        machine = _with_links(shape, listed, layout, measured.step_seconds)
    return Calibrated(replace(offer, machine=machine), before / measured.step_seconds - 1)


def _probed(machine: Machine, bytes_per_second: float | None) -> Machine:
    """The network at the rate of a probe between ranks, of which each had its share: a model takes a part of the rate for that."""
    if bytes_per_second is None:
        return machine
    node_gbit_per_s = bytes_per_second * machine.gpus_per_node * 8 / 1e9 / FITTED.network
    least, most = machine.network_gbit_per_s * SLOWEST, machine.network_gbit_per_s * FASTEST
    return replace(machine, network_gbit_per_s=min(max(node_gbit_per_s, least), most))


def faster(machine: Machine, factor: float) -> Machine:
    """The machine with arithmetic and memory so many times as fast."""
    factor = min(max(factor, SLOWEST), FASTEST)
    gpu = machine.accelerator
    peaks = {precision: peak * factor for precision, peak in gpu.peak_tflops.items()}
    own = replace(gpu, peak_tflops=peaks, memory_gbytes_per_s=gpu.memory_gbytes_per_s * factor)
    return replace(machine, accelerator=own)


def _with_links(shape: DecoderShape, machine: Machine, layout: Layout, seconds: float) -> Machine:
    """Links at the rate that explains the whole step; bisection, as a faster link never makes a step slower."""

    def scaled(factor: float) -> Machine:
        return replace(
            machine,
            network_gbit_per_s=machine.network_gbit_per_s * factor,
            link_gbytes_per_s=machine.link_gbytes_per_s * (factor if layout.ranks <= machine.gpus_per_node else 1.0),
        )

    def total(factor: float) -> float:
        return float(step_seconds(shape, scaled(factor), layout, FITTED).total)

    if layout.ranks == 1 or total(SLOWEST) <= seconds * 1.02:
        return machine
    return scaled(_solve(total, seconds))


def _solve(total: Callable[[float], float], seconds: float) -> float:
    low, high = math.log(SLOWEST), math.log(FASTEST)
    if total(FASTEST) >= seconds:
        # not even free communication explains so fast a step: what was measured hides all of it
        return FASTEST
    for _ in range(40):
        middle = (low + high) / 2
        if total(math.exp(middle)) > seconds:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
