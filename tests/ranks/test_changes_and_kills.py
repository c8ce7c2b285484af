"""One run, changed and killed at random moments, against the same run left alone.

`CATJ_CHAOS_SEED` repeats a run of this test; its seed is printed.
"""

import dataclasses
import os
import random
import signal
import time

import pytest
from devtools.steps_log import steps_of
from tests.support.ranks.agents import order_of, ranks_of

from cost_aware_trainer.contract import AgentPhase, DegreesPlan

SEED = int(os.environ.get("CATJ_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
LAYOUTS = [DegreesPlan(data=2), DegreesPlan(tensor=2), DegreesPlan(pipeline=2), DegreesPlan()]
# changes, kills, steps
SIZES = [(4, 2, 300), pytest.param(10, 5, 600, marks=pytest.mark.exhaustive)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("changes", "kills", "all_steps"), SIZES)
def test_random_changes_and_kills_train_exactly_the_samples_of_a_run_left_alone(
    changes, kills, all_steps, start_agent, make_plan, finish, tmp_path
):
    print(f"CATJ_CHAOS_SEED={SEED}")
    chooser = random.Random(SEED)
    undisturbed = finish(make_plan("undisturbed", steps=all_steps))
    plan, log = make_plan("disturbed", steps=all_steps, interval_seconds=0.3), tmp_path / "steps.jsonl"
    agent, attempt, degrees = start_agent(), 0, LAYOUTS[0]

    def order(attempt):
        entry = ["-m", "cost_aware_trainer", "--steps-log", str(log)]
        changed = dataclasses.replace(plan, degrees=degrees)
        return order_of(agent, attempt, entry, changed, ranks_per_node=degrees.ranks, drain_seconds=30)

    def trained():
        """Steps of the newest attempt, of which a change in process has no end but a first step."""
        assert agent.status.phase is not AgentPhase.FAILED, agent.status.message
        return len([step for step in steps_of(log) if step["attempt"] == attempt])

    # every change and every kill hits a run that has trained a few steps since the one before
    events = ["change"] * changes + ["kill"] * kills
    chooser.shuffle(events)
    for event in ["start", *events]:
        if event == "change":
            degrees = chooser.choice([other for other in LAYOUTS if other != degrees])
        elif event == "kill":
            time.sleep(chooser.uniform(0, 0.5))
            victim = chooser.choice(ranks_of(agent))
            os.kill(victim, signal.SIGKILL)
            agent.wait_for(AgentPhase.FAILED)
        attempt += 1
        assert agent.send("/order", order(attempt)) == 202
        steps = chooser.randrange(3, 12)
        agent.wait_until(lambda steps=steps: trained() >= steps, timeout=120)
    result = agent.wait_for(AgentPhase.COMPLETED, timeout=360).result
    assert result.samples_checksum == undisturbed.result.samples_checksum
    assert result.samples == undisturbed.result.samples == all_steps * plan.batch.global_samples
    kept = _kept(steps_of(log))
    alone = {step["step"]: step for step in undisturbed.steps}
    assert list(kept) == list(range(1, all_steps + 1))
    assert [(s["sample_first"], s["sample_last"]) for s in kept.values()] == [
        (s["sample_first"], s["sample_last"]) for s in alone.values()
    ]
    # rounding differs between layouts, and training makes it grow
    assert [s["loss"] for s in kept.values()] == pytest.approx([s["loss"] for s in alone.values()], abs=1e-3)


def _kept(steps):
    """The steps that made the final weights: of a step that was trained again after a kill, the last one."""
    return dict(sorted({step["step"]: step for step in steps}.items()))
