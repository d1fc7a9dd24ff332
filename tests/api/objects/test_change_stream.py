"""The event stream to open pages: which subscriber gets which changes, for how long, and the limit on subscribers."""

from __future__ import annotations

import pytest
from tests.api.conftest import BASE, World

from busbar.api.access.authorization import Reach
from busbar.api.errors import Unauthenticated
from busbar.api.objects import change_stream
from busbar.kube.resources import TRAINING_JOBS

ADA = Reach(everything=False, namespaces=frozenset({"ada-lab"}))
BOTH = Reach(everything=False, namespaces=frozenset({"ada-lab", "bob-lab"}))


async def still() -> Reach:
    return ADA


async def test_the_change_stream_tells_of_ones_own_namespaces_only(world: World) -> None:
    stream = world.services.change_stream.stream("alice", ADA, still)
    assert b"hello" in await anext(stream)
    world.kube.status(TRAINING_JOBS, "bob-lab", "bob-run", phase="Running")
    await world.settle()
    assert not any(listener.changed.is_set() for listener in world.services.change_stream._listeners)
    world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", phase="Running")
    await world.settle()
    assert await anext(stream) == b"event: changed\ndata: 1\n\n"
    world.services.change_stream.close()


async def test_a_change_stream_looks_again_at_what_its_caller_may_see(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_stream, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(change_stream, "HEARTBEAT_S", 0.001)
    stream = world.services.change_stream.stream("alice", BOTH, still)
    await anext(stream)
    assert await anext(stream) == b": still here\n\n"
    (listener,) = world.services.change_stream._listeners
    assert listener.reach == ADA

    async def nobody() -> Reach:
        raise Unauthenticated("the session is over")

    ended = world.services.change_stream.stream("alice", BOTH, nobody)
    assert [b"hello" in part async for part in ended] == [True]
    await stream.aclose()
    assert not world.services.change_stream._listeners


async def test_one_caller_cannot_take_all_change_streams(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_stream, "MAX_STREAMS_EACH", 2)
    streams = [world.services.change_stream.stream("alice", ADA, still) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    alice = await world.as_("alice")
    refused = await alice.get(f"{BASE}/changes")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
    assert not world.services.change_stream.full("bob")
    for stream in streams:
        await stream.aclose()
