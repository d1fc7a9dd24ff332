"""The waiting room: who waits, for how long, in which order, and what wakes them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.parts import route

from busbar.gateway.errors import TooManyRequests, Unavailable
from busbar.gateway.fairqueue import FairQueue
from busbar.gateway.room import Lease, Limits, Room, least_busy
from busbar.gateway.routes import RouteTable
from busbar.kube.contracts.routes import Endpoint, Routes, ServiceRoute


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def room(clock: Clock | None = None, **limits: Any) -> Room:
    values: dict[str, Any] = {
        "hold_timeout_s": 30.0,
        "hold_limit": 8,
        "hold_limit_per_key": 4,
        "replica_in_flight": 1,
        "suspect_s": 1.0,
        "suspect_max_s": 4.0,
    }
    return Room(Limits(**{**values, **limits}), clock or Clock(), random.Random(0))


def at(*names: str, ready: bool = True, **fields: Any) -> list[dict[str, Any]]:
    return [{"pod": n, "url": f"http://{n}", "ready": ready, "draining": False, **fields} for n in names]


def table(*endpoints: dict[str, Any], **fields: Any) -> RouteTable:
    return RouteTable(Routes.model_validate({"revision": 1, "services": [route("m", *endpoints, **fields)]}))


def service(routes: RouteTable) -> ServiceRoute:
    return routes.services["team-a/m"]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_least_busy_replica_is_taken() -> None:
    ends = [Endpoint(pod=n, url=n, ready=True) for n in "abc"]
    chosen = least_busy([(2, ends[0]), (1, ends[1]), (3, ends[2])], random.Random(0))
    assert chosen == ends[1]
    assert least_busy([], random.Random(0)) is None


def test_equally_busy_replicas_share_the_load() -> None:
    ends = [Endpoint(pod=n, url=n, ready=True) for n in "ab"]
    rng = random.Random(0)
    chosen = [least_busy([(0, end) for end in ends], rng) for _ in range(50)]
    assert set(chosen) == set(ends)


async def test_a_request_at_zero_waits_and_a_ready_replica_wakes_it() -> None:
    here, none = room(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), "k", 130.0))
    await settle()
    assert [d.waiting for d in here.demand()] == [1]
    here.update(table(*at("a", ready=False)))
    await settle()
    assert not waiting.done()
    here.update(table(*at("a")))
    assert (await waiting).endpoint.pod == "a"
    assert [(d.waiting, d.in_flight) for d in here.demand()] == [(0, 1)]


async def test_nobody_is_sent_to_a_draining_replica() -> None:
    here, draining = room(), table(*at("a", draining=True))
    here.update(draining)
    with pytest.raises(Unavailable):
        await here.enter(service(draining), "k", 100.0)


async def test_the_wait_ends_with_a_503_that_says_when_to_come_again() -> None:
    here, none = room(), table()
    here.update(none)
    with pytest.raises(Unavailable) as caught:
        await here.enter(service(none), "k", 100.0)
    assert caught.value.retry_after_s
    assert [d.waiting for d in here.demand()] == [0]


async def test_the_room_is_bounded_per_service_and_per_key() -> None:
    here, none = room(), table()
    here.update(none)
    waiting = [asyncio.create_task(here.enter(service(none), k, 130.0)) for k in "aaaabbb"]
    await settle()
    with pytest.raises(TooManyRequests):
        await here.enter(service(none), "a", 130.0)
    waiting.append(asyncio.create_task(here.enter(service(none), "c", 130.0)))
    await settle()
    with pytest.raises(Unavailable):
        await here.enter(service(none), "d", 130.0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [d.waiting for d in here.demand()] == [0]


async def test_keys_take_turns_and_each_is_served_in_order() -> None:
    here, none = room(), table()
    here.update(none)
    order: list[str] = []

    async def ask(name: str) -> None:
        lease = await here.enter(service(none), name[0], 130.0)
        order.append(name)
        here.leave(lease)

    tasks = []
    for name in ("a1", "a2", "a3", "b1", "c1"):
        tasks.append(asyncio.create_task(ask(name)))
        await settle()
    here.update(table(*at("x")))
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "c1", "a2", "a3"]


async def test_a_replica_gets_no_more_than_its_limit_and_a_returned_place_is_given_on() -> None:
    here, one = room(), table(*at("a"))
    here.update(one)
    first = await here.enter(service(one), "k", 130.0)
    second = asyncio.create_task(here.enter(service(one), "k", 130.0))
    await settle()
    assert not second.done()
    here.leave(first)
    assert (await second).endpoint.pod == "a"


async def test_a_suspect_is_left_out_and_the_pause_doubles_up_to_its_bound() -> None:
    clock = Clock()
    here, one = room(clock), table(*at("a"))
    here.update(one)
    pauses = []
    for _ in range(4):
        here.leave(await here.enter(service(one), "k", clock.now), suspect=True)
        start = clock.now
        while True:
            clock.now += 0.5
            try:
                lease = await here.enter(service(one), "k", clock.now)
            except Unavailable:
                continue
            pauses.append(clock.now - start)
            break
        here._services["team-a/m"].replicas["http://a"].in_flight -= 1
        assert isinstance(lease, Lease)
    assert pauses == [1.0, 2.0, 4.0, 4.0]


async def test_a_replica_that_works_again_is_trusted_again() -> None:
    clock = Clock()
    here, one = room(clock), table(*at("a"))
    here.update(one)
    here.leave(await here.enter(service(one), "k", clock.now), suspect=True)
    clock.now += 1.0
    here.leave(await here.enter(service(one), "k", clock.now))
    assert here._services["team-a/m"].replicas["http://a"].failures == 0


async def test_a_client_that_leaves_says_nothing_about_its_replica() -> None:
    clock = Clock()
    here, one = room(clock), table(*at("a"))
    here.update(one)
    here.leave(await here.enter(service(one), "k", clock.now), suspect=True)
    clock.now += 1.0
    here.leave(await here.enter(service(one), "k", clock.now), worked=False)
    replica = here._services["team-a/m"].replicas["http://a"]
    assert (replica.failures, replica.in_flight) == (1, 0)


async def test_the_end_of_a_suspicion_wakes_the_room() -> None:
    loop = asyncio.get_running_loop()
    here = Room(Limits(30.0, 8, 4, 1, 0.01, 0.02), loop.time)
    one = table(*at("a"))
    here.update(one)
    here.leave(await here.enter(service(one), "k", loop.time() + 5), suspect=True)
    lease = await here.enter(service(one), "k", loop.time() + 5)
    assert lease.endpoint.pod == "a"


async def test_a_retried_request_is_next() -> None:
    here, none = room(), table()
    here.update(none)
    first = asyncio.create_task(here.enter(service(none), "a", 130.0))
    await settle()
    retried = asyncio.create_task(here.enter(service(none), "b", 130.0, again=True))
    await settle()
    here.update(table(*at("x")))
    await settle()
    assert retried.done()
    assert not first.done()
    first.cancel()


async def test_who_leaves_the_queue_leaves_nothing_behind() -> None:
    here, none = room(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), "k", 130.0))
    await settle()
    here.update(table(*at("a")))  # the place is given in the same moment...
    waiting.cancel()  # ...in which the client leaves
    await asyncio.gather(waiting, return_exceptions=True)
    assert [(d.waiting, d.in_flight) for d in here.demand()] == [(0, 0)]


async def test_suspending_a_service_turns_its_waiters_away() -> None:
    here, none = room(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), "k", 130.0))
    await settle()
    here.update(table(suspended=True))
    with pytest.raises(Unavailable, match="suspended"):
        await waiting


async def test_removing_a_service_turns_its_waiters_away_and_forgets_it() -> None:
    here, none = room(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), "k", 130.0))
    await settle()
    here.update(RouteTable(Routes(revision=2)))
    with pytest.raises(Unavailable, match="removed"):
        await waiting
    assert here.demand() == []


async def test_closing_turns_everybody_away() -> None:
    here, none = room(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), "k", 130.0))
    await settle()
    here.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await here.enter(service(none), "k", 130.0)


def test_arrivals_and_the_age_of_the_last_request_are_part_of_demand() -> None:
    clock = Clock()
    here, none = room(clock), table()
    here.update(none)
    assert [(d.arrivals, d.last_request_age_seconds) for d in here.demand()] == [(0, None)]
    with here.visit(service(none)):
        clock.now += 3.0
    clock.now += 2.0
    assert [(d.arrivals, d.last_request_age_seconds) for d in here.demand()] == [(1, 2.0)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["push", "front", "pop", "remove"]))))
def test_a_fair_queue_keeps_everything_and_the_order_within_a_key(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    model: dict[str, list[tuple[str, int]]] = {"a": [], "b": [], "c": []}
    for number, (key, step) in enumerate(steps):
        if step == "push":
            queue.push(key, (key, number))
            model[key].append((key, number))
        elif step == "front":
            queue.push_front(key, (key, number))
            model[key].insert(0, (key, number))
        elif step == "pop" and len(queue):
            item = queue.pop()
            assert model[item[0]].pop(0) == item
        elif step == "remove" and model[key]:
            assert queue.remove(key, model[key].pop())
        assert len(queue) == sum(map(len, model.values()))
        assert {k: queue.waiting(k) for k in model} == {k: len(v) for k, v in model.items()}
    drained = queue.drain()
    assert {k: [i for i in drained if i[0] == k] for k in model} == model


@given(st.lists(st.sampled_from("ab"), min_size=1))
def test_no_key_waits_for_more_than_one_item_of_each_other_key(keys: list[str]) -> None:
    queue: FairQueue[str] = FairQueue()
    for key in keys:
        queue.push(key, key)
    order = "".join(queue.drain())
    both = min(keys.count("a"), keys.count("b"))
    assert "aa" not in order[: 2 * both]
    assert "bb" not in order[: 2 * both]
