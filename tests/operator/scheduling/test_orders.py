"""Rounds that plan while the writes of earlier ones are in flight: no place is given twice, no job is admitted twice."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import NOW, SETTINGS, job, placement, pool, tenant, view

from busbar.kube.errors import Conflict, ConnectionFailed, Forbidden
from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.operator.decisions import Admit, Decision, Lift, Release, Wait
from busbar.operator.errors import Fenced
from busbar.operator.metrics import Metrics
from busbar.operator.pods.claims import Claim
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.orders import Order, Orders, with_orders
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.steady_clock import utc_now
from busbar.operator.training.reconcile import reconcile
from busbar.operator.watch.caches import Caches
from busbar.scheduler import ActionKind, Job, JobId, Policy, Resources, Run

NODES, PER_NODE = 2, 8
SIZES = (1, 3, 4, 8)


@dataclass
class _Write:
    """A status under way to the server."""

    key: Key
    assumed: str
    status: dict[str, Any]
    answer: asyncio.Future[None]


class _World:
    """Rounds, the caches and the controller as they are, the real reconcile, and a server whose answers the test gives."""

    def __init__(self) -> None:
        self.caches = Caches(cast(Any, None), self._changed, inactivity_s=60.0)
        self.controller = Controller(Metrics(), workers=1, backoff_s=(3600.0, 3600.0))
        self.controller.handles("TrainingJob", self._reconcile)
        self.orders = Orders(self.controller, self._read, self._failed, wait_s=0.0, sleep=self._sleep)
        self.rounds = Rounds(
            self.caches,
            self.controller,
            SETTINGS,
            Metrics(),
            Policy(guarantee_reclaim_s=1e-3, min_run_s=1e-3),
            orders=self.orders,
        )
        self.stored: dict[Key, TrainingJob] = {}
        self.version = 100
        self.watch: deque[TrainingJob] = deque()
        self.writes: list[_Write] = []
        self.zombies: list[_Write] = []
        """Writes without an answer that the server may still carry out."""
        self.sleepers: list[asyncio.Future[None]] = []
        self.made = self.failures = 0
        self.caches.pools.observe(pool().to_wire())
        quota = [{"accelerator": "cpu", "guaranteed": PER_NODE}]
        self.caches.tenants.observe(tenant("team", ["team"], quota=quota).to_wire())
        self.caches.tenants.observe(tenant("others", ["others"]).to_wire())
        size = {"cpu": str(PER_NODE), "memory": "32Gi", "ephemeral-storage": "100Gi"}
        for number in range(NODES):
            labels = {"pool": "cpu", "kubernetes.io/hostname": f"node-{number}"}
            meta = {"name": f"node-{number}", "labels": labels, "resourceVersion": "1"}
            ready = [{"type": "Ready", "status": "True"}]
            self.caches.nodes.observe(
                {"metadata": meta, "status": {"allocatable": size, "conditions": ready}}
            )

    def _changed(self, kind: str, key: Key, old: Any, new: Any) -> None:
        if hasattr(self, "rounds"):
            self.rounds.changed(kind, key, new)

    def _failed(self) -> None:
        self.failures += 1

    async def _sleep(self, seconds: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append(waiting)
        await waiting

    async def _read(self, item: Item) -> bool:
        self.caches.jobs.observe(self.stored[item.key].to_wire())
        return True

    async def _reconcile(self, key: Key, decisions: tuple[Decision, ...]) -> None:
        known = self.caches.jobs.items.get(key)
        if known is None:
            return
        decision = next((d for d in decisions if isinstance(d, Admit | Release | Lift | Wait)), None)
        update = reconcile(view(known, now=utc_now()), decision)
        if update.status is None:
            return
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        version = known.metadata.resource_version or ""
        self.writes.append(_Write(key, version, update.status.to_wire(), answer))
        await answer
        self.caches.jobs.observe(self.stored[key].to_wire())

    # -- the server -----------------------------------------------------------------------------------------------

    def _store(self, found: TrainingJob, status: dict[str, Any] | None) -> None:
        self.version += 1
        wire = found.to_wire()
        wire["metadata"]["resourceVersion"] = str(self.version)
        if status is not None:
            wire["status"] = status
        stored = TrainingJob.model_validate(wire)
        self.stored[Key(stored.metadata.namespace or "", stored.metadata.name)] = stored
        self.watch.append(stored)

    def _land(self, write: _Write) -> bool:
        """Carries a write out, unless the object has changed since."""
        before = self.stored[write.key]
        if before.metadata.resource_version != write.assumed:
            return False
        self._store(before, write.status)
        after = self.stored[write.key]
        was, now = ((one.status.attempt or 0) if one.status is not None else 0 for one in (before, after))
        if now != was:
            assert now == was + 1
            assert before.status is None or before.status.admission is None, "it was admitted twice"
        self.check()
        return True

    def check(self) -> None:
        """No node holds more than it has."""
        held: dict[str, int] = {}
        for found in self.stored.values():
            admission = found.status.admission if found.status is not None else None
            for node in admission.nodes if admission is not None else ():
                held[node] = held.get(node, 0) + found.spec.shape.accelerators_per_pod
        assert all(amount <= PER_NODE for amount in held.values()), held

    # -- what happens ---------------------------------------------------------------------------------------------

    async def submit(self, number: int) -> None:
        self.made += 1
        size = SIZES[number % len(SIZES)]
        made = job(f"job-{self.made}", template={"image": "own"}, shape={"acceleratorsPerPod": size})
        wire = made.to_wire()
        wire["metadata"]["namespace"] = ("team", "others")[number // len(SIZES) % 2]
        self._store(TrainingJob.model_validate(wire), None)

    async def round(self, number: int) -> None:
        await self.rounds.once(full=number % 4 == 0)

    async def hear(self, number: int) -> None:
        """The watch tells of some changes, in their order."""
        for _ in range(min(number + 1, len(self.watch))):
            self.caches.jobs.observe(self.watch.popleft().to_wire())

    async def answer(self, number: int) -> None:
        """One of the writes in flight ends, in whichever way."""
        if not self.writes:
            return
        write = self.writes.pop(number % len(self.writes))
        how = number % 7
        conflict = Conflict(409, "Conflict", "it has changed", "PATCH")
        if how in (0, 1, 2):
            write.answer.set_result(None) if self._land(write) else write.answer.set_exception(conflict)
        elif how == 3:  # carried out, and the answer is lost
            self._land(write)
            write.answer.set_exception(ConnectionFailed("reset"))
        elif how == 4:  # nobody knows
            self.zombies.append(write)
            write.answer.set_exception(ConnectionFailed("no answer"))
        elif how == 5:
            write.answer.set_exception(Forbidden(403, "Forbidden", "refused", "PATCH"))
        else:
            write.answer.set_exception(Fenced("the lease is not held"))

    async def late(self, number: int) -> None:
        """The server carries out what it had not answered, if it still can."""
        if self.zombies:
            self._land(self.zombies.pop(number % len(self.zombies)))

    async def again(self, number: int) -> None:
        """An order is sent again."""
        if self.sleepers:
            self.sleepers.pop(number % len(self.sleepers)).set_result(None)

    async def reconcile(self, number: int) -> None:
        """A worker takes an object in between."""
        keys = sorted(self.caches.jobs.items)
        if keys:
            process = self.controller.process(Item("TrainingJob", keys[number % len(keys)]))
            self.others.append(asyncio.create_task(process))

    async def end(self, number: int) -> None:
        """A job that holds something ends."""
        keys = [
            k for k, one in sorted(self.stored.items()) if one.status is not None and one.status.admission
        ]
        if keys:
            found = self.stored[keys[number % len(keys)]]
            assert found.status is not None
            status = found.status.to_wire() | {"phase": "Succeeded"}
            self._store(found, {name: value for name, value in status.items() if name != "admission"})

    async def edit(self, number: int) -> None:
        """Somebody changes an object: what is in flight for it is refused."""
        keys = sorted(self.stored)
        if keys:
            self._store(self.stored[keys[number % len(keys)]], None)

    async def run(self, script: list[tuple[str, int]]) -> None:
        self.others: list[asyncio.Task[Any]] = []
        for name, number in script:
            await getattr(self, name)(number)
            await _settle()
        await self.calm()

    async def calm(self) -> None:
        """From now on everything is answered; at the end nothing is in flight and no plan has anything to order."""
        for _ in range(60):
            for number in range(len(self.zombies)):
                await self.late(number)
            while self.writes or self.sleepers or self.watch:
                await self.answer(0)
                await self.again(0)
                await self.hear(100)
                await _settle()
            made = await self.rounds.once()
            if not made.actions and not self.orders.in_flight:
                break
            for key in self.caches.jobs.items:
                self.others.append(asyncio.create_task(self.controller.process(Item("TrainingJob", key))))
        else:
            raise AssertionError("it never comes to rest")
        await asyncio.gather(*self.others)
        self.controller.queue.close()


STEPS = ("submit", "round", "hear", "answer", "late", "again", "reconcile", "end", "edit")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 27)), max_size=60))
def test_no_place_is_given_twice_however_late_and_lost_the_answers_are(script: list[tuple[str, int]]) -> None:
    async def run() -> None:
        await _World().run(script)

    asyncio.run(run())


OTHERS_OF_8, OURS_OF_8, OTHERS_OF_1 = 7, 3, 4
"""Numbers of `submit`."""


async def _told(*script: tuple[str, int]) -> _World:
    world = _World()
    for name, number in script:
        await getattr(world, name)(number)
        await _settle()
    return world


async def _settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_round_plans_while_the_admissions_of_the_one_before_are_written() -> None:
    world = await _told(
        ("submit", OTHERS_OF_8), ("hear", 9), ("round", 0), ("submit", OTHERS_OF_8), ("hear", 9)
    )
    assert [write.key.name for write in world.writes] == ["job-1"]
    await world.round(1)
    assert [write.key.name for write in world.writes] == ["job-1", "job-2"]
    nodes = {write.status["admission"]["nodes"][0] for write in world.writes}
    assert nodes == {"node-0", "node-1"}
    await world.submit(OTHERS_OF_1)
    await world.hear(9)
    await world.round(1)
    assert len(world.writes) == 2, "there is no place, and nothing is ordered twice"
    assert len(world.orders.in_flight) == 2
    await world.run([])
    assert not world.orders.in_flight


async def test_a_place_whose_admission_was_refused_is_given_to_another_in_the_next_round() -> None:
    full = ("submit", OTHERS_OF_8), ("submit", OTHERS_OF_8), ("hear", 9), ("round", 0)
    world = await _told(*full, ("submit", OTHERS_OF_8), ("hear", 9))
    refused, kept = (write.key for write in world.writes)
    world.writes.pop(0).answer.set_exception(Forbidden(403, "Forbidden", "refused", "PATCH"))
    await _settle()
    assert (world.failures, set(world.orders.in_flight)) == (1, {Item("TrainingJob", kept)})
    made = await world.rounds.once(full=False)
    assert len(made.actions) == 1
    assert len(world.writes) == 2
    assert refused.name in {"job-1", "job-2"}
    await world.run([])


async def test_an_admission_without_an_answer_holds_its_place_until_it_is_known() -> None:
    """The server carries it out only when it has been sent again, and the watch says nothing of it."""
    full = ("submit", OTHERS_OF_8), ("submit", OTHERS_OF_8), ("hear", 9), ("round", 0)
    world = await _told(*full, ("submit", OTHERS_OF_8), ("hear", 9))
    lost = world.writes.pop(0)
    lost.answer.set_exception(ConnectionFailed("no answer"))
    await _settle()
    await world.round(1)
    assert len(world.writes) == 1, "nothing is known of it, so nobody gets its place"
    await world.again(0)
    await _settle()
    again = world.writes.pop()
    assert (again.key, again.assumed) == (lost.key, lost.assumed)
    assert world._land(lost)
    assert not world._land(again)
    again.answer.set_exception(Conflict(409, "Conflict", "it has changed", "PATCH"))
    await _settle()
    admitted = world.caches.jobs.items[lost.key].status
    assert admitted is not None
    assert admitted.admission is not None, "it was read"
    await world.round(1)
    assert len(world.writes) == 1
    await world.run([])


async def test_a_release_in_flight_is_not_ordered_again_and_nobody_else_is_stopped() -> None:
    world = await _told(("submit", OTHERS_OF_8), ("submit", OTHERS_OF_8), ("hear", 9), ("round", 0), ("answer", 0),
                        ("answer", 0), ("hear", 9), ("submit", OURS_OF_8), ("hear", 9), ("round", 0))  # fmt: skip
    stopped = [write.key for write in world.writes if write.status.get("release")]
    assert len(stopped) == len(world.writes) == 1
    for _ in range(3):
        await world.round(1)
        await world.round(0)
    assert [write.key for write in world.writes] == stopped
    await world.run([])


async def test_orders_begin_in_the_order_of_their_plan() -> None:
    seen: list[str] = []
    controller, may = Controller(Metrics(), workers=1), asyncio.Event()

    async def note(key: Key, decisions: tuple[Decision, ...]) -> None:
        seen.append(key.name)
        await may.wait()

    controller.handles("TrainingJob", note)
    orders = Orders(controller, cast(Any, None), lambda: None, wait_s=0.0)
    items = [Item("TrainingJob", Key("ns", name)) for name in "cabd"]
    for some in (items[:2], items[2:]):
        await orders.carry_out(dict.fromkeys(some, ()), {item: {} for item in some}, lambda: None)
    assert seen == list("cabd")
    may.set()
    await orders.close()


async def test_a_round_that_ends_ends_its_orders() -> None:
    controller, begun, ended = Controller(Metrics(), workers=1), list[str](), list[str]()

    async def note(key: Key, decisions: tuple[Decision, ...]) -> None:
        begun.append(key.name)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(key.name)

    controller.handles("TrainingJob", note)
    orders = Orders(controller, cast(Any, None), lambda: None, wait_s=0.0)
    item = Item("TrainingJob", Key("ns", "a"))
    await orders.carry_out({item: ()}, {item: {}}, lambda: None)
    await orders.close()
    assert (begun, ended, orders.in_flight) == (["a"], ["a"], {})


def _job(run: Run | None = None) -> Job:
    return Job(JobId("x"), "x", "ns", "a", per_pod=Resources(1000), run=run)


RUNS = Run(placement(), NOW.timestamp())
LOW = replace(placement(), power_cap=0.5)


@pytest.mark.parametrize(
    ("kind", "before", "to", "after"),
    [
        (ActionKind.START, None, placement(), replace(RUNS, started_at_s=9.0)),
        (ActionKind.START, RUNS, LOW, RUNS),
        (ActionKind.PREEMPT, RUNS, None, replace(RUNS, releasing=True)),
        (ActionKind.MOVE, RUNS, LOW, replace(RUNS, releasing=True)),
        (ActionKind.SHRINK, RUNS, LOW, replace(RUNS, releasing=True)),
        (ActionKind.PREEMPT, None, None, None),
        (ActionKind.LIFT, replace(RUNS, placement=LOW), placement(), RUNS),
    ],
)
def test_an_order_counts_as_carried_out(
    kind: ActionKind, before: Run | None, to: Any, after: Run | None
) -> None:
    order = Order(kind, _job(before), to, 9.0)
    [found] = with_orders([Claim(_job(before))], {JobId("x"): order}, "7")
    assert found.job == _job(after)


def test_a_job_that_asks_for_nothing_any_more_holds_the_place_that_is_being_written() -> None:
    start = Order(ActionKind.START, _job(), placement(), 9.0, "7")
    stop = Order(ActionKind.PREEMPT, _job(RUNS), None, 9.0, "7")
    [found] = with_orders([], {JobId("x"): start}, "7")
    assert found.job.run == replace(RUNS, started_at_s=9.0)
    assert not list(with_orders([], {JobId("x"): stop}, "7"))
    for version in ("8", None):
        assert not list(with_orders([], {JobId("x"): start}, version)), "its write is refused, or was done"
    assert list(with_orders([], {JobId("x"): replace(start, version="")}, "8")), "a pod's is not"
