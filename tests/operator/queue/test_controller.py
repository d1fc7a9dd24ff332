"""What a reconcile's error does: the object is tried again, and nothing else ends."""

from __future__ import annotations

import asyncio

import pytest

from busbar.kube.errors import ConnectionFailed, Forbidden, NotFound, ServerError
from busbar.kube.informer import Key
from busbar.operator.decisions import Decision
from busbar.operator.errors import Fenced, LaneFull
from busbar.operator.metrics import Metrics
from busbar.operator.queue import controller as module
from busbar.operator.queue.controller import Controller, Item, Outcome

KEY = Key("ns", "a")


@pytest.mark.parametrize("error", [Fenced("not held"), LaneFull("no place")])
async def test_a_write_that_was_stopped_or_had_no_place_is_made_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FENCED_AGAIN_S", 0.01)
    monkeypatch.setattr(module, "NO_PLACE_AGAIN_S", 0.01)
    controller, done, tries = Controller(Metrics(), workers=1), asyncio.Event(), 0

    async def reconcile(key: Key, decisions: tuple[Decision, ...]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise error
        done.set()

    controller.handles("Kind", reconcile)
    controller.add("Kind", KEY)
    task = asyncio.create_task(controller.run())
    async with asyncio.timeout(60):
        await done.wait()
    assert not task.done()
    task.cancel()


async def test_paused_workers_begin_nothing_new() -> None:
    controller, may, begun = Controller(Metrics(), workers=2), asyncio.Event(), list[str]()

    async def reconcile(key: Key, decisions: tuple[Decision, ...]) -> None:
        begun.append(key.name)
        await may.wait()

    controller.handles("Kind", reconcile)
    workers = asyncio.create_task(controller.run())
    running = asyncio.create_task(controller.process(Item("Kind", KEY)))
    await asyncio.sleep(0)
    controller.pause()
    controller.add("Kind", Key("ns", "b"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == ["a"]
    may.set()
    async with asyncio.timeout(60):
        await running
    assert begun == ["a"]
    controller.resume()
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == ["a", "b"]
    workers.cancel()


async def test_objects_that_find_no_place_are_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NO_PLACE_AGAIN_S", 0.02)
    controller, tries = Controller(Metrics(), workers=1, backoff_s=(0.02, 60.0)), 0

    async def reconcile(key: Key, decisions: tuple[Decision, ...]) -> None:
        nonlocal tries
        tries += 1
        raise LaneFull("no place")

    controller.handles("Kind", reconcile)
    controller.add("Kind", KEY)
    task = asyncio.create_task(controller.run())
    await asyncio.sleep(0.5)
    assert 2 <= tries <= 8  # a pause that did not grow would allow 25 to 50
    task.cancel()
    controller.queue.close()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.OK),
        (Fenced("not held"), Outcome.FENCED),
        (LaneFull("no place"), Outcome.LATER),
        (NotFound(404, "NotFound", "gone", "PATCH"), Outcome.CONFLICT),
        (Forbidden(403, "Forbidden", "refused", "PATCH"), Outcome.ERROR),
        (ServerError(504, "Timeout", "too late", "PATCH"), Outcome.UNKNOWN),
        (ConnectionFailed("reset"), Outcome.UNKNOWN),
        (KeyError("a bug"), Outcome.BUG),
    ],
)
async def test_a_reconcile_says_whether_its_write_was_done(error: Exception | None, outcome: Outcome) -> None:
    controller = Controller(Metrics(), workers=1)

    async def reconcile(key: Key, decisions: tuple[Decision, ...]) -> None:
        if error is not None:
            raise error

    controller.handles("Kind", reconcile)
    assert await controller.process(Item("Kind", KEY)) is outcome
    controller.queue.close()
