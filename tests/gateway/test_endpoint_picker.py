"""The endpoint picker: who waits, for how long, in which order, and what wakes them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.parts import route

from busbar.gateway.endpoint_picker import EndpointPicker, Lease, QueueLimits
from busbar.gateway.errors import TooManyRequests, Unavailable
from busbar.gateway.fairqueue import REMEMBERED, FairQueue
from busbar.gateway.picking import Ask
from busbar.gateway.routes import RouteTable
from busbar.kube.contracts.routes import Routes, ServiceRoute


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def picker(clock: Clock | None = None, **limits: Any) -> EndpointPicker:
    values: dict[str, Any] = {
        "hold_timeout_s": 30.0,
        "hold_limit": 8,
        "hold_limit_per_user": 4,
        "replica_in_flight": 1,
        "suspect_s": 1.0,
        "suspect_max_s": 4.0,
    }
    return EndpointPicker(QueueLimits(**{**values, **limits}), clock or Clock(), random.Random(0))


def owner(user: str, key: str = "k") -> tuple[str, str, str]:
    return ("tenant-a", user, key)


def at(*names: str, ready: bool = True, **fields: Any) -> list[dict[str, Any]]:
    return [{"pod": n, "url": f"http://{n}", "ready": ready, "draining": False, **fields} for n in names]


def table(*endpoints: dict[str, Any], **fields: Any) -> RouteTable:
    return RouteTable(Routes.model_validate({"revision": 1, "services": [route("m", *endpoints, **fields)]}))


def service(routes: RouteTable) -> ServiceRoute:
    return routes.services["team-a/m"]


def emptied(queue: FairQueue[Any]) -> list[Any]:
    return [queue.pop() for _ in range(len(queue))]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_goes_to_a_replica_that_serves_its_adapter_or_waits_for_one() -> None:
    here = picker(replica_in_flight=9)
    lacks = at("http", lacks=["a"])[0]
    routes = table(lacks, *at("b"))
    here.update(routes)
    taken = [await here.enter(service(routes), owner("k"), 130.0, ask=Ask(adapter="a")) for _ in range(4)]
    assert {lease.endpoint.pod for lease in taken} == {"b"}
    base = [await here.enter(service(routes), owner("k"), 130.0) for _ in range(4)]
    assert lacks["pod"] in {lease.endpoint.pod for lease in base}

    here.update(none_has_it := table(lacks))
    waiting = asyncio.create_task(here.enter(service(none_has_it), owner("k"), 130.0, ask=Ask(adapter="a")))
    await settle()
    assert not waiting.done()
    here.update(table(lacks | {"lacks": []}))
    assert (await waiting).endpoint.pod == lacks["pod"]


async def test_a_request_at_zero_waits_and_a_ready_replica_wakes_it() -> None:
    here, none = picker(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), owner("k"), 130.0))
    await settle()
    assert [d.waiting for d in here.demand()] == [1]
    here.update(table(*at("a", ready=False)))
    await settle()
    assert not waiting.done()
    here.update(table(*at("a")))
    assert (await waiting).endpoint.pod == "a"
    assert [(d.waiting, d.in_flight) for d in here.demand()] == [(0, 1)]


async def test_no_request_is_sent_to_a_draining_replica() -> None:
    here, draining = picker(), table(*at("a", draining=True))
    here.update(draining)
    with pytest.raises(Unavailable):
        await here.enter(service(draining), owner("k"), 100.0)


async def test_a_replica_that_slept_gets_requests_again_once_it_is_awake() -> None:
    here, awake = picker(), table(*at("a"))
    here.update(awake)
    here.leave(await here.enter(service(awake), owner("k"), 130.0))
    for asleep in (at("a", draining=True), at("a", ready=False, draining=True)):
        here.update(table(*asleep))
    waiting = asyncio.create_task(here.enter(service(awake), owner("k"), 130.0))
    await settle()
    here.update(table(*at("a", ready=False)))
    await settle()
    assert not waiting.done()
    here.update(awake)
    assert (await waiting).endpoint.pod == "a"


async def test_the_wait_ends_with_a_503_that_says_when_to_come_again() -> None:
    here, none = picker(), table()
    here.update(none)
    with pytest.raises(Unavailable) as caught:
        await here.enter(service(none), owner("k"), 100.0)
    assert caught.value.retry_after_s
    assert [d.waiting for d in here.demand()] == [0]


async def test_the_queue_is_bounded_per_service_and_per_user() -> None:
    here, none = picker(), table()
    here.update(none)
    waiting = [asyncio.create_task(here.enter(service(none), owner(k), 130.0)) for k in "aaaabbb"]
    await settle()
    with pytest.raises(TooManyRequests):
        await here.enter(service(none), owner("a"), 130.0)
    waiting.append(asyncio.create_task(here.enter(service(none), owner("c"), 130.0)))
    await settle()
    with pytest.raises(Unavailable):
        await here.enter(service(none), owner("d"), 130.0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [d.waiting for d in here.demand()] == [0]


async def test_users_take_turns_and_each_is_served_in_order() -> None:
    here, none = picker(), table()
    here.update(none)
    order: list[str] = []

    async def ask(name: str) -> None:
        lease = await here.enter(service(none), owner(name[0]), 130.0)
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
    here, one = picker(), table(*at("a"))
    here.update(one)
    first = await here.enter(service(one), owner("k"), 130.0)
    second = asyncio.create_task(here.enter(service(one), owner("k"), 130.0))
    await settle()
    assert not second.done()
    here.leave(first)
    assert (await second).endpoint.pod == "a"


async def test_a_suspect_is_left_out_and_the_pause_doubles_up_to_its_bound() -> None:
    clock = Clock()
    here, one = picker(clock), table(*at("a"))
    here.update(one)
    pauses = []
    for _ in range(4):
        here.leave(await here.enter(service(one), owner("k"), clock.now), suspect=True)
        start = clock.now
        while True:
            clock.now += 0.5
            try:
                lease = await here.enter(service(one), owner("k"), clock.now)
            except Unavailable:
                continue
            pauses.append(clock.now - start)
            break
        here._services["team-a/m"].replicas["http://a"].works.discard(lease.work)
        assert isinstance(lease, Lease)
    assert pauses == [1.0, 2.0, 4.0, 4.0]


async def test_a_replica_may_fail_ever_so_often() -> None:
    clock = Clock()
    here, one = picker(clock), table(*at("a"))
    here.update(one)
    for _ in range(1100):
        here.leave(await here.enter(service(one), owner("k"), clock.now), suspect=True)
        clock.now += 4.0
    assert (await here.enter(service(one), owner("k"), clock.now)).endpoint.pod == "a"


async def test_a_replica_that_answers_is_no_longer_suspect() -> None:
    clock = Clock()
    here, one = picker(clock), table(*at("a"))
    here.update(one)
    here.leave(await here.enter(service(one), owner("k"), clock.now), suspect=True)
    clock.now += 1.0
    here.leave(await here.enter(service(one), owner("k"), clock.now))
    assert here._services["team-a/m"].replicas["http://a"].failures == 0


async def test_a_disconnect_leaves_the_suspicion_of_a_replica_as_it_was() -> None:
    clock = Clock()
    here, one = picker(clock), table(*at("a"))
    here.update(one)
    here.leave(await here.enter(service(one), owner("k"), clock.now), suspect=True)
    clock.now += 1.0
    here.leave(await here.enter(service(one), owner("k"), clock.now), worked=False)
    replica = here._services["team-a/m"].replicas["http://a"]
    assert (replica.failures, replica.in_flight) == (1, 0)


async def test_the_end_of_a_suspicion_wakes_the_endpoint_picker() -> None:
    loop = asyncio.get_running_loop()
    here = EndpointPicker(QueueLimits(30.0, 8, 4, 1, 0.01, 0.02), loop.time)
    one = table(*at("a"))
    here.update(one)
    here.leave(await here.enter(service(one), owner("k"), loop.time() + 5), suspect=True)
    lease = await here.enter(service(one), owner("k"), loop.time() + 5)
    assert lease.endpoint.pod == "a"


async def test_a_retried_request_goes_to_the_head_of_the_queue() -> None:
    here, none = picker(), table()
    here.update(none)
    first = asyncio.create_task(here.enter(service(none), owner("a"), 130.0))
    await settle()
    retried = asyncio.create_task(here.enter(service(none), owner("b"), 130.0, again=True))
    await settle()
    here.update(table(*at("x")))
    await settle()
    assert retried.done()
    assert not first.done()
    first.cancel()


async def test_a_stream_that_has_moved_gets_its_replica_while_that_is_open() -> None:
    routes = table(*at("a", "b", "c"))
    picked = picker(replica_in_flight=2)
    picked.update(routes)

    async def place(prefer: str) -> str:
        lease = await picked.enter(service(routes), owner("u"), 200.0, again=True, prefer=prefer)
        return lease.endpoint.pod

    assert [await place("http://b") for _ in range(2)] == ["b", "b"]
    assert await place("http://b") in ("a", "c")  # it is full
    assert await place("http://gone") in ("a", "c")


async def test_a_request_that_leaves_the_queue_is_removed_completely() -> None:
    here, none = picker(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), owner("k"), 130.0))
    await settle()
    here.update(table(*at("a")))  # the endpoint is assigned in the same event-loop iteration...
    waiting.cancel()  # ...in which the client disconnects
    await asyncio.gather(waiting, return_exceptions=True)
    assert [(d.waiting, d.in_flight) for d in here.demand()] == [(0, 0)]


async def test_suspending_a_service_refuses_its_waiting_requests() -> None:
    here, none = picker(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), owner("k"), 130.0))
    await settle()
    here.update(table(suspended=True))
    with pytest.raises(Unavailable, match="suspended"):
        await waiting


async def test_a_refused_or_cancelled_request_is_charged_nothing_and_does_not_count_as_running() -> None:
    here, none = picker(), table()
    here.update(none)
    queue = here._services["team-a/m"].queue
    refused = asyncio.create_task(here.enter(service(none), owner("refused"), 130.0))
    await settle()
    here.update(table(suspended=True))
    with pytest.raises(Unavailable):
        await refused
    here.update(none)
    cancelled = asyncio.create_task(here.enter(service(none), owner("cancelled"), 130.0))
    await settle()
    here.update(table(*at("a")))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert (queue._running, set(queue._served.values())) == ({}, {0.0})


async def test_removing_a_service_refuses_its_waiting_requests_and_forgets_it() -> None:
    here, none = picker(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), owner("k"), 130.0))
    await settle()
    here.update(RouteTable(Routes(revision=2)))
    with pytest.raises(Unavailable, match="removed"):
        await waiting
    assert here.demand() == []


async def test_closing_refuses_all_waiting_requests() -> None:
    here, none = picker(), table()
    here.update(none)
    waiting = asyncio.create_task(here.enter(service(none), owner("k"), 130.0))
    await settle()
    here.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await here.enter(service(none), owner("k"), 130.0)


def test_arrivals_and_the_age_of_the_last_request_are_part_of_demand() -> None:
    clock = Clock()
    here, none = picker(clock), table()
    here.update(none)
    assert [(d.arrivals, d.last_request_age_seconds) for d in here.demand()] == [(0, None)]
    with here.visit(service(none)):
        clock.now += 3.0
    clock.now += 2.0
    assert [(d.arrivals, d.last_request_age_seconds) for d in here.demand()] == [(1, 2.0)]


OWNERS = [("t", "u", "k"), ("t", "u", "l"), ("t", "v", "k"), ("s", "u", "k")]


@given(st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from(["push", "front", "pop", "remove"]))))
def test_a_fair_queue_keeps_everything_and_the_order_within_a_key(
    steps: list[tuple[tuple[str, ...], str]],
) -> None:
    queue: FairQueue[tuple[tuple[str, ...], int]] = FairQueue()
    model: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {who: [] for who in OWNERS}
    for number, (who, step) in enumerate(steps):
        if step == "push":
            queue.push(who, (who, number))
            model[who].append((who, number))
        elif step == "front":
            queue.push_front(who, (who, number))
            model[who].insert(0, (who, number))
        elif step == "pop" and len(queue):
            item = queue.pop()
            assert model[item[0]].pop(0) == item
        elif step == "remove" and model[who]:
            assert queue.remove(who, model[who].pop())
        assert len(queue) == sum(map(len, model.values()))
        assert {k: queue.waiting(k) for k in model} == {k: len(v) for k, v in model.items()}
        assert queue.waiting(("t", "u")) == len(model["t", "u", "k"]) + len(model["t", "u", "l"])
    drained = emptied(queue)
    assert {k: [i for i in drained if i[0] == k] for k in model} == model


def test_an_item_put_back_at_the_head_is_next_whoever_has_the_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for who in OWNERS:
        queue.push(who, "/".join(who))
    queue.push_front(("t", "v", "k"), "again")
    assert queue.pop() == "again"


def test_ten_keys_of_one_user_have_one_turn_and_so_have_ten_users_of_one_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.push(("t", "greedy", f"k{number}"), "greedy")
    queue.push(("t", "modest", "k"), "modest")
    for number in range(10):
        queue.push(("s", f"u{number}", "k"), "other tenant")
    assert emptied(queue)[:4] == ["greedy", "other tenant", "modest", "other tenant"]


@given(st.lists(st.sampled_from("ab"), min_size=1))
def test_no_key_waits_for_more_than_one_item_of_each_other_key(keys: list[str]) -> None:
    queue: FairQueue[str] = FairQueue()
    for key in keys:
        queue.push(("t", key, "k"), key)
    order = "".join(emptied(queue))
    both = min(keys.count("a"), keys.count("b"))
    assert "aa" not in order[: 2 * both]
    assert "bb" not in order[: 2 * both]


def test_owners_are_served_equal_tokens_however_large_their_requests_are() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push(("large", "u", "k"), "large", 1000.0)
        for _ in range(10):
            queue.push(("small", "u", "k"), "small", 100.0)
    served = [queue.pop() for _ in range(220)]
    assert served.count("large") == 20
    assert served.count("small") == 200


def test_a_tenant_with_twice_the_weight_is_served_twice_as_much() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(90):
        queue.push(("two", "u", "k"), "two", 10.0, 2.0)
        queue.push(("one", "u", "k"), "one", 10.0, 1.0)
    served = [queue.pop() for _ in range(90)]
    assert served.count("two") == 60


def test_what_a_request_really_cost_takes_the_place_of_its_estimate() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(4):
        queue.push(("a", "u", "k"), "a", 10.0)
        queue.push(("b", "u", "k"), "b", 10.0)
    assert queue.pop() == "a"
    queue.settle(("a", "u", "k"), 25.0)
    assert [queue.pop() for _ in range(5)] == ["b", "b", "b", "b", "a"]


def test_who_was_away_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.push(("a", "u", "k"), "a", 10.0)
    for _ in range(40):
        queue.pop()
    for _ in range(10):
        queue.push(("b", "u", "k"), "b", 10.0)
    assert "".join(queue.pop() for _ in range(10)).count("b") == 5
    assert emptied(queue)
    queue.push(("c", "u", "k"), "c", 10.0)
    queue.push(("a", "u", "k"), "a", 10.0)
    queue.push(("c", "u", "k"), "c", 10.0)
    assert sorted([queue.pop(), queue.pop()]) == ["a", "c"]


def test_the_rank_is_the_number_of_owners_that_were_served_less() -> None:
    queue: FairQueue[str] = FairQueue()
    for who, cost in (("a", 30.0), ("b", 20.0), ("c", 10.0)):
        for _ in range(2):
            queue.push(("t", who, "k"), who, cost)
    assert "".join(queue.pop() for _ in range(3)) == "abc"
    assert [queue.rank(("t", who, "k")) for who in "abc"] == [2, 1, 0]
    queue.settle(("t", "a", "k"), -25.0)
    assert [queue.rank(("t", who, "k")) for who in "abc"] == [0, 2, 1]


def test_a_newcomer_begins_where_the_last_one_stands_once_its_request_has_been_settled() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(("t", "a", "k"), "a", 500.0)
    queue.pop()
    queue.settle(("t", "a", "k"), -490.0)
    queue.push(("t", "b", "k"), "b", 10.0)
    assert queue.rank(("t", "b", "k")) == 0
    queue.push(("t", "a", "k"), "a", 10.0)
    assert [queue.pop(), queue.pop()] == ["b", "a"]


def test_counters_of_owners_that_left_are_bounded() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(20_000):
        queue.push((f"t{number}", "u", "k"), number)
        queue.pop()
        queue.settle((f"t{number}", "u", "k"), 0.0)
    assert len(queue._served) <= 2 * REMEMBERED + 3
    assert len(queue._last) <= 2 * REMEMBERED + 3


def test_who_has_something_running_keeps_its_turn_although_nothing_of_it_waits() -> None:
    """A light key's requests are served at once, so that none waits while the next one comes."""
    queue: FairQueue[str] = FairQueue()
    light, heavy = ("t", "u", "light"), ("t", "u", "heavy")
    queue.push(light, "l0", 100)
    assert queue.pop() == "l0"
    for number in range(9):
        queue.push(heavy, f"h{number}", 100)
    for _ in range(5):
        queue.pop()
    for number in range(1, 4):
        queue.push(light, f"l{number}", 100)
        assert queue.pop() == f"l{number}"
    for _ in range(4):
        queue.settle(light, 0.0)
    queue.push(light, "away", 100)  # it was away, and counts as much as the heavy one
    assert queue.pop() == "away"
    queue.settle(light, 0.0)
    queue.push(light, "again", 100)
    assert queue.pop() == "h5"
    assert queue.pop() == "again"
    queue.settle(light, 0.0)
    assert not [name for below in queue._running.values() for name in below if name == "light"]


