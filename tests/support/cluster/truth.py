"""What a run must have done, computed without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from devtools.cluster import PRICE_USD_PER_HOUR, Space, script
from tests.support.cluster.pod_lives import PodLives

from cost_aware_trainer.data.samples import checksum_text, expected_checksum


def expected_samples(spec: dict[str, Any]) -> str:
    """The checksum of an undisturbed run of a manifest: every sample of every step, once."""
    manifest = json.loads((Path(script("folder", "data")) / "python-stdlib/manifest.json").read_text())
    train_bytes = sum(f["bytes"] for f in manifest["files"] if f["split"] == "train")
    part = Path(script("folder", "data")) / "python-stdlib/train.bin"
    windows = (part.stat().st_size - 1) // spec["model"]["sequenceLength"]
    assert part.stat().st_size >= train_bytes
    config = spec["trainer"]["config"]
    return checksum_text(expected_checksum(windows, config.get("seed", 0), spec["batch"]["global"], config["steps"]))


def assert_books_close(status: dict[str, Any], lives: PodLives) -> None:
    """The ledger against pods watched by somebody else, within 1 %; causes add up."""
    cost = status["cost"]
    truth = lives.seconds()
    said = f"{cost['podSeconds']} pod-seconds, {truth} were watched: {lives.lives}"
    assert abs(cost["podSeconds"] - truth) <= 0.01 * truth, said
    dollars = truth * PRICE_USD_PER_HOUR / 3600
    assert abs(cost["accruedUSD"] - dollars) <= 0.01 * dollars, f"${cost['accruedUSD']}, ${dollars} were watched"
    assert abs(sum(cost["byCause"].values()) - cost["accruedUSD"]) < 1e-4


def assert_exactly_once(space: Space, job: str, spec: dict[str, Any], status: dict[str, Any]) -> None:
    """The same number of steps, and exactly the samples of an undisturbed run."""
    steps = spec["trainer"]["config"]["steps"]
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == steps
    assert status["progress"]["samplesChecksum"] == expected_samples(spec)
    assert sorted(space.weights_made_by(job)) == list(range(1, steps + 1))
