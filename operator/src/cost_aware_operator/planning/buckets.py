"""Size of the buckets in which replicas sum gradients, such that the least of the sum outlasts the backward pass."""

from __future__ import annotations

import functools
import math

from cost_aware_operator.costs.advice.communication_schedule import CommunicationScheduler, LayerGradients
from cost_aware_operator.costs.models.compute import Parameters
from cost_aware_operator.costs.models.layout import Layout, StateSharding
from cost_aware_operator.costs.models.machines import Machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.models.predict import predict
from cost_aware_operator.costs.models.step import FORWARD

LEAST_MIB = 1.0
"""Smallest bucket: below it, a collective's own cost on any link is more than a smaller bucket could hide."""
GRADIENT_BYTES = 4
MATRICES = 7
"""Matrices of one layer. Buckets close only between matrices, so each is sent whole."""
MOST_PIECES = 32
"""Most pieces that a stage's matrices are taken as: finer choices are lost in the prediction's error."""
TOLERANCE = 1.05
"""Exposed time over the least at which a larger bucket is still taken: launching a collective costs time that no model counts."""
MOST_MIB = 256.0
"""Largest bucket: a collective of so many bytes has the link's full rate, and a larger one gains nothing."""
MOST_SHARE = 1 / 8
"""Most of all gradients that one bucket may hold. A larger one hides well only as long as predictions are exact."""


def bucket_mib(shape: DecoderShape, machine: Machine, layout: Layout, parameters: Parameters) -> float | None:
    """MiB of one bucket for a layout, a power of two; None if there are no such buckets.

    One replica sums nothing, and `fully_shard` sends a layer at a time. The backward pass is that of the last micro-batch, as
    gradients travel once they are complete; the head's come first, the embedding's last. Of a pipeline, the first stage counts.
    """
    if layout.data == 1 or layout.sharding is not StateSharding.DDP:
        return None
    compute_seconds = predict(shape, machine, layout, parameters).breakdown.compute / layout.micro_batches
    layers, table = math.ceil(shape.layers / layout.pipeline), shape.embedding_parameters / layout.tensor
    pieces = min(layers * MATRICES, MOST_PIECES)
    weights = [shape.layer_parameters * layers / pieces / layout.tensor] * pieces
    if layout.pipeline == 1 and not shape.tied_embeddings:
        weights.insert(0, table)
    second_share = compute_seconds * (1 - FORWARD[layout.recompute]) / sum(weights)
    gradients = [LayerGradients(second_share * weight, math.ceil(GRADIENT_BYTES * weight)) for weight in weights]
    gradients.append(LayerGradients(0.0, math.ceil(GRADIENT_BYTES * table)))
    group = machine.fabric(parameters).group(layout.data, layout.tensor)

    @functools.cache
    def reduce_seconds(size_bytes: float) -> float:
        # most buckets are of one size
        return float(group.all_reduce(size_bytes))

    scheduler = CommunicationScheduler(gradients, reduce_seconds)
    most_mib = min(MOST_MIB, MOST_SHARE * sum(gradient.size_bytes for gradient in gradients) / 2**20)
    doublings = math.floor(math.log2(max(1.0, most_mib / LEAST_MIB)))
    sizes_mib: list[float] = [LEAST_MIB * 2**count for count in range(doublings + 1)]
    exposed = [scheduler.simulate(size * 2**20).exposed_seconds for size in sizes_mib]
    good = (size for size, seconds in zip(sizes_mib, exposed, strict=True) if seconds <= min(exposed) * TOLERANCE)
    return max(good)
