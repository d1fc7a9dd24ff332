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

    async def told(self, events: int) -> None:
        """Waits for so many events."""
        async with asyncio.timeout(60):
            while len(self.bodies) < events:
                self.wrote.clear()
                await self.wrote.wait()


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


def transition(reason: str, uid: str = "uid", *, warning: bool = False) -> Notice:
    return Notice("v1", "Job", "ns", "j", uid, reason, "because", warning=warning, transition=True)


async def test_a_transition_that_still_waits_gives_way_to_the_next_of_its_object() -> None:
    """Warnings, what is no transition, and other objects' transitions stay."""
    recorder = Recorder()
    queue = EventQueue(recorder, Metrics(), instance="i", lanes=Lanes(4))  # type: ignore[arg-type]
    for notice in (
        transition("Admitted"),
        Notice("v1", "Job", "ns", "j", "uid", "SpeedQuarantined", "because"),
        transition("Admitted", uid="other"),
        transition("Running"),
        transition("Failed", warning=True),
        transition("Queued"),
        transition("Queued"),
    ):
        queue.put(notice)
    task = asyncio.create_task(queue.run())
    await recorder.told(4)
    queue.put(transition("Admitted"))  # the one before it is sent, so it is not replaced
    await recorder.told(5)
    task.cancel()
    told = [(b["involvedObject"]["uid"], b["reason"], b["count"]) for b in recorder.bodies]
    assert told == [
        ("uid", "SpeedQuarantined", 1),
        ("other", "Admitted", 1),
        ("uid", "Failed", 1),
        ("uid", "Queued", 2),
        ("uid", "Admitted", 1),
    ]
