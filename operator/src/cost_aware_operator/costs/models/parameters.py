"""The fitted parameters that ship: python -m bench.accuracy --fit prints them, docs/design/20261121-cost-models.md says from what."""

from __future__ import annotations

from cost_aware_operator.costs.models.compute import Efficiency, Parameters

FITTED = Parameters(
    volta=Efficiency(0.87, 0.25),
    ampere=Efficiency(0.81, 0.33),
    hopper=Efficiency(0.74, 0.27),
    hopper_attention=1.38,
    fp8=0.95,
    memory=0.80,
    passes=2.2,
    legacy_passes=5.4,
    layer_seconds=4.9e-5,
    step_seconds=0.0089,
    node_link=0.80,
    network=0.77,
    tensor_overlap=0.49,
    reduction_overlap=0.77,
    gather_overlap=0.69,
    gather_slowdown=0.084,
    context_loss=0.080,
    straggler=0.0071,
)
