"""The queue: one worker a key, nothing lost, failures back off."""

from __future__ import annotations

import asyncio

from cost_aware_operator.control.loop.queue import KeyedQueue


def make() -> KeyedQueue[str]:
    return KeyedQueue(lambda: asyncio.get_running_loop().time())


async def test_a_key_asked_for_many_times_is_worked_on_once() -> None:
    queue = make()
    for _ in range(5):
        await queue.add("a")
    assert len(queue) == 1


async def test_a_key_is_never_worked_on_by_two_workers_and_a_change_meanwhile_is_not_lost() -> None:
    queue = make()
    await queue.add("a")
    key = await queue.take()
    await queue.add("a")
    assert len(queue) == 0
    await queue.done(key)
    assert await asyncio.wait_for(queue.take(), 1) == "a"


async def test_the_earliest_time_counts() -> None:
    queue = make()
    queue.add_after("a", 0.05)
    queue.add_after("a", 60)
    assert await asyncio.wait_for(queue.take(), 2) == "a"


async def test_a_failure_comes_back_later_each_time() -> None:
    queue = make()
    loop = asyncio.get_running_loop()
    await queue.add("a")
    waits = []
    for _ in range(3):
        key = await queue.take()
        began = loop.time()
        await queue.done(key, failed=True)
        if len(waits) < 2:
            await asyncio.wait_for(_until_ready(queue), 10)
            waits.append(loop.time() - began)
    assert waits[1] > waits[0] > 0


async def _until_ready(queue: KeyedQueue[str]) -> None:
    while not len(queue):  # noqa: ASYNC110  the queue tells nobody but the one who takes
        await asyncio.sleep(0.01)


async def test_the_age_of_the_oldest_waiting_key_is_told() -> None:
    queue = make()
    assert queue.oldest_seconds == 0.0
    await queue.add("a")
    await asyncio.sleep(0.05)
    assert queue.oldest_seconds >= 0.04
    await queue.take()
    assert queue.oldest_seconds == 0.0