def test_the_last_places_are_for_all_but_those_who_were_served_most() -> None:
    """Of five keys, four that ask for little are alike, and the fifth has had ten times as much."""
    queue: FairQueue[int] = FairQueue()
    keys = [("t", "u", f"k{number}") for number in range(5)]
    for number, key in enumerate(keys):
        queue.push(key, number, 1000 if number == 4 else 100 + number)
    for _ in keys:
        queue.pop()
    assert [queue.is_ahead(key) for key in keys] == [False, False, False, False, True]


async def test_the_demand_of_a_shared_service_is_told_by_tenant() -> None:
    here, shared = picker(), table(*at("a"), access=[{"tenant": "guest"}])
    here.update(shared)
    await here.enter(service(shared), owner("u"), 1e9)
    waiting = asyncio.create_task(here.enter(service(shared), ("guest", "g", "k"), 1e9))
    await settle()
    [demand] = here.demand()
    assert [(t.tenant, t.waiting, t.in_flight) for t in demand.tenants] == [
        ("guest", 1, 0),
        ("tenant-a", 0, 1),
    ]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    here.update(table(*at("a")))
    assert here.demand()[0].tenants == []


WORK = Ask(batch=True)


async def test_batch_work_waits_for_everybody_else_and_holds_nobody_back() -> None:
    here, routes = picker(replica_in_flight=99), table(*at("a", mostRunning=16))
    here.update(routes)
    work = [asyncio.create_task(here.enter(service(routes), owner("w"), 130.0, ask=WORK)) for _ in range(20)]
    await settle()
    assert sum(task.done() for task in work) == 14  # an eighth of the places stays free
    people = [asyncio.create_task(here.enter(service(routes), owner(f"u{n}"), 130.0)) for n in range(16)]
    await settle()
    assert all(task.done() for task in people)
    late = [asyncio.create_task(here.enter(service(routes), owner(f"v{n}"), 130.0)) for n in range(5)]
    await settle()
    assert not all(task.done() for task in late)
    for task in work[:10]:
        here.leave(await task)
    await settle()
    assert sum(task.done() for task in work) == 14  # nothing of it begins while somebody waits
    for task in people[:3]:
        here.leave(await task)
    for task in late:
        here.leave(await task)
    assert sum(task.done() for task in work) == 14  # nor beside so many
    for task in people[3:]:
        here.leave(await task)
    await settle()
    assert all(task.done() for task in work)


async def test_batch_work_starts_a_first_replica_and_asks_for_no_second() -> None:
    here, cold = picker(), table()
    here.update(cold)
    with here.visit(service(cold), batch=True):
        work = [asyncio.create_task(here.enter(service(cold), owner("w"), 130.0, ask=WORK)) for _ in range(9)]
        await settle()
        (seen,) = here.demand()
        assert (seen.waiting, seen.in_flight, seen.arrivals) == (1, 0, 0)
        assert seen.last_request_age_seconds == 0
        here.update(table(*at("a", mostRunning=16)))
        await settle()
        (seen,) = here.demand()
        assert (seen.waiting, seen.in_flight) == (0, 1)
    for task in work:
        here.leave(await task)


async def test_batch_work_gets_the_last_rank_where_a_model_server_orders_by_it() -> None:
    here, routes = picker(replica_in_flight=9), table(*at("a"), ranked=True)
    here.update(routes)
    work = await here.enter(service(routes), owner("w"), 130.0, ask=WORK)
    other = await here.enter(service(routes), owner("u"), 130.0)
    assert work.rank is not None
    assert other.rank is not None
    assert work.rank > 10_000 > other.rank
