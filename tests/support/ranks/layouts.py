"""Models and layouts that runs are compared on, and what makes two runs the same."""

import pytest

from cost_aware_trainer.contract import DegreesPlan, ModelPlan

GLOBAL_SAMPLES = 16
# Odd layer counts; fewer key heads than heads; eight stages and eight tensor ranks for the larger.
MODELS = {
    4: ModelPlan(layers=5, hidden=32, heads=8, kv_heads=4, ffn=48, sequence_length=16, vocabulary=256),
    8: ModelPlan(layers=9, hidden=32, heads=16, kv_heads=8, ffn=48, sequence_length=16, vocabulary=256),
}
TOLERANCE = 1e-5
"""Largest difference of a loss between layouts: rounding, as sums are made in another order."""


def layouts(ranks):
    """All ways to write a number of ranks as data × tensor × pipeline."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [
        DegreesPlan(data=data, tensor=tensor, pipeline=ranks // data // tensor)
        for data in divisors
        for tensor in divisors
        if ranks % (data * tensor) == 0
    ]


def name_of(value):
    return f"{value.data}x{value.tensor}x{value.pipeline}" if isinstance(value, DegreesPlan) else None


def losses(run):
    return [step["loss"] for step in run["steps"]]


def assert_same_run(run, expected):
    assert losses(run) == pytest.approx(losses(expected), abs=TOLERANCE)
    assert run["result"]["heldout_loss"] == pytest.approx(expected["result"]["heldout_loss"], abs=TOLERANCE)
    assert run["result"]["samples_checksum"] == expected["result"]["samples_checksum"]
