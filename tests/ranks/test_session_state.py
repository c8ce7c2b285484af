"""What comes back when a session of a user's own model goes on from a checkpoint, and what is refused because it would not."""

import json
import textwrap

import pytest

from cost_aware_trainer.contract import EXIT_INVALID, AgentPhase

HEAD = """
import random
import numpy as np
import torch
from cost_aware_trainer import TrainingSession
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
xs, answer = torch.randn(12, 3), []
arguments = {"folder": folder, "samples": 12, "global_samples": 12, "steps": steps}
"""
LOOP = """
with TrainingSession(model, optimizer, **arguments) as session:
    for x in session.batches(lambda indices: xs[indices]):
        answer.append(session.step((model(x) - 1).square().sum()))
"""


@pytest.fixture
def run(pool, tmp_path):
    """Runs a script in so many ranks, up to a step: what each of them answers."""

    def start(text, steps=6, world=2, folder="run", **values):
        script = HEAD + textwrap.dedent(text)
        return pool.run(world, "run_text", text=script, folder=str(tmp_path / folder), steps=steps, **values)

    return start


@pytest.fixture
def is_the_same_after_a_restart(run):
    """Runs a script whole, and in two parts: what it answers, and how it ended, must be equal on every rank."""

    def compare(text, **values):
        whole = run(text, folder="whole", **values)
        assert [(rank["code"], rank["error"]) for rank in whole] == [(0, "")] * len(whole)
        first = run(text, steps=3, folder="parts", **values)
        second = run(text, folder="parts", **values)
        for alone, one, other in zip(whole, first, second, strict=True):
            assert (one["code"], one["error"], other["code"], other["error"]) == (0, "", 0, "")
            assert len(alone["answer"]) > len(one["answer"]) > 0
            assert alone["answer"] == one["answer"] + other["answer"]
        return whole

    return compare


SCHEDULERS = {
    "StepLR": "torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)",
    "MultiStepLR": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])",
    "ReduceLROnPlateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)",
}


def stepping(name):
    step = "scheduler.step(loss)" if name == "ReduceLROnPlateau" else "scheduler.step()"
    return f"""
scheduler = {SCHEDULERS[name]}
with TrainingSession(model, optimizer, **arguments, stateful={{"scheduler": scheduler}}) as session:
    for x in session.batches(lambda indices: xs[indices]):
        loss = session.step((model(x) - 1).square().sum())
        {step}
        answer.append((loss, optimizer.param_groups[0]["lr"]))
"""


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(is_the_same_after_a_restart, name):
    whole = is_the_same_after_a_restart(stepping(name))
    assert len({rate for _, rate in whole[0]["answer"]}) > 1


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_the_session_does_not_know_is_refused_by_name(run, name):
    text = stepping(name).replace(', stateful={"scheduler": scheduler}', "")
    for rank in run(text):
        assert rank["code"] == EXIT_INVALID
        assert rank["result"].outcome is AgentPhase.INVALID
        assert rank["result"].message.startswith(f"scheduler: {name} changes this optimizer's rate")


SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
with TrainingSession(model, optimizer, **arguments, scaler=scaler, clip_norm=0.5) as session:
    for x in session.batches(lambda indices: xs[indices]):
        loss = (model(x) - 1).square().sum()
        if overflows and session.step_number == 1:
            loss = loss + 1e36 * (model[2].bias * 1e3).sum()
        answer.append((session.step(loss), scaler.get_scale()))
