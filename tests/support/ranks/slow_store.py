"""A rank that trains from a slow store: saves, and goes on from there in new process groups.

Arguments: rank, port, plan, bytes a second.

It is a process of its own, as a collective's time-out is read when the trainer is imported.
"""

import dataclasses
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

RANKS = 2


def main(rank, port, plan_file, bytes_per_second):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    import torch
    import torch.distributed as dist
    from tests.support.ranks.checkpoint_cases import Throttle

    from cost_aware_trainer.contract import RunPlan
    from cost_aware_trainer.contract.rank_environment import RankEnvironment, StepsLog
    from cost_aware_trainer.distributed.collectives import Rendezvous, disconnect
    from cost_aware_trainer.telemetry.metrics import RankMetrics
    from cost_aware_trainer.training.trainer import Trainer

    torch.set_num_threads(1)
    # met once with more time: how long imports take says nothing of storage
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, timeout=timedelta(seconds=120))
    plan = RunPlan.from_json(Path(plan_file).read_text())
    told = []
    for steps in (1, 2):
        store.add(f"ready-{steps}", 1)
        while store.add(f"ready-{steps}", 0) < RANKS:
            time.sleep(0.01)
        ranks = Rendezvous(store, rank, RANKS, rank).join(f"run-{steps}")
        ranks.meetings.pace = throttle = Throttle(bytes_per_second)
        began = time.monotonic()
        trainer = Trainer(
            dataclasses.replace(plan, steps=steps), ranks, RankEnvironment(0, None, None), RankMetrics(rank), StepsLog(None),
            lambda: False,
        )  # fmt: skip
        started = time.monotonic()
        result = trainer.run()
        seconds = started - began, time.monotonic() - started
        told.append(
            {"step": result.step, "seconds": seconds, "bytes": throttle.bytes, "checksum": result.samples_checksum}
        )
        trainer.rank_model.close()
        disconnect()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
