"""A lost rank's state comes back from its peers' memory, or every rank is told that it cannot."""

import pytest

KINDS = ("RingCopies", "ParityGroup")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [(), (0,), (2,), (3,)])
def test_any_one_lost_rank_is_rebuilt_bit_by_bit(pool, kind, lost):
    answers = pool.run(4, "replicate", kind=kind, lost=lost)
    assert [answer[0] for answer in answers] == [True] * 4


def test_a_ring_survives_two_losses_that_are_no_neighbours(pool):
    assert all(answer[0] for answer in pool.run(4, "replicate", kind="RingCopies", lost=(0, 2)))


@pytest.mark.parametrize(
    ("kind", "lost", "says"), [("RingCopies", (3, 0), "both lost"), ("ParityGroup", (1, 3), "one parity")]
)
def test_more_losses_than_it_can_take_are_refused_on_every_rank(pool, kind, lost, says):
    answers = pool.run(4, "replicate", kind=kind, lost=lost)
    assert all(says in answer and "load the newest checkpoint" in answer for answer in answers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_changed_in_memory_is_not_taken_for_the_state(pool, kind):
    answers = pool.run(4, "replicate", kind=kind, lost=(1,), flip=2)
    assert "rank 1: its rebuilt state has another SHA-256" in answers[1]
    assert all(answer[0] is True for rank, answer in enumerate(answers) if rank != 1)


def test_parity_costs_a_third_of_a_copy_among_four(pool):
    copies, parities = (pool.run(4, "replicate", kind=kind, lost=()) for kind in KINDS)
    largest = max(size for _, _, size in copies)
    assert [held for _, held, _ in copies] == [copies[rank - 1][2] for rank in range(4)]
    assert all(held == -(-largest // 3) for _, held, _ in parities)