"""


def test_a_loss_scaler_goes_on_with_its_scale_and_losses_are_not_scaled(is_the_same_after_a_restart, run):
    (scaled, _) = is_the_same_after_a_restart(SCALED, overflows=False)
    plain = run(LOOP.replace("**arguments", "**arguments, clip_norm=0.5"), folder="plain")
    assert [loss for loss, _ in scaled["answer"]] == pytest.approx(plain[0]["answer"], rel=1e-4)
    assert [scale for _, scale in scaled["answer"]] == [2.0**10, *[2.0**11] * 2, *[2.0**12] * 2, 2.0**13]


def test_a_loss_scaler_that_finds_no_finite_gradient_tries_a_smaller_scale_and_training_goes_on(run):
    for rank in run(SCALED, overflows=True):
        assert (rank["code"], rank["error"]) == (0, "")
        assert [scale for _, scale in rank["answer"]][:2] == [2.0**10, 2.0**9]


def test_a_loss_scaler_that_the_session_does_not_know_is_refused_by_name(run):
    text = LOOP.replace("(model(x) - 1).square().sum()", "scaler.scale((model(x) - 1).square().sum())")
    for rank in run('scaler = torch.amp.GradScaler("cpu")' + text):
        assert rank["code"] == EXIT_INVALID
        assert "write TrainingSession(..., scaler=scaler)" in rank["result"].message


def test_extra_state_of_modules_comes_back(is_the_same_after_a_restart):
    is_the_same_after_a_restart("""
        class Counting(torch.nn.Module):
            calls = 0
            def forward(self, x):
                self.calls += 1
                return x * (1 + 0.1 * self.calls)
            def get_extra_state(self):
                return {"calls": self.calls, "scale": np.float64(0.5), "table": np.arange(3)}
            def set_extra_state(self, state):
                assert state["table"].tolist() == [0, 1, 2] and state["scale"] == 0.5
                self.calls = state["calls"]
        model.append(Counting())
        with TrainingSession(model, optimizer, **arguments) as session:
            for x in session.batches(lambda indices: xs[indices]):
                answer.append((session.step((model(x) - 1).square().sum()), model[3].calls))
    """)


def test_random_numbers_of_torch_numpy_and_python_go_on_as_they_would_have(is_the_same_after_a_restart):
    is_the_same_after_a_restart("""
        own = {"numpy": np.random.default_rng(5), "python": random.Random(5), "torch": torch.Generator().manual_seed(5)}
        with TrainingSession(model, optimizer, **arguments, stateful=own) as session:
            for x in session.batches(lambda indices: xs[indices]):
                noise = torch.rand(3) + random.random() + float(np.random.rand())
                kept = own["numpy"].random() + own["python"].random() + float(torch.rand(1, generator=own["torch"]))
                loss = session.step((model(x * noise + kept) - 1).square().sum())
                answer.append((loss, noise.tolist(), kept))
    """)


LOADER = """
class Loader:
    position = place.rank * 100
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]
loader = Loader()
with TrainingSession(model, optimizer, **arguments, stateful={"loader": loader}) as session:
    for x in session.batches(lambda indices: xs[indices]):
        loader.position += 1
        answer.append((session.step((model(x) - 1).square().sum()), loader.position))
"""


def test_each_rank_s_loader_goes_on_at_its_own_position(is_the_same_after_a_restart):
    whole = is_the_same_after_a_restart(LOADER)
    assert [rank["answer"][-1][1] for rank in whole] == [6, 106]


def test_positions_of_two_ranks_are_not_shared_out_to_three_in_silence(run):
    run(LOADER, steps=3)
    for rank in run(LOADER, world=3):
        assert rank["code"] == EXIT_INVALID
        assert (
            "loader: 2 ranks saved a state of their own each, which cannot be shared out to 3" in rank["result"].message
        )


COMPILED = "model = torch.compile(model, backend='eager')"


def test_compiled_modules_are_saved_under_the_names_of_the_modules_and_loaded_by_either(run, tmp_path):
    alone = run(LOOP, folder="alone")[0]["answer"]
    assert run(COMPILED + LOOP, steps=3)[0]["answer"] == pytest.approx(alone[:3], rel=1e-5)
    (manifest,) = (tmp_path / "run").glob("step-*/manifest.json")
    assert "_orig_mod" not in manifest.read_text()
    assert run(LOOP, steps=4)[0]["answer"] == pytest.approx(alone[3:4], rel=1e-5)
    assert run(COMPILED + LOOP)[0]["answer"] == pytest.approx(alone[4:], rel=1e-5)


def test_a_checkpoint_of_a_compiled_module_of_old_is_loaded(run, tmp_path):
    alone = run(LOOP, folder="alone")[0]["answer"]
    old = """
        from unittest import mock
        from cost_aware_trainer.state import session_state
        patch = mock.patch.object(session_state, "plain", str)
        patch.start()
    """
    ended = run(textwrap.dedent(old) + COMPILED + LOOP + "patch.stop()", steps=3)
    assert [(rank["code"], rank["error"]) for rank in ended] == [(0, "")] * 2
    (manifest,) = (tmp_path / "run").glob("step-*/manifest.json")
    assert "model._orig_mod.0.weight" in json.loads(manifest.read_text())["tensors"]
    assert run(COMPILED + LOOP, steps=4)[0]["answer"] == pytest.approx(alone[3:4], rel=1e-5)
    assert run(LOOP)[0]["answer"] == pytest.approx(alone[4:], rel=1e-5)


def test_a_rate_that_the_loop_changed_comes_back_and_one_that_the_script_changed_counts(run):
    text = LOOP + "        optimizer.param_groups[0]['lr'] *= 0.5\n" + "answer = optimizer.param_groups[0]"
    first = run(text, steps=3, world=1)
    assert first[0]["answer"]["lr"] == 0.1 / 8
    again = run(text, steps=4, world=1)
    assert again[0]["answer"]["lr"] == 0.1 / 16
    changed = "optimizer.param_groups[0]['weight_decay'] = 0.5\n" + text
    (after,) = run(changed, steps=5, world=1)
    assert after["answer"]["lr"] == 0.1 / 32
    assert after["answer"]["weight_decay"] == 0.5


def test_weights_that_an_update_made_infinite_are_never_saved(run, tmp_path):
    text = LOOP.replace("**arguments", "**arguments, learning_rate=lambda step: 1e-3 if step < 4 else float('inf')")
    run(text, steps=3)
    (kept,) = (tmp_path / "run").glob("step-*")
    for rank in run(text, steps=4):
        assert "is not finite after the update, so this state is not saved" in rank["error"]
    assert rank["result"] is None or rank["result"].outcome is AgentPhase.FAILED
    assert list((tmp_path / "run").glob("step-*/manifest.json")) == [kept / "manifest.json"]


REFUSED = {
    "a criterion's own parameters": (
        "scale = torch.nn.Parameter(torch.ones(5)); optimizer.add_param_group({'params': [scale]})",
        "optimizer: group 1 holds a parameter of shape (5,) that is not of the model",
    ),
    "a function among states": (
        "arguments['stateful'] = {'mine': type('Mine', (), {'state_dict': lambda s: {'f': random.seed}})()}",
        "mine: the state of Mine would not come back after a restart",
    ),
    "a name of the session's own": ("arguments['stateful'] = {'model': model}", "stateful: model is a name of"),
    "a state made by a hook": (
        "model.register_state_dict_post_hook(lambda m, state, *_: state.update({'0.weight': state['0.weight'] + 0}))",
        "model: 0.weight in its state_dict() is made anew by a hook",
    ),
    "a process group of the script's own": (
        "import os; os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0', 'RANK': '0', 'WORLD_SIZE': '1'}\n"
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
        "process group: the script has made the default one already",
    ),
    "DistributedDataParallel": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(model); dist.destroy_process_group()",
        "model: it is wrapped in DistributedDataParallel",
    ),
    "another optimizer than the checkpoint's": (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        "optimizer: the checkpoint holds exp_avg, exp_avg_sq, step of 0.weight, SGD keeps momentum_buffer",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_go_wrong_later_is_refused_at_the_start_by_name(run, what):
    change, says = REFUSED[what]
    run(LOOP, steps=2)
    for rank in run(change + "\n" + LOOP):
        assert (rank["code"], rank["error"]) == (EXIT_INVALID, "")
        assert says in rank["result"].message


FAILING = {
    "a parameter that is thawed later": (
        LOOP.replace("with Tr", "model[0].weight.requires_grad_(False)\nwith Tr")
        + "        model[0].weight.requires_grad_(True)",
        "GradientError: 0.weight: it did not require a gradient when the session began",
    ),
    "a sparse gradient": (
        "model = torch.nn.Sequential(torch.nn.Embedding(12, 1, sparse=True))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1); xs = torch.arange(12)\n" + LOOP,
        "GradientError: 0.weight: its gradient is sparse, which ranks do not sum; write sparse=False",
    ),
    "a module that is checkpointed more often from step to step": (
        """
