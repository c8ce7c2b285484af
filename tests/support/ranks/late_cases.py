"""Cases on a device that works behind the host, as a GPU does: what was started is known only after it was waited for."""

import itertools
import json
import math
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from tests.support.ranks import cases
from tests.support.ranks.session_cases import in_pool

from cost_aware_trainer.contract import RunPlan
from cost_aware_trainer.contract.rank_environment import RankEnvironment
from cost_aware_trainer.state.staging import StateCopies
from cost_aware_trainer.telemetry.device_time import DeviceTime
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.training.sessions.session import TrainingSession
from cost_aware_trainer.training.trainer import DivergedError, Trainer


class LateTime(DeviceTime):
    """Marks of one stream: their times may be asked for after the host has waited for them, or for a later one."""

    is_late = True
    numbers = itertools.count(1)
    passed = 0

    def mark(self):
        return next(self.numbers), time.perf_counter()

    def seconds(self, since, until):
        assert max(since[0], until[0]) <= LateTime.passed, "read before it has passed"
        return until[1] - since[1]

    def wait(self, mark):
        LateTime.passed = max(LateTime.passed, mark[0])


class LateCopies(StateCopies):
    """Copies that are made when the device is made to finish them, or when somebody has waited for long."""

    is_late = True

    def __init__(self):
        self.lock, self.held, self.pending = threading.Lock(), threading.Event(), []

    def copy_of(self, values):
        copy = torch.empty_like(values)
        self.pending.append((copy, values))
        return copy

    def hold(self):
        self.make()
        self.held.set()

    def wait(self):
        self.held.wait(2)
        self.make()

    def make(self):
        with self.lock:
            for copy, values in self.pending:
                copy.copy_(values)
            self.pending.clear()


@contextmanager
def is_late():
    with (
        mock.patch.object(DeviceTime, "of", staticmethod(lambda device: LateTime())),
        mock.patch.object(StateCopies, "of", staticmethod(lambda device: LateCopies())),
    ):
        yield


def late(place, case, **arguments):
    """Runs another case on such a device."""
    with is_late():
        return vars(cases)[case](place, **arguments)


def diverge(place, plan, at_step, behind):
    """Trains until a loss that is not finite, and says how that ended: the error, and whether the state is still finite."""
    plan = RunPlan.from_json(plan)
    log = cases.MemoryLog()
    with is_late() if behind else nullcontext():
        trainer = Trainer(
            plan, place.join("first"), RankEnvironment(0, None, None), RankMetrics(place.rank), log, lambda: False
        )
    accumulate = trainer.rank_model.accumulate

    def spoilt(number, batches):
        loss_sum, squared_norm = accumulate(number, batches)
        if number == at_step and place.rank == 0:
            for held in trainer.rank_model.part.parameters:
                held.gradient.fill_(math.nan)
            squared_norm = squared_norm * math.nan
        return loss_sum, squared_norm

    trainer.rank_model.accumulate = spoilt
    try:
        trainer.run()
    except DivergedError as error:
        parts = trainer.rank_model.parts()
        return str(error), all(bool(torch.isfinite(part.values).all()) for part in parts), len(log.entries)
    finally:
        trainer.rank_model.close()
    return "", True, len(log.entries)


def late_session(place, folder, steps):
    """Trains a session, and returns its lines of the steps log and its losses."""
    model, losses = torch.nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"folder": folder, "samples": 12, "global_samples": 6, "steps": steps}
    with in_pool(place), is_late(), TrainingSession(model, optimizer, **arguments) as session:
        for indices in session.batches(torch.from_numpy):
            loss_sum = model(indices.float().unsqueeze(1).expand(-1, 4)).square().sum()
            losses.append(session.step(loss_sum))
    return [json.loads(line) for line in (Path(folder) / "steps.jsonl").read_text().splitlines()], losses
