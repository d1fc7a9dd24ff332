"""What waiting jobs are told, when, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from busbar.kube.informer import Key
from busbar.operator.decisions import Decision, Forecast, Reserved, Wait
from busbar.operator.metrics import Metrics
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.sentences import Sentences

FORECAST = Forecast(datetime(2026, 11, 22, tzinfo=UTC), (1.0, 2.0))


def item(name: str) -> Item:
    return Item("TrainingJob", Key("ns", name))


class Told:
    """A controller whose reconciles only note what they were given."""

    def __init__(self) -> None:
        self.controller = Controller(Metrics(), workers=1)
        self.controller.handles("TrainingJob", self._note)
        self.seen: list[tuple[str, tuple[Decision, ...]]] = []
        self.may = asyncio.Event()
        self.may.set()

    async def _note(self, key: Key, decisions: tuple[Decision, ...]) -> None:
        await self.may.wait()
        self.seen.append((key.name, decisions))


@asynccontextmanager
async def telling(told: Told, *, per_s: float = 1000.0, every_s: float = 60.0) -> AsyncIterator[Sentences]:
    sentences = Sentences(told.controller, per_s=per_s, every_s=every_s)
    task = asyncio.create_task(sentences.run())
    yield sentences
    assert not task.done()
    task.cancel()


async def settled() -> None:
    await asyncio.sleep(0.05)


async def test_of_what_is_queued_about_an_object_the_latest_goes() -> None:
    told = Told()
    told.controller.pause()
    async with telling(told) as sentences:
        for text in ("first", "second", "third"):
            sentences.put(item("a"), [Wait("FairShare", text)], is_new=True)
        assert len(sentences) == 1
        told.controller.resume()
        await settled()
    assert told.seen == [("a", (Wait("FairShare", "third"),))]


async def test_new_reasons_go_at_once_and_the_rest_once_in_its_time_in_one_write() -> None:
    told = Told()
    async with telling(told, every_s=0.3) as sentences:
        sentences.put(item("a"), [Wait("FairShare", "one")], is_new=True)
        await settled()
        sentences.put(item("a"), [Wait("FairShare", "two")], is_new=False)
        sentences.put(item("a"), [FORECAST], is_new=False)
        sentences.put(item("a"), [Reserved(None)], is_new=False)
        await settled()
        assert [d for _, d in told.seen] == [(Wait("FairShare", "one"),)]
        await asyncio.sleep(0.4)
        assert [d for _, d in told.seen[1:]] == [(Wait("FairShare", "two"), FORECAST, Reserved(None))]
        sentences.put(item("a"), [Wait("QuotaCeiling", "three")], is_new=True)
        await settled()
        assert told.seen[2][1] == (Wait("QuotaCeiling", "three"),)


async def test_no_more_objects_are_told_in_a_second_than_allowed() -> None:
    told = Told()
    async with telling(told, per_s=100.0) as sentences:
        for i in range(60):
            sentences.put(item(str(i)), [Wait("FairShare", "one")], is_new=True)
        await asyncio.sleep(0.2)
        assert 1 <= len(told.seen) <= 25
        sentences.drop(item("59"))
        sentences.keep({item(str(i)) for i in range(59)})
        async with asyncio.timeout(60):
            while len(told.seen) < 59:
                await settled()
        assert [name for name, _ in told.seen] == [str(i) for i in range(59)]
