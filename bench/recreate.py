"""What a change costs that deletes and recreates the pods, from the deletion to the first step, beside `bench/reconfigure.py`.

python bench/recreate.py [--deletions N]     (needs make install)

The same model on as many gloo ranks, in one pod of the development cluster; the ranks save before the pod ends, and its replacement
resumes. The Job controller waits longer with each pod that is lost soon after another, so the least is the fairest to compare with.
Prints one JSON line: median, least and most seconds, and all of them in order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.reconfigure import MODEL, RANKS
from devtools.cluster import Cluster, Space, manifest, script

NAMESPACE, JOB = "catj-recreate", "recreated"
PATIENCE_SECONDS = 300.0


def attempts_done(space: Space) -> int:
    """The newest attempt that has finished a step."""
    return max((int(entry["attempt"]) for entry in space.steps_log(JOB)), default=0)


def recreate(space: Space) -> float:
    """Deletes the pod; seconds until the next attempt's first step."""
    before, began_seconds = attempts_done(space), time.monotonic()
    space.cluster.run("delete", "pod", "-n", NAMESPACE, "-l", f"costaware.dev/job={JOB}", "--wait=false")
    while attempts_done(space) == before:
        if time.monotonic() - began_seconds > PATIENCE_SECONDS:
            raise SystemExit(f"no step within {PATIENCE_SECONDS:.0f} s of the deletion")
        time.sleep(0.05)
    return time.monotonic() - began_seconds


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deletions", type=int, default=5)
    options = parser.parse_args()
    sizes = {
        "layers": MODEL.layers, "hidden": MODEL.hidden, "heads": MODEL.heads, "kvHeads": MODEL.kv_heads, "ffn": MODEL.ffn,
        "sequenceLength": MODEL.sequence_length, "vocabulary": MODEL.vocabulary,
    }  # fmt: skip
    document = manifest(
        JOB,
        model=sizes,
        batch={"global": 16, "micro": 2},
        nodes={"ranksPerNode": RANKS},
        parallelism={"data": RANKS},
        trainer={"config": {"steps": 10**6}},
        checkpoint={"intervalSeconds": 3600},
        template={"resources": {"limits": {"memory": "6Gi"}}},
    )
    script("volumes", NAMESPACE)
    try:
        space = Space(Cluster.connect(), NAMESPACE)
        space.submit(document)
        space.wait_step(JOB, 5, 240)
        seconds = []
        for _ in range(options.deletions):
            seconds.append(recreate(space))
            space.wait(JOB, lambda s: s.get("state") == "Running", 120, "training")
            time.sleep(5)
    finally:
        script("forget", NAMESPACE)
    figures = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    rounded = {name: round(value, 2) for name, value in figures.items()}
    each = [round(value, 2) for value in seconds]
    print(json.dumps({"way": "recreated pods", "stage": "total", "changes": len(seconds), **rounded, "each": each}))


if __name__ == "__main__":
    main()