from torch.utils.checkpoint import checkpoint
layer = torch.nn.Linear(3, 3)
model.insert(0, layer); optimizer = torch.optim.AdamW(model.parameters())
with TrainingSession(model, optimizer, **arguments) as session:
    for x in session.batches(lambda indices: xs[indices]):
        x.requires_grad_(True)
        for _ in range(1 + session.step_number):
            x = checkpoint(layer, x, use_reentrant=True)
        session.step((model[1:](x) - 1).square().sum())
""",
        "GradientError: 0.bias: its gradient grew 2 times in this step and was summed over the ranks after 1",
    ),
}


@pytest.mark.parametrize("what", FAILING)
def test_what_cannot_be_summed_rightly_ends_with_the_parameter_s_name(run, what):
    text, says = FAILING[what]
    for rank in run(text):
        assert rank["code"] == 1
        assert says in rank["error"]


def test_the_rank_that_fails_says_why_and_its_peers_do_not_say_otherwise(run):
    text = """
        def load(indices):
            if place.rank == 1 and session.step_number == 2:
                raise KeyError("image 17 is missing")
            return xs[indices]
        with TrainingSession(model, optimizer, **arguments) as session:
            for x in session.batches(load):
                session.step((model(x) - 1).square().sum())
    """
    first, second = run(text)
    assert second["result"].outcome is AgentPhase.FAILED
    assert second["result"].message == "rank 1, step 3: KeyError: 'image 17 is missing'"
    assert first["code"] == 1
    assert first["result"] is None


@pytest.mark.parametrize(("choice", "steps"), [("stop", None), ("restart", 6)])
def test_where_all_checkpoints_are_damaged_a_session_stops_or_begins_again_as_it_is_told(run, tmp_path, choice, steps):
    run(LOOP, steps=3)
    for manifest in (tmp_path / "run").glob("step-*/manifest.json"):
        manifest.write_text("{")
    again = run(f"arguments['on_all_damaged'] = {choice!r}\n" + LOOP)
    if steps:
        assert [len(rank["answer"]) for rank in again] == [steps, steps]
    else:
        assert all(rank["code"] != 0 and rank["answer"] == [] for rank in again)
    assert list((tmp_path / "run").glob("step-00000003*" if not steps else "damaged-*")), "what is damaged is kept"
