"""Events: equal notices become one event with a count."""

from __future__ import annotations

import asyncio
from typing import Any

from busbar.kube.errors import AlreadyExists
from busbar.operator.metrics import Metrics
from busbar.operator.write.events import EventQueue, Notice
from busbar.operator.write.lanes import Lanes


class Recorder:
    """Accepts the writes of the event queue."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.wrote = asyncio.Event()

    async def create(self, resource: Any, body: dict[str, Any], namespace: str) -> dict[str, Any]:
        self.bodies.append(body)
        self.wrote.set()
        return body


async def test_equal_notices_become_one_event_with_a_count() -> None:
    recorder = Recorder()
    queue = EventQueue(recorder, Metrics(), instance="i", lanes=Lanes(4))  # type: ignore[arg-type]
    notice = Notice("v1", "Pod", "ns", "p", "uid", "Waiting", "because")
    for _ in range(3):
        queue.put(notice)
    task = asyncio.create_task(queue.run())
    await recorder.wrote.wait()
    task.cancel()
    assert [b["count"] for b in recorder.bodies] == [3]


class Existing(Recorder):
    """A server that has the event already and, like the chart's role, gives no right to read events."""

    def __init__(self) -> None:
        super().__init__()
        self.event: dict[str, Any] = {"count": 4, "lastTimestamp": ""}

    async def create(self, resource: Any, body: dict[str, Any], namespace: str) -> dict[str, Any]:
        raise AlreadyExists(409, "AlreadyExists", "", "")

    async def patch(self, resource: Any, name: str, patch: dict[str, Any], namespace: str) -> dict[str, Any]:
        self.event |= patch
        if "count" in patch:
            self.wrote.set()
        return dict(self.event)


async def test_an_event_that_was_told_before_is_counted_without_reading_events() -> None:
    existing = Existing()
    queue = EventQueue(existing, Metrics(), instance="i", lanes=Lanes(4))  # type: ignore[arg-type]
    for _ in range(2):
        queue.put(Notice("v1", "Pod", "ns", "p", "uid", "Waiting", "because"))
    task = asyncio.create_task(queue.run())
    async with asyncio.timeout(60):
        await existing.wrote.wait()
    task.cancel()
    assert existing.event["count"] == 6
    assert existing.event["lastTimestamp"]
