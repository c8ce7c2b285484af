"""The held-out loss: the same windows at every evaluation, spread over the ranks, the same value for any degree."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cost_aware_trainer.collectives import Ranks
from cost_aware_trainer.data import Corpus


def heldout_loss(model: nn.Module, corpus: Corpus, ranks: Ranks, samples: int, micro_samples: int) -> float:
    """Mean loss in nats per token (for the bundled data, per byte) over `samples` fixed held-out windows."""
    starts = corpus.heldout_windows(samples)
    mine = starts[ranks.rank :: ranks.size]
    loss_sum = 0.0
    model.eval()
    with torch.no_grad():
        for first in range(0, len(mine), micro_samples):
            tokens = torch.from_numpy(corpus.heldout_tokens(mine[first : first + micro_samples])).to(ranks.device)
            loss_sum += _summed_in_double(model(tokens[:, :-1]), tokens[:, 1:])
    model.train()
    (total,) = ranks.sum([loss_sum])
    return total / (len(starts) * corpus.sequence_length)


def _summed_in_double(logits: Tensor, targets: Tensor) -> float:
    """Cross-entropies in float32, summed in float64 so that grouping into micro-batches hardly shows."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return float(losses.double().sum())
