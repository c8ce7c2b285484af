"""What a session costs beside bare PyTorch: its step time against a plain DDP script's, on the same model, batch and optimizer.

python -m bench.session [--pairs N] [--steps N]

Two gloo ranks train the bundled decoder as a stranger's model in turns: a block of steps by a `TrainingSession`, which agrees on
the parameters that were used, then a block by DistributedDataParallel without `find_unused_parameters`. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.overhead import BATCH, RANKS, SEQUENCE, bare_step, measure


def rank_main(rank: int, port: int, folder: Path, pairs: int, steps: int, barrier: Barrier) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CATJ_METRICS_PORT": str(port + 1)}
    from cost_aware_trainer.data.token_files import Corpus

    corpus = Corpus.open(folder / "data", SEQUENCE, verify_hashes=False)
    session, step = session_step(corpus, folder, (pairs + 1) * steps + 1)
    with session:
        blocks: dict[str, list[float]] = {"session": [], "bare": []}
        bare = bare_step(corpus, rank)
        for pair in range(-1, pairs):
            order = [("session", step), ("bare", bare)]
            for name, run in order if pair % 2 else reversed(order):
                barrier.wait()
                started_seconds = time.perf_counter()
                for _ in range(steps):
                    run()
                if pair >= 0:
                    blocks[name].append((time.perf_counter() - started_seconds) / steps)
        barrier.wait()
    if rank == 0:
        ratios = [mine / other for mine, other in zip(blocks["session"], blocks["bare"], strict=True)]
        medians = {f"{name}_step_seconds": round(statistics.median(found), 5) for name, found in blocks.items()}
        spread = {"median_ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        rounded = {name: round(value, 4) for name, value in spread.items()}
        print(json.dumps({"what": "session", "pairs": pairs, "steps": steps, **medians, **rounded}), flush=True)


def session_step(corpus: Any, folder: Path, steps: int) -> tuple[Any, Any]:
    """A session that is not entered yet, and one step of it."""
    import numpy as np
    import torch
    import torch.nn.functional as F  # noqa: N812

    from cost_aware_trainer import TrainingSession
    from cost_aware_trainer.contract import ModelPlan
    from cost_aware_trainer.models.decoder import Decoder, initial_value, whole

    shape = ModelPlan(layers=4, hidden=192, heads=6, kv_heads=2, ffn=512, sequence_length=SEQUENCE, vocabulary=256)
    model = Decoder(*whole(shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), shape, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    session = TrainingSession(
        model,
        optimizer,
        folder=folder / "checkpoints",
        samples=corpus.windows,
        global_samples=BATCH,
        steps=steps,
        clip_norm=1.0,
        interval_seconds=3600,
    )
    batches: Any = None

    def step() -> None:
        nonlocal batches
        if batches is None:
            batches = session.batches(lambda indices: torch.from_numpy(corpus.train_windows(indices.astype(np.uint64))))
        tokens = next(batches)
        logits = model(tokens[:, :-1])
        session.step(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / SEQUENCE)

    return session, step


if __name__ == "__main__":
    measure(rank_main, "cost_aware_trainer.training.sessions.session", __doc__)
