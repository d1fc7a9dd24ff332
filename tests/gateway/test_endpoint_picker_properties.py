"""Invariants of the endpoint picker under any sequence of events."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.parts import route

from busbar.gateway.endpoint_picker import EndpointPicker, Lease, QueueLimits
from busbar.gateway.errors import ClientError
from busbar.gateway.routes import RouteTable
from busbar.kube.contracts.routes import Routes

LIMIT = 2
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from("abc")),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("routes"), st.sets(st.sampled_from("xyz"))),
        st.tuples(st.just("time"), st.integers(1, 3)),
    ),
    max_size=40,
)


class Play:
    """An endpoint picker, its waiting requests, and their leases."""

    def __init__(self) -> None:
        self.now = 0.0
        self.picker = EndpointPicker(
            QueueLimits(1e9, 6, 4, LIMIT, 1.0, 4.0), lambda: self.now, random.Random(0)
        )
        self.replicas: set[str] = set()
        self.tasks: list[asyncio.Task[Lease]] = []
        self.held: list[Lease] = []
        self.publish(set())

    def publish(self, replicas: set[str]) -> None:
        ends = [{"pod": r, "url": f"http://{r}", "ready": True} for r in sorted(replicas)]
        document = Routes.model_validate({"revision": 1, "services": [route("m", *ends)]})
        self.replicas = replicas
        self.table = RouteTable(document)
        self.picker.update(self.table)

    async def step(self, what: str, argument: object) -> None:
        service = self.table.services["team-a/m"]
        if what == "enter":
            enter = self.picker.enter(service, ("t", str(argument), "k"), self.now + 1e9)
            self.tasks.append(asyncio.create_task(enter))
        elif what in ("leave", "fail") and self.held:
            assert isinstance(argument, int)
            self.picker.leave(self.held.pop(argument % len(self.held)), suspect=what == "fail")
        elif what == "cancel" and self.tasks:
            assert isinstance(argument, int)
            self.tasks[argument % len(self.tasks)].cancel()
        elif what == "routes":
            assert isinstance(argument, set)
            self.publish(argument)
        elif what == "time":
            assert isinstance(argument, int)
            self.now += argument
            self.picker.update(self.table)
        for _ in range(4):
            await asyncio.sleep(0)
        self.collect()

    def collect(self) -> None:
        """Requests that were assigned an endpoint keep their lease; refused requests are removed."""
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled() and not isinstance(task.exception(), ClientError):
                self.held.append(task.result())

    def check(self) -> None:
        state = self.picker._services["team-a/m"]
        counted = {url: replica.in_flight for url, replica in state.replicas.items() if replica.in_flight}
        really: dict[str, int] = {}
        for lease in self.held:
            really[lease.endpoint.url] = really.get(lease.endpoint.url, 0) + 1
        assert counted == really
        assert max(really.values(), default=0) <= LIMIT
        assert len(state.queue) == len(self.tasks) <= 6
        if len(state.queue):
            assert not self.picker._open(state, state.queue.peek(), self.now, {}), (
                "one waits beside a free replica"
            )


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_leases_are_counted_limits_hold_and_nobody_waits_beside_a_free_replica(
    steps: list[tuple[str, object]],
) -> None:
    async def play() -> None:
        here = Play()
        for what, argument in steps:
            await here.step(what, argument)
            here.check()
        for task in here.tasks:
            task.cancel()
        await asyncio.gather(*here.tasks, return_exceptions=True)

    asyncio.run(play())
