"""The informer's cache and watch, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from busbar.kube.client import Object
from busbar.kube.errors import ConnectionFailed
from busbar.kube.informer import Cache, Informer, Key
from busbar.kube.resources import PODS


def named(name: str, version: int, **more: Any) -> Object:
    return {"metadata": {"namespace": "ns", "name": name, "resourceVersion": str(version)}, **more}


def test_an_object_that_cannot_be_read_is_left_out_and_the_others_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache: Cache[int] = Cache(PODS, lambda obj: int(obj["size"]))
    cache.observe(named("odd", 1, size="many"))
    cache.observe(named("good", 2, size="3"))
    assert cache.items == {Key("ns", "good"): 3}
    assert "ns/odd is left out" in caplog.text
    cache.observe(named("odd", 3, size="4"))
    assert cache.items[Key("ns", "odd")] == 4


async def test_a_list_that_comes_in_pages_is_kept_one_page_at_a_time() -> None:
    cache: Cache[str] = Cache(PODS, lambda obj: str(obj["metadata"]["resourceVersion"]))
    for name, version in (("gone", 1), ("old", 2), ("newer", 12)):
        cache.observe(named(name, version))
    first, second = [named("old", 5), named("a", 3)], [named("b", 4)]

    async def pages() -> AsyncIterator[tuple[list[Object], str]]:
        yield first, "10"
        assert Key("ns", "gone") in cache.items  # it may be on the next page
        assert not first
        yield second, "10"

    await cache.replace_by_pages(pages())
    found = {key.name: version for key, version in cache.items.items()}
    assert found == {"old": "5", "a": "3", "b": "4", "newer": "12"}


class Ending:
    """A server that ends every watch at once."""

    def __init__(self) -> None:
        self.watches = 0
        self.third = asyncio.Event()

    async def list(self, *_: Any, **__: Any) -> tuple[list[Object], str]:
        return [], "1"

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Object]:
        self.watches += 1
        if self.watches == 3:
            self.third.set()
        nothing: tuple[Object, ...] = ()
        for event in nothing:
            yield event


class Breaking:
    """A server whose every watch sends one change and disconnects."""

    def __init__(self) -> None:
        self.version = 1
        self.sixth = asyncio.Event()

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Object]:
        self.version += 1
        if self.version == 7:
            self.sixth.set()
        yield {"type": "MODIFIED", "object": named("p", self.version)}
        raise ConnectionFailed("reset")


async def test_a_watch_that_worked_before_it_broke_is_opened_again_without_a_longer_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Breaking()
    waits = await waits_until(server.sixth, server, monkeypatch)
    assert len(waits) >= 5
    assert max(waits) <= 0.2


async def waits_until(event: asyncio.Event, server: object, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays that an informer of this server sleeps until the event; the test itself does not wait."""
    waits: list[float] = []
    pause = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await pause(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    informer: Informer[Object] = Informer(
        server,  # type: ignore[arg-type]
        PODS,
        lambda obj: obj,
    )
    informer._revision = "1"
    task = asyncio.create_task(informer.run())
    async with asyncio.timeout(60):
        await event.wait()
    task.cancel()
    return waits


async def test_a_server_that_ends_each_watch_at_once_is_asked_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Ending()
    waits = await waits_until(server.third, server, monkeypatch)
    assert len(waits) >= 2
    assert waits[1] > 0.15
