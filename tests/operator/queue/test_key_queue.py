"""The queue of keys: each key once, and longer waits after failures in a row."""

from __future__ import annotations

import asyncio

from busbar.operator.queue.key_queue import KeyQueue


async def test_a_key_added_while_it_is_worked_on_runs_once_more() -> None:
    queue: KeyQueue[str] = KeyQueue()
    queue.add("a")
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert queue.idle


async def test_urgent_keys_go_first_in_their_order_and_each_key_once() -> None:
    queue: KeyQueue[str] = KeyQueue()
    queue.add("a")
    queue.add("b")
    queue.add("c", urgent=True)
    queue.add("b", urgent=True)
    queue.add("c")
    assert len(queue) == 3
    assert [await queue.get() for _ in range(3)] == ["c", "b", "a"]
    assert len(queue) == 0


async def test_a_key_that_becomes_urgent_while_it_is_worked_on_is_urgent_afterwards() -> None:
    queue: KeyQueue[str] = KeyQueue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("b")
    queue.add("a", urgent=True)
    queue.add("a")
    queue.done("a")
    assert await queue.get() == "a"


async def test_failures_in_a_row_wait_longer_and_a_success_forgets_them() -> None:
    queue: KeyQueue[str] = KeyQueue(backoff_s=(1.0, 5.0))
    waits = [queue.failed("a") for _ in range(5)]
    assert all(0.5 * 2**i <= w <= 2**i for i, w in enumerate(waits[:3]))
    assert waits[-1] <= 5.0
    queue.succeeded("a")
    assert queue.failed("a") <= 1.0
    queue.close()


async def test_a_failure_may_begin_with_a_longer_pause() -> None:
    queue: KeyQueue[str] = KeyQueue(backoff_s=(1.0, 10.0))
    waits = [queue.failed("a", least_s=4.0) for _ in range(3)]
    assert 2.0 <= waits[0] <= 4.0 <= waits[1] <= 8.0
    assert 5.0 <= waits[2] <= 10.0
    queue.close()


async def test_a_key_wakes_one_worker_and_the_others_go_on_sleeping() -> None:
    queue: KeyQueue[int] = KeyQueue()
    workers = [asyncio.create_task(queue.get()) for _ in range(4)]
    await asyncio.sleep(0)
    queue.add(7)
    assert [waiter.done() for waiter in queue._waiters] == [False] * 3
    assert await workers[0] == 7
    for worker in workers[1:]:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def test_a_key_whose_worker_is_cancelled_as_it_is_woken_goes_to_another() -> None:
    queue: KeyQueue[int] = KeyQueue()
    first, second = (asyncio.create_task(queue.get()) for _ in range(2))
    await asyncio.sleep(0)
    queue.add(7)
    first.cancel()
    assert await second == 7
    assert first.cancelled()
    gone = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    queue.add(8)
    assert await queue.get() == 8
