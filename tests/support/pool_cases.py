"""What the ranks of a pool can be asked to do. Arguments and answers are pickled."""

import dataclasses
import json
from pathlib import Path

from cost_aware_trainer.contract import RunPlan
from cost_aware_trainer.metrics import RankMetrics
from cost_aware_trainer.results import Surroundings
from cost_aware_trainer.train import Trainer
from cost_aware_trainer.validation import check_plan


class MemoryLog:
    """A steps log that keeps its lines."""

    def __init__(self):
        self.entries = []

    def write(self, entry):
        self.entries.append(entry)


def train(place, plan):
    """Runs a plan from where its checkpoint folder stands to its end."""
    plan = RunPlan.from_json(plan)
    check_plan(plan, place.size)
    ranks, log = place.join("first"), MemoryLog()
    trainer = Trainer(plan, ranks, Surroundings(0, None, None), RankMetrics(ranks.rank), log, lambda: False)
    result = trainer.run()
    checksums = {}
    if ranks.is_first:
        newest = max(Path(plan.checkpoint.folder).glob("step-*/manifest.json"))
        checksums = {name: facts["checksum"] for name, facts in json.loads(newest.read_text())["tensors"].items()}
    return {"steps": log.entries, "result": dataclasses.asdict(result), "checksums": checksums}
