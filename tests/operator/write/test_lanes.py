"""Places for writes: their order, and their number as the server answers in time or late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from busbar.kube.errors import ConnectionFailed, NotFound, api_error
from busbar.operator.write.lanes import FEWEST, Lane, Lanes
from busbar.operator.write.writer import lane_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def write(lanes: Lanes, lane: Lane, done: asyncio.Event, order: list[str], name: str) -> None:
    async with lanes.place(lane):
        order.append(name)
        await done.wait()


async def test_an_admission_goes_before_what_was_queued_to_be_told() -> None:
    lanes, done, order = Lanes(4), asyncio.Event(), list[str]()
    lanes.limit = 2.0
    tasks = [asyncio.create_task(write(lanes, Lane.TELL, done, order, f"told {i}")) for i in range(3)]
    await asyncio.sleep(0)
    assert order == ["told 0"]  # of two places, one may be told in
    tasks += [asyncio.create_task(write(lanes, Lane.ACT, done, order, f"act {i}")) for i in range(2)]
    await asyncio.sleep(0)
    assert order == ["told 0", "act 0"]
    assert not lanes.has_room(Lane.TELL)
    done.set()
    await asyncio.gather(*tasks)
    assert order == ["told 0", "act 0", "act 1", "told 1", "told 2"]


async def test_a_place_is_given_before_the_pods_of_those_that_have_one_are_made() -> None:
    lanes, done, order = Lanes(4), asyncio.Event(), list[str]()
    lanes.limit = 1.0
    lane = {"pod": Lane.ACT, "told": Lane.TELL, "admission": Lane.PLACE, "end": Lane.PLACE}
    tasks = [asyncio.create_task(write(lanes, Lane.ACT, done, order, "first"))]
    tasks += [asyncio.create_task(write(lanes, lane[name], done, order, name)) for name in lane]
    await asyncio.sleep(0)
    assert not lanes.has_room(Lane.PLACE)
    lanes.limit = 3.0
    done.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "admission", "end", "pod", "told"]


async def test_a_cancelled_turn_gives_its_place_to_the_next() -> None:
    lanes, done, order = Lanes(4), asyncio.Event(), list[str]()
    lanes.limit = 2.0
    tasks = [asyncio.create_task(write(lanes, Lane.ACT, done, order, str(i))) for i in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    tasks[0].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["0", "1", "3"]
    done.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lanes.has_room(Lane.ACT)
    assert lanes.has_room(Lane.TELL)


async def run(lanes: Lanes, clock: Clock, took_s: float, error: Exception | None = None) -> None:
    try:
        async with lanes.place(Lane.ACT):
            clock.now += took_s
            if error is not None:
                raise error
    except type(error or KeyError()):
        return


@pytest.mark.parametrize(
    ("took_s", "error", "slower"),
    [
        (0.01, None, False),
        (0.01, NotFound(404, "NotFound", "", ""), False),
        (5.0, None, True),
        (0.01, ConnectionFailed("timed out"), True),
        (0.01, api_error(429, {}, ""), True),
        (0.01, api_error(504, {}, ""), True),
    ],
)
async def test_a_server_that_is_late_or_refuses_gets_fewer_writes(
    took_s: float, error: Exception | None, slower: bool
) -> None:
    clock = Clock()
    lanes = Lanes(32, clock)
    before = lanes.limit
    await run(lanes, clock, took_s, error)
    assert lanes.limit < before if slower else lanes.limit > before


async def test_writes_that_were_under_way_together_cost_once_and_good_answers_bring_the_places_back() -> None:
    clock = Clock()
    lanes = Lanes(32, clock)
    held = [lanes.place(Lane.ACT) for _ in range(16)]
    for place in held:
        await place.__aenter__()
    clock.now = 5.0
    for place in held:
        await place.__aexit__(None, None, None)
    assert lanes.limit == 8.0
    for _ in range(10):
        clock.now += 5.0
        await run(lanes, clock, 5.0)
    assert lanes.limit == FEWEST
    for _ in range(2000):
        await run(lanes, clock, 0.01)
    assert lanes.limit == 32.0


@pytest.mark.parametrize(
    ("old", "new", "lane"),
    [
        ({}, {"phase": "Queued", "reason": "FairShare"}, Lane.TELL),
        ({"phase": "Queued"}, {"phase": "Queued", "message": "other"}, Lane.TELL),
        ({"phase": "Queued"}, {"phase": "Admitted", "admission": {"id": "a-1"}}, Lane.PLACE),
        ({"phase": "Queued"}, {"phase": "Suspended"}, Lane.ACT),
        ({"phase": "Admitted"}, {"phase": "Starting"}, Lane.TELL),
        ({"phase": "Admitted"}, {"phase": "Running"}, Lane.TELL),
        ({"phase": "Running"}, {"phase": "Running", "progress": {"step": 2}}, Lane.TELL),
        ({"phase": "Running"}, {"phase": "Succeeded"}, Lane.PLACE),
        ({"phase": "Running"}, {"phase": "Failed"}, Lane.PLACE),
        ({"phase": "Succeeded"}, {"phase": "Succeeded", "message": "other"}, Lane.TELL),
        ({"phase": "Running"}, {"phase": "Running", "release": {"reason": "Preempted"}}, Lane.PLACE),
        ({"phase": "Preempting", "admission": {"id": "a-1"}}, {"phase": "Queued"}, Lane.PLACE),
        ({"desiredReplicas": 1}, {"desiredReplicas": 2}, Lane.PLACE),
        ({"allocated": 1}, {"allocated": 2}, Lane.TELL),
    ],
)
def test_what_gives_or_frees_a_place_goes_first_and_what_only_tells_something_last(
    old: dict[str, Any], new: dict[str, Any], lane: Lane
) -> None:
    assert lane_of(old, new) is lane
