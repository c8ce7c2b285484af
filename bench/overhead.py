"""What the trainer costs beside bare PyTorch: step time against a plain DDP script, and the stall of a background save.

python bench/overhead.py [--pairs N] [--steps N]

Two gloo ranks of one process pool on this machine train the bundled decoder in turns: a block of steps by the trainer with
all of its metrics, its checksums and its steps log, then a block of steps by a bare DistributedDataParallel loop on the same
model, batch and optimizer. A pair's ratio compares neighbours in time. Then saves: how long a background save holds up the
step that starts it, against a save that waits for the files. Prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

RANKS = 2
BATCH, SEQUENCE = 16, 128


def rank_main(rank: int, port: int, folder: Path, pairs: int, steps: int, barrier: Barrier) -> None:
    import torch

    torch.set_num_threads(1)
    from cost_aware_trainer.distributed.collectives import Rendezvous, disconnect

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CATJ_METRICS_PORT": str(port + 1)}
    rendezvous = Rendezvous.from_environment()
    trainer, corpus = trainer_of(rendezvous, folder, pairs * steps + 100)
    bare = bare_step(corpus, rank)
    trainer_step = trainer.step
    blocks: dict[str, list[float]] = {"trainer": [], "bare": []}
    busy: dict[str, list[float]] = {"trainer": [], "bare": []}
    for pair in range(-1, pairs):
        order = [("trainer", trainer_step), ("bare", bare)]
        for name, step in order if pair % 2 else reversed(order):
            barrier.wait()
            started_seconds, started_busy_seconds = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            if pair >= 0:
                busy[name].append((time.process_time() - started_busy_seconds) / steps)
                blocks[name].append((time.perf_counter() - started_seconds) / steps)
    saves = save_seconds(trainer, pairs, barrier)
    if rank == 0:
        report(blocks, busy, saves, pairs, steps)
    barrier.wait()
    trainer.close()
    disconnect()


def trainer_of(rendezvous: Any, folder: Path, steps: int) -> tuple[Any, Any]:
    """The bundled trainer, as `python -m cost_aware_trainer` builds it."""
    from cost_aware_trainer.contract import BatchPlan, CheckpointPlan, DegreesPlan, ModelPlan, RunPlan
    from cost_aware_trainer.contract.rank_environment import RankEnvironment, StepsLog, StopSignal
    from cost_aware_trainer.telemetry.metrics import RankMetrics
    from cost_aware_trainer.training.trainer import Trainer

    model = ModelPlan(layers=4, hidden=192, heads=6, kv_heads=2, ffn=512, sequence_length=SEQUENCE, vocabulary=256)
    plan = RunPlan(
        steps=steps,
        model=model,
        batch=BatchPlan(global_samples=BATCH, micro_samples=BATCH // RANKS),
        checkpoint=CheckpointPlan(folder=str(folder / "checkpoints"), interval_seconds=3600),
        data_folder=str(folder / "data"),
        degrees=DegreesPlan(data=RANKS),
        evaluate_every_steps=10**6,
    )
    environment = RankEnvironment.from_environment()
    ranks = rendezvous.join("first")
    metrics, log = RankMetrics(ranks.rank), StepsLog(folder / "steps.jsonl" if ranks.is_first else None)
    metrics.serve(ranks.local_rank)
    trainer = Trainer(plan, ranks, environment, metrics, log, StopSignal(environment).is_set)
    return trainer, trainer.corpus


def bare_step(corpus: Any, rank: int) -> Any:
    """One step of what a plain script does: draw samples, DDP forward and backward, clip, AdamW."""
    import numpy as np
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.nn.parallel import DistributedDataParallel

    from cost_aware_trainer.contract import ModelPlan
    from cost_aware_trainer.models.decoder import Decoder, initial_value, whole

    shape = ModelPlan(layers=4, hidden=192, heads=6, kv_heads=2, ffn=512, sequence_length=SEQUENCE, vocabulary=256)
    decoder = Decoder(*whole(shape))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), shape, 0))
    model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    chooser = np.random.default_rng(rank)

    def step() -> None:
        windows = chooser.integers(0, corpus.windows, BATCH // RANKS).astype(np.uint64)
        tokens = torch.from_numpy(corpus.train_windows(windows))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def save_seconds(trainer: Any, repeats: int, barrier: Barrier) -> dict[str, list[float]]:
    """Seconds that the step loop stands still for a background save, and for one that waits for its files."""
    found: dict[str, list[float]] = {"background": [], "synchronous": []}
    for _ in range(repeats):
        for kind in found:
            trainer.step()
            trainer.saves.settle()
            barrier.wait()
            started_seconds = time.perf_counter()
            trainer.save(wait=kind == "synchronous")
            found[kind].append(time.perf_counter() - started_seconds)
            trainer.saves.settle()
    return found


def report(
    blocks: dict[str, list[float]], busy: dict[str, list[float]], saves: dict[str, list[float]], pairs: int, steps: int
) -> None:
    # Seconds on a core are less at the mercy of what else runs on the machine than seconds of the clock.
    busy_ratio = statistics.median(a / b for a, b in zip(busy["trainer"], busy["bare"], strict=True))
    ratios = [mine / bare for mine, bare in zip(blocks["trainer"], blocks["bare"], strict=True)]
    medians = {f"{name}_step_seconds": round(statistics.median(found), 5) for name, found in blocks.items()}
    spread = {
        "median_ratio": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
    }
    spread["median_cpu_ratio"] = round(busy_ratio, 4)
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"what": "step", "pairs": pairs, "steps": steps, "load": load, **medians, **spread}), flush=True)
    stalls = {f"{kind}_seconds": round(statistics.median(found), 4) for kind, found in saves.items()}
    ratio = statistics.median(saves["background"]) / statistics.median(saves["synchronous"])
    print(json.dumps({"what": "save", "saves": pairs, **stalls, "stall_ratio": round(ratio, 4)}), flush=True)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def measure(rank_main: Callable[..., None], preload: str, description: str | None) -> None:
    """Reads the command line and runs `rank_main` on all ranks, forked from a process that has imported `preload`."""
    from cost_aware_trainer.data.token_files import prepare

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="of each block")
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload, "torch._dynamo"])
    with tempfile.TemporaryDirectory() as scratch:
        folder, port, barrier = Path(scratch), free_port(), context.Barrier(RANKS)
        prepare(folder / "data", Path(json.__file__).parent.parent / "asyncio")
        arguments = (port, folder, options.pairs, options.steps, barrier)
        ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed; its traceback is above")


if __name__ == "__main__":
    measure(rank_main, "cost_aware_trainer.training.trainer", __doc__)
