"""Labels by which nodes tell their instance type, zone and capacity."""

from __future__ import annotations

SPOT_LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Labels of spot nodes, as each cloud and Karpenter write them."""
INSTANCE_TYPE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
ZONE_LABELS = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")


def is_spot(node_labels: dict[str, str]) -> bool:
    """Whether a node's labels say that it was bought as spot capacity."""
    return any(node_labels.get(name) == value for name, value in SPOT_LABELS.items())
