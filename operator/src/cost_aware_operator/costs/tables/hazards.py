"""Losses of nodes and volumes an hour, from published traces."""

from __future__ import annotations

from cost_aware_operator.costs.checks import count

ON_DEMAND_PER_GPU_HOUR = 419 / (16_384 * 54 * 24)
"""2.0e-5: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, Grattafiori et al. 2024, section 3.3.4)."""
SPOT_PER_NODE_HOUR = 0.5
"""Middle of 0.31 to 0.74 losses an instance-hour in traces of p3.2xlarge, April 2023 (skypilot-org/spot-traces)."""
STORAGE_LOSS_PER_HOUR = 0.002 / 8760
"""Upper end of the yearly failure rate that AWS states for general-purpose block volumes, 0.1 to 0.2 %."""


def node_hazard(gpus_per_node: int, *, spot: bool) -> float:
    """Failures of one node an hour. On demand they grow with its accelerators; a spot node is mostly lost to reclaims, as a whole.

    Raises:
        AnalysisError: fewer than 1 accelerator.
    """
    own = count("gpus_per_node", gpus_per_node) * ON_DEMAND_PER_GPU_HOUR
    return own + SPOT_PER_NODE_HOUR if spot else own
