"""Held-out loss: the same windows at every evaluation, spread over the replicas, with one value under any degrees."""

from __future__ import annotations

import torch

from cost_aware_trainer.data.token_files import Corpus
from cost_aware_trainer.distributed.mesh import Mesh
from cost_aware_trainer.telemetry.traffic import Axis
from cost_aware_trainer.training.model_part import ModelPart


def heldout_loss(part: ModelPart, corpus: Corpus, mesh: Mesh, samples: int, micro_batch: int) -> float:
    """Mean loss in nats per token (for the bundled data, per byte) over `samples` fixed held-out windows."""
    starts = corpus.heldout_windows(samples)
    degree, device = mesh.lengths[Axis.DATA], mesh.ranks.device
    # Sharded replicas gather weights together, so all of them make the same number of passes.
    rounds = -(-len(starts) // (degree * micro_batch))
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), part.weights_cast():
        for index in range(rounds):
            mesh.ranks.heartbeat.beat()
            first = (index * degree + mesh.place.data) * micro_batch
            chosen = starts[first : first + micro_batch]
            is_spare = len(chosen) == 0
            tokens = mesh.ranks.to_device(torch.from_numpy(corpus.heldout_tokens(starts[:1] if is_spare else chosen)))
            losses = part.losses(tokens)
            if part.reports and losses is not None and not is_spare:
                # In float64, so that grouping into micro-batches hardly shows.
                loss_sum += losses.double().sum()
    with mesh.ranks.heartbeat.waiting():
        total = float(mesh.ranks.sum_tensor(loss_sum))
    return total / (len(starts) * corpus.sequence_length)
