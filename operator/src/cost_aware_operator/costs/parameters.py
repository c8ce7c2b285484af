"""The fitted parameters that ship: bench/accuracy.py --fit prints them, docs/design/20261121-cost-models.md says from what."""

from __future__ import annotations

from cost_aware_operator.costs.compute import Efficiency, Parameters

FITTED = Parameters(
    volta=Efficiency(0.87, 0.25),
    ampere=Efficiency(0.80, 0.33),
    hopper=Efficiency(0.775, 0.27),
    fp8=0.95,
    memory=0.81,
    passes=2.1,
    legacy_passes=5.7,
    layer_seconds=4.5e-5,
    step_seconds=0.0086,
    node_link=0.77,
    network=0.79,
    tensor_overlap=0.61,
    reduction_overlap=0.76,
    gather_overlap=0.72,
    gather_slowdown=0.19,
    context_loss=0.059,
    straggler=0.0072,
)
