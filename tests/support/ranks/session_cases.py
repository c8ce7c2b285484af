"""What the ranks of a pool do with sessions of users' own models."""

import contextlib
import os
import random
from pathlib import Path
from unittest import mock

import torch
from tests.support.observing.host_reads import HostReads
from tests.support.ranks.strange_models import Moment, Plain, Shared, Statistics, StrangeModel, Tied, data_of, recipe_of
from torch.nn.parallel import DistributedDataParallel

from cost_aware_trainer.contract import ENV_RESULT_FILE, RunResult
from cost_aware_trainer.distributed.collectives import Rendezvous, disconnect
from cost_aware_trainer.telemetry.metrics import RankMetrics
from cost_aware_trainer.training.sessions.session import TrainingSession

SAMPLES = 36


@contextlib.contextmanager
def in_pool(place):
    """Sessions join this case's place, and serve no metrics."""
    with (
        mock.patch.object(Rendezvous, "from_environment", return_value=place),
        mock.patch.object(RankMetrics, "serve", return_value=True),
    ):
        yield


def gradients_of(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def train_strange(place, seed, folder, steps, global_samples, of_any_rank):
    """A session's run of a seed's model: losses, gradients as the optimizer saw them, and the state at the end."""
    recipe = recipe_of(seed, of_any_rank=of_any_rank)
    model, (xs, ys) = recipe.model(), data_of(seed, SAMPLES)
    optimizer, losses, gradients = recipe.optimizer_of(model), [], []
    arguments = {"samples": SAMPLES, "global_samples": global_samples, "micro_batches": recipe.micro_batches}
    with in_pool(place), TrainingSession(model, optimizer, folder=folder, steps=steps, **arguments) as session:
        optimizer.register_step_pre_hook(lambda *_: gradients.append(gradients_of(model)))
        batches = session.batches(lambda indices: (xs[indices], ys[indices]))
        for number, (x, y) in enumerate(batches, start=1):
            moment = Moment(session.step_number, session.ranks.rank)
            session.backward(recipe.loss_sum(model, x, y, moment))
            if number % recipe.micro_batches == 0:
                losses.append(session.step())
    return {"losses": losses, "gradients": gradients, "state": dict(model.state_dict())}


def train_strange_under_ddp(place, seed, steps, global_samples, order):
    """The same under DistributedDataParallel, with the samples that the session had: gradients, and the state at the end."""
    ranks = place.join("ddp")
    recipe = recipe_of(seed, of_any_rank=False)
    model, (xs, ys) = recipe.model().without_checkpoints(), data_of(seed, SAMPLES)
    replica, optimizer = DistributedDataParallel(model, find_unused_parameters=True), recipe.optimizer_of(model)
    gradients = []
    for step, of_ranks in enumerate(order[:steps]):
        for indices in of_ranks[ranks.rank]:
            loss = recipe.loss_sum(replica, xs[indices], ys[indices], Moment(step, ranks.rank))
            (loss / global_samples).backward()
        # DistributedDataParallel divides the sum by the number of ranks
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(ranks.size)
        gradients.append(gradients_of(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del replica
    disconnect()
    return {"gradients": gradients, "state": state}


def run_text(place, text, folder, **values):
    """Runs a script's text in this rank: its `answer`, how it ended, and the result that it left for the agent."""
    result_file = Path(folder).parent / f"result-{place.rank}.json"
    result_file.unlink(missing_ok=True)
    names = {"folder": folder, "place": place, **values}
    ended, patches = {"code": 0, "error": ""}, mock.patch.dict(os.environ, {ENV_RESULT_FILE: str(result_file)})
    with in_pool(place), patches:
        try:
            exec(compile(text, "script", "exec"), names)  # noqa: S102  the test's own
        except SystemExit as leaving:
            ended["code"] = leaving.code
        except Exception as error:
            ended = {"code": 1, "error": f"{type(error).__name__}: {error}"}
    result = RunResult.from_json(result_file.read_text()) if result_file.exists() else None
    return {"answer": names.get("answer"), "result": result, **ended}


def session_host_reads(place, folder, micro_batches, steps):
    """Who reads tensors' values in each step of a session, after the first."""
    # every rank uses every parameter: where one does not, it reads once more which of them others have used
    model, (xs, ys) = StrangeModel([Plain, Shared, Tied, Statistics], random.Random(1)), data_of(1, SAMPLES)
    optimizer, found = torch.optim.AdamW(model.parameters()), []
    arguments = {"samples": SAMPLES, "global_samples": 12, "steps": steps + 1, "micro_batches": micro_batches}
    with in_pool(place), TrainingSession(model, optimizer, folder=folder, clip_norm=0.1, **arguments) as session:
        batches = session.batches(lambda indices: (xs[indices], ys[indices]))
        with HostReads() as reads:
            for number, (x, y) in enumerate(batches, start=1):
                session.backward((model(x, Moment(session.step_number, 0)) - y).square().sum())
                if number % micro_batches == 0:
                    session.step()
                    found.append(list(reads.places))
                    reads.places.clear()
    return found[1:]
