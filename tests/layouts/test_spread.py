"""A spread of layouts of four ranks, chosen on purpose: every two choices that go together meet in at least one run.

`CHOSEN` is the whole choice. Choices that are exact (layout, schedule, sharding, recompute, embeddings) meet pairwise in runs of fp32
without compression, whose losses must be those of one rank; precision and compression, which round, meet each of them in further runs.
`test_every_two_choices_meet` says which pair is missing, should a choice be added. All layouts one by one are `exhaustive` tests.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.support.ranks.layouts import MODELS, assert_same_run, layouts, losses, name_of

from cost_aware_trainer.contract import Compression, DegreesPlan, Precision, Recompute, Schedule, Sharding
from cost_aware_trainer.state.validation import InvalidRunError, check_plan

CHOSEN = """
layout schedule      sharding recompute embeddings precision compression
1x1x4  1f1b          none     full      tied       fp32      none
1x1x4  gpipe         none     selective untied     fp32      none
1x1x4  zero-bubble   none     none      untied     fp32      none
1x2x2  1f1b          none     selective tied       fp32      none
1x2x2  gpipe         none     full      untied     fp32      none
1x2x2  interleaved   none     selective tied       fp32      none
1x2x2  zero-bubble   none     none      tied       fp32      none
1x2x2  zero-bubble-v none     none      tied       fp32      none
1x4x1  1f1b          none     full      tied       fp32      none
1x4x1  1f1b          none     none      untied     fp32      none
1x4x1  1f1b          none     selective tied       fp32      none
2x1x2  1f1b          zero3    full      tied       fp32      none
2x1x2  gpipe         zero1    none      untied     fp32      none
2x1x2  gpipe         zero2    selective tied       fp32      none
2x1x2  gpipe         zero3    none      untied     fp32      none
2x1x2  interleaved   zero1    selective untied     fp32      none
2x1x2  interleaved   zero2    full      tied       fp32      none
2x1x2  interleaved   zero3    none      untied     fp32      none
2x1x2  zero-bubble   none     none      untied     fp32      none
2x1x2  zero-bubble-v none     none      untied     fp32      none
2x2x1  1f1b          none     full      untied     fp32      none
2x2x1  1f1b          zero1    none      untied     fp32      none
2x2x1  1f1b          zero2    selective untied     fp32      none
2x2x1  1f1b          zero3    selective tied       fp32      none
4x1x1  1f1b          none     selective untied     fp32      none
4x1x1  1f1b          zero1    full      tied       fp32      none
4x1x1  1f1b          zero2    none      untied     fp32      none
4x1x1  1f1b          zero3    selective untied     fp32      none
1x1x4  gpipe         none     selective tied       bf16      none
1x2x2  zero-bubble   none     none      untied     bf16      none
1x4x1  1f1b          none     none      untied     bf16      none
2x1x2  gpipe         zero1    selective untied     bf16      int4
2x1x2  gpipe         zero1    selective tied       fp32      int8
2x1x2  gpipe         zero3    selective untied     bf16      bf16
2x1x2  interleaved   zero2    none      untied     bf16      int8
2x1x2  interleaved   zero2    none      tied       bf16      bf16
2x1x2  interleaved   zero3    selective tied       fp32      int4
2x1x2  zero-bubble   none     none      untied     bf16      bf16
2x1x2  zero-bubble   none     none      tied       bf16      int8
2x1x2  zero-bubble   none     none      tied       fp32      int4
2x1x2  zero-bubble-v none     none      untied     bf16      bf16
2x1x2  zero-bubble-v none     none      untied     fp32      int4
2x1x2  zero-bubble-v none     none      untied     fp32      int8
2x2x1  1f1b          none     none      tied       fp32      int4
2x2x1  1f1b          zero3    selective untied     bf16      bf16
2x2x1  1f1b          zero3    selective tied       bf16      int8
4x1x1  1f1b          none     full      untied     bf16      int8
4x1x1  1f1b          zero1    full      tied       fp32      bf16
4x1x1  1f1b          zero2    full      tied       bf16      int4
"""
RANKS = 4
STEPS = 10
"""Half as many as the exhaustive tests train: three to warm up, and seven in which every choice is at work."""
LAYOUTS = {name_of(degrees): degrees for degrees in layouts(RANKS)}
INTERLEAVES = {Schedule.INTERLEAVED: 2, Schedule.ZERO_BUBBLE_V: 2}
LOOSE_BF16 = 0.01
"""Nats between losses of two layouts that both compute in bf16."""
LOOSE = {Compression.BF16: 0.005, Compression.INT8: 0.01, Compression.INT4: 0.02}
"""Largest share of the last loss by which a compressed run may differ from one that is not."""


@dataclass(frozen=True)
class Choice:
    """One run's choices; the names are those of the table's columns."""

    layout: str
    schedule: Schedule
    sharding: Sharding
    recompute: Recompute
    embeddings: str
    precision: Precision
    compression: Compression

    @classmethod
    def of(cls, words: tuple[str, ...]) -> "Choice":
        layout, schedule, sharding, recompute, embeddings, precision, compression = words
        return cls(
            layout, Schedule(schedule), Sharding(sharding), Recompute(recompute), embeddings, Precision(precision),
            Compression(compression),
        )  # fmt: skip

    @property
    def degrees(self) -> DegreesPlan:
        return LAYOUTS[self.layout]

    @property
    def model(self):
        return dataclasses.replace(MODELS[RANKS], tied_embeddings=self.embeddings == "tied")

    @property
    def strategy(self) -> dict[str, object]:
        """The rest of it, as `plan_of` takes it."""
        given = {"schedule": self.schedule, "interleave": INTERLEAVES.get(self.schedule, 1), "sharding": self.sharding}
        given |= {"recompute": self.recompute, "precision": self.precision, "compression": self.compression}
        # seven micro-batches or more for two stages in the shape of a V
        return given | ({"micro": 2} if self.schedule is Schedule.ZERO_BUBBLE_V else {})

    @property
    def is_exact(self) -> bool:
        return self.precision is Precision.FP32 and self.compression is Compression.NONE

    @property
    def is_meant(self) -> bool:
        """Whether each choice does something: a schedule without stages and sharding without replicas do not."""
        staged, replicated = self.degrees.pipeline > 1, self.degrees.data > 1
        plain = self.sharding is Sharding.NONE and self.compression is Compression.NONE
        return (staged or self.schedule is Schedule.ONE_FORWARD_ONE_BACKWARD) and (replicated or plain)

    @property
    def pairs(self) -> set[frozenset[tuple[str, str]]]:
        """The pairs of choices that this run stands for."""
        given = {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}
        rounding = {("precision", "bf16"), *(("compression", kind.value) for kind in LOOSE)}
        if self.is_exact:
            del given["precision"], given["compression"]
        pairs = {frozenset(pair) for pair in itertools.combinations(given.items(), 2)}
        return pairs if self.is_exact else {pair for pair in pairs if pair & rounding}


SPREAD = [Choice.of(tuple(line.split())) for line in CHOSEN.strip().splitlines()[1:]]


def all_choices() -> Iterator[Choice]:
    embeddings = ("tied", "untied")
    for words in itertools.product(LAYOUTS, Schedule, Sharding, Recompute, embeddings, Precision, Compression):
        if (choice := Choice.of(words)).is_meant:
            yield choice


def test_every_two_choices_meet(plan_of):
    def is_valid(choice):
        try:
            check_plan(plan_of(choice.degrees, model=choice.model, folder="unused", **choice.strategy), RANKS)
        except InvalidRunError:
            return False
        return True

    assert all(is_valid(choice) for choice in SPREAD)
    met = set().union(*(choice.pairs for choice in SPREAD))
    missing = {
        pair for choice in all_choices() if choice.pairs - met and is_valid(choice) for pair in choice.pairs - met
    }
    assert missing == set(), "write a row for each into CHOSEN"


@pytest.mark.parametrize("choice", SPREAD, ids=lambda choice: "-".join(map(str, dataclasses.astuple(choice))))
def test_every_choice_has_one_rank_s_losses(train, plan_of, reference, choice):
    run = train(plan_of(choice.degrees, model=choice.model, steps=STEPS, **choice.strategy))
    exact = reference(choice.model, steps=STEPS)
    if choice.is_exact:
        assert_same_run(run, exact)
        return
    assert run["result"]["samples_checksum"] == exact["result"]["samples_checksum"]
    assert losses(run) != losses(exact)
    if choice.compression is Compression.NONE:
        alone = reference(choice.model, steps=STEPS, precision=choice.precision)
        assert losses(run) == pytest.approx(losses(alone), abs=LOOSE_BF16)
        return
    loosely = LOOSE[choice.compression] + (0.005 if choice.precision is Precision.BF16 else 0.0)
    for key in ("loss", "heldout_loss"):
        assert run["result"][key] == pytest.approx(exact["result"][key], rel=loosely)
