"""Ranks as threads over a store in memory: how long they wait for each other's storage."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from cost_aware_trainer.data.hashing import PIECE_BYTES
from cost_aware_trainer.distributed.meetings import Meetings, StorageError

RANKS = 3


@pytest.fixture
def together():
    def run(work, patience_seconds=0.3, times=1):
        store = dist.HashStore()

        def rank(number):
            meetings = Meetings(store, number, RANKS, timedelta(seconds=patience_seconds))
            return [work(meetings.call("x"), number) for _ in range(times)]

        with ThreadPoolExecutor(RANKS) as pool:
            return [future.result() for future in [pool.submit(rank, number) for number in range(RANKS)]]

    return run


def test_a_rank_that_reads_on_is_waited_for_however_long_it_takes(together):
    def work(meeting, rank):
        for _ in range(12 if rank == 1 else 0):
            time.sleep(0.1)
            meeting.progressed(PIECE_BYTES)
        return meeting.agree()

    started = time.monotonic()
    assert together(work) == [[""]] * RANKS
    assert time.monotonic() - started > 1.0


def test_ranks_without_progress_are_given_up_and_named(together):
    gone = threading.Event()

    def work(meeting, rank):
        if rank == 2:
            gone.wait(5)
            return ""
        try:
            return meeting.agree()
        except StorageError as error:
            gone.set()
            return str(error)

    answers = together(work)
    assert "ranks 2 have neither read nor written" in answers[0][0]


def test_a_slow_store_has_time_for_a_piece_at_the_bandwidth_that_it_has_shown(together):
    def work(meeting, rank):
        for _ in range(2 if rank == 0 else 0):
            time.sleep(0.6)
            meeting.progressed(PIECE_BYTES)
        return meeting.agree()

    # the first piece takes longer than the patience: it must have been told before
    with pytest.raises(StorageError):
        together(work)

    def told(meeting, rank):
        if rank == 0:
            meeting.progressed(PIECE_BYTES // 8)
        return work(meeting, rank)

    assert together(told) == [[""]] * RANKS


def test_the_problem_of_the_lowest_rank_is_told_to_all_and_meetings_of_a_name_follow_each_other(together):
    def work(meeting, rank):
        return meeting.agree(f"rank {rank}: full" if rank else "")

    assert together(work, times=4) == [["rank 1: full"] * 4] * RANKS


def test_a_rank_alone_waits_for_nobody():
    meeting = Meetings(None, 0, 1, timedelta(seconds=1)).call("x")
    meeting.progressed(5)
    assert meeting.agree("no") == "no"


def test_ranks_that_are_gone_are_not_waited_for_once_that_is_known():
    meetings = Meetings(dist.HashStore(), 0, 2, timedelta(seconds=60))
    threading.Timer(0.1, meetings.abandon).start()
    started = time.monotonic()
    with pytest.raises(StorageError, match="are gone"):
        meetings.call("x").agree()
    assert time.monotonic() - started < 10


def test_the_rank_that_may_hold_the_store_leaves_last():
    store, left = dist.HashStore(), []

    def rank(number):
        Meetings(store, number, 2, timedelta(seconds=10)).call("x").agree()
        left.append(number)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rank, 0)
        time.sleep(0.1)
        pool.submit(rank, 1).result()
        first.result()
    assert sorted(left) == [0, 1]
    assert store.add("x/0/left", 0) == 2
