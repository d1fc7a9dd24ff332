"""What a gateway tells the operator of replicas: when they answered last, and which requests got no answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.gateway.parts import House, route

from busbar.gateway.contacts import Contacts
from busbar.gateway.watchdog import Watch
from busbar.kube.contracts.demand import ReplicaContact
from busbar.kube.contracts.routes import Endpoint
from busbar.scheduler.autoscale.contacts import TOLD_S

A, B = "http://a", "http://b"


class World:
    """A clock, two replicas and the requests that wait for them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[Watch] = []
        self.contacts = Contacts(lambda: self.waits, 10.0, lambda: self.now)
        self.endpoints = [Endpoint(pod=url[-1], url=url, ready=True) for url in (A, B)]

    def wait(self, url: str) -> Watch:
        watch = Watch(url, 600.0, lambda: self.now)
        self.waits.append(watch)
        return watch

    def rows(self, after_s: float = 0.0) -> dict[str, tuple[int, float | None, float | None]]:
        self.now += after_s
        found = self.contacts.of(self.endpoints)
        return {row.pod: (row.failures, row.failing_seconds, row.heard_seconds) for row in found}


def test_failures_count_from_the_last_answer_on_and_an_answer_ends_them() -> None:
    world = World()
    assert world.rows() == {}
    world.contacts.heard(A)
    world.now += 5
    world.contacts.failed(A)
    world.now += 2
    world.contacts.failed(A)
    world.contacts.failed(B)
    assert world.rows(1.0) == {"a": (2, 3.0, 8.0), "b": (1, 1.0, None)}
    world.contacts.heard(A)
    assert world.rows(TOLD_S - 1.0) == {"a": (0, None, TOLD_S - 1.0), "b": (1, TOLD_S, None)}
    assert world.rows(1.0) == {"a": (0, None, TOLD_S)}, "nothing was sent to the other one lately"
    assert world.rows(1.0) == {}
    world.contacts.failed(A)
    world.contacts.keep({B})
    assert world.rows() == {}


def test_a_request_that_hears_nothing_counts_unless_the_replica_answers_another_one() -> None:
    world = World()
    world.wait(A)
    assert world.rows(9.9) == {}
    world.wait(A)
    assert world.rows(0.1) == {"a": (1, 10.0, None)}
    assert world.rows(10.0) == {"a": (2, 20.0, None)}
    world.contacts.heard(A)  # its health check
    assert world.rows(1.0) == {"a": (0, None, 1.0)}


def test_tokens_of_another_stream_are_answers() -> None:
    world = World()
    stream = world.wait(A)
    world.contacts.failed(A)
    assert world.rows(1.0) == {"a": (1, 1.0, None)}
    stream.heard()
    stream.pause()
    assert world.rows(1.0) == {"a": (0, None, 1.0)}
    world.contacts.failed(A)
    assert world.rows(1.0) == {"a": (1, 1.0, 2.0)}


async def told(house: House) -> list[ReplicaContact]:
    assert house.session is not None
    headers = {"Authorization": "Bearer of-operator"}
    async with house.session.get(f"{house.internal}/demand", headers=headers) as response:
        services: list[dict[str, Any]] = (await response.json())["services"]
    return [ReplicaContact.model_validate(row) for each in services for row in each["replicas"]]


@pytest.mark.parametrize("dies_at", [0, 1])
async def test_the_operator_reads_which_replica_broke_off_and_which_answered(
    house: House, dies_at: int
) -> None:
    await house.stop_gateway()
    house.overrides.update(suspect_s=60.0, suspect_max_s=60.0)  # the second request goes to the other one
    await house.start_gateway()
    dying, engine = await house.engine("a", "b"), await house.engine("a", "b")
    dying.die_at = dies_at
    await house.publish(route("m", dying, engine))
    await house.stream()
    await house.stream()
    rows = {row.url: row for row in await told(house)}
    assert rows[dying.url].failures >= 1
    assert rows[dying.url].failing_seconds is not None
    assert (rows[engine.url].failures, rows[engine.url].failing_seconds) == (0, None)
    await house.stop_gateway()
    await house.start_gateway()
    await house.publish(route("m", dying, engine))
    assert await told(house) == [], "another process has had nothing from anybody"


async def test_a_replica_that_refuses_has_answered_and_one_that_hangs_has_not(house: House) -> None:
    await house.stop_gateway()
    house.overrides.update(probe_after_s=0.05, probe_timeout_s=0.05, suspect_s=60.0, suspect_max_s=60.0)
    await house.start_gateway()
    hung, busy = await house.engine("a"), await house.engine("b")
    hung.pause_at, hung.health, busy.status = 0, 0, 503
    await house.publish(route("m", hung, busy))
    asking = asyncio.create_task(house.ask())

    def failing(rows: list[ReplicaContact]) -> set[str]:
        return {row.url for row in rows if row.failing_seconds is not None}

    async with asyncio.timeout(60):
        while {row.url for row in await told(house)} != {hung.url, busy.url}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert failing(await told(house)) == {hung.url}
    asking.cancel()
