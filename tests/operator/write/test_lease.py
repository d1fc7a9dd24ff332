"""The lease and its fence, with a server that hangs, is slow, fails or answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from busbar.kube.client import Object
from busbar.kube.errors import Conflict, ConnectionFailed, NotFound
from busbar.operator.errors import Fenced
from busbar.operator.write import lease as module
from busbar.operator.write.lease import Fence, Hold, LeaseKeeper


@pytest.fixture(autouse=True)
async def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still while anything runs, and jumps to the next timer, so a slow machine cannot lose a lease."""
    loop: Any = asyncio.get_running_loop()
    select, now = loop._selector.select, loop.time()

    def jump(timeout: float | None = None) -> Any:
        nonlocal now
        now += timeout or 0.0
        return select(0)

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop._selector, "select", jump)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))


class Server:
    """One Lease; ``faults`` says what becomes of the next calls: "hang", "fail" or seconds until the answer."""

    def __init__(self, holder: str = "me") -> None:
        self.lease: Object | None = {
            "metadata": {"resourceVersion": "1"},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 1},
        }
        self.faults: list[str | float] = []
        self.slow_s = 0.0
        self.reads = self.renewals = 0

    async def _fault(self) -> None:
        fault = self.faults.pop(0) if self.faults else self.slow_s
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "fail":
            raise ConnectionFailed("away")
        await asyncio.sleep(float(fault))

    async def get(self, *_: Any) -> Object:
        self.reads += 1
        await self._fault()
        if self.lease is None:
            raise NotFound(404, "NotFound", "gone", "GET lease")
        return self.lease

    async def create(self, resource: Any, body: Object, namespace: str) -> Object:
        return self._write(body)

    async def replace(self, resource: Any, body: Object, namespace: str) -> Object:
        await self._fault()
        if self.lease is None:
            raise NotFound(404, "NotFound", "gone", "PUT lease")
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "changed", "PUT lease")
        return self._write(body)

    def _write(self, body: Object) -> Object:
        self.renewals += 1
        self.lease = {**body, "metadata": {"resourceVersion": str(self.renewals + 1000)}}
        return self.lease

    def taken(self, holder: str) -> None:
        assert self.lease is not None
        spec = {**self.lease["spec"], "holderIdentity": holder, "acquireTime": "later"}
        version = str(int(self.lease["metadata"]["resourceVersion"]) + 1)
        self.lease = {"metadata": {"resourceVersion": version}, "spec": spec}


DURATION_S = 15.0


@asynccontextmanager
async def kept(server: Server) -> AsyncIterator[LeaseKeeper]:
    """A keeper that holds the lease and goes on renewing it."""
    renewed = asyncio.Event()
    lease = LeaseKeeper(server, "ns", "lease", "me", DURATION_S, renewed.set)  # type: ignore[arg-type]
    task = asyncio.create_task(lease.run())
    await renewed.wait()
    yield lease
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def held(lease: LeaseKeeper) -> bool:
    return asyncio.get_running_loop().time() < lease.hold.until


@pytest.mark.parametrize("faults", [["hang"], ["fail", "fail", "fail"], ["hang", "fail"]])
async def test_a_renewal_that_hangs_or_fails_is_tried_again_in_time(faults: list[str | float]) -> None:
    server = Server()
    async with kept(server) as lease:
        server.faults = faults
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert held(lease)
        assert lease.hold.term == 1
        assert not server.faults


async def test_a_server_that_answers_late_costs_no_term_and_a_renewal_reads_nothing() -> None:
    server = Server()
    async with kept(server) as lease:
        server.slow_s, reads = 0.35 * DURATION_S, server.reads
        for _ in range(1000):
            await asyncio.sleep(0.1)
            assert held(lease)
        assert (lease.hold.term, server.reads) == (1, reads)


@pytest.mark.parametrize("fault", ["hang", "fail"])
async def test_the_fence_closes_when_no_renewal_succeeds_and_the_term_goes_on_when_one_does(
    fault: str,
) -> None:
    server = Server()
    async with kept(server) as lease:
        fence = Fence(lambda: lease.hold)
        with pytest.raises(Fenced):
            fence.check()
        fence.open(lease.hold.term)
        assert 0 < fence.check() <= 0.8 * DURATION_S
        server.faults = [fault] * 1000
        await asyncio.sleep(DURATION_S)
        with pytest.raises(Fenced):
            fence.check()
        server.faults.clear()
        await asyncio.sleep(2 * DURATION_S)
        assert lease.hold.term == 1  # nobody else held it meanwhile
        assert fence.check() > 0


async def test_somebody_elses_lease_is_not_written_and_is_taken_in_a_new_term_after_its_time() -> None:
    server = Server()
    async with kept(server) as lease:
        fence = Fence(lambda: lease.hold)
        fence.open(lease.hold.term)
        server.taken("another")
        await asyncio.sleep(DURATION_S * 0.9)
        assert server.lease is not None
        assert server.lease["spec"]["holderIdentity"] == "another"
        assert not held(lease)
        await asyncio.sleep(DURATION_S)
        assert server.lease["spec"]["holderIdentity"] == "me"
        assert held(lease)
        assert lease.hold.term == 2
        with pytest.raises(Fenced):
            fence.check()  # what the other has written is not read yet
        fence.open(2)
        assert fence.check() > 0


async def test_a_lease_that_was_deleted_is_made_again_in_a_new_term() -> None:
    server = Server()
    async with kept(server) as lease:
        server.lease = None
        await asyncio.sleep(DURATION_S)
        assert held(lease)
        assert lease.hold.term == 2


async def test_a_released_lease_is_free_and_a_dropped_one_is_not() -> None:
    server = Server()
    lease = LeaseKeeper(server, "ns", "lease", "me", DURATION_S)  # type: ignore[arg-type]
    assert await lease._try()
    await lease.release()
    assert not held(lease)
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""
    assert await lease._try()
    lease.drop()
    await lease.release()
    assert lease.hold == Hold(2, holder="me")
    assert server.lease["spec"]["holderIdentity"] == "me"


class Foreign:
    """A keeper that looks at a lease of somebody else's when it is told to."""

    def __init__(self) -> None:
        self.server = Server("another")
        self.server.taken("another")
        assert self.server.lease is not None
        self.server.lease["spec"]["leaseDurationSeconds"] = DURATION_S
        self.keeper = LeaseKeeper(self.server, "ns", "lease", "me", DURATION_S)  # type: ignore[arg-type]

    async def looks(self, *pauses_s: float) -> list[bool]:
        """After each pause: whether the lease was taken."""
        found = []
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            found.append(await self.keeper._try())
        return found


async def test_a_standby_that_always_looked_takes_the_lease_after_its_duration() -> None:
    assert await Foreign().looks(*[1.0] * 16, 1.1) == [False] * 16 + [True]


@pytest.mark.parametrize("silent_s", [6.0, 14.0, 100.0])
async def test_a_standby_that_could_not_look_leaves_the_holder_time_for_one_renewal(silent_s: float) -> None:
    foreign = Foreign()
    assert await foreign.looks(0.0, 1.0, silent_s) == [False] * 3
    foreign.server.taken("another")  # the renewal that was late with it
    assert await foreign.looks(1.0, 1.0) == [False] * 2
    assert foreign.keeper.hold.holder == "another"


@pytest.mark.parametrize("every_s", [5.1, 6.0, 14.0, 100.0])
async def test_a_standby_that_looks_late_each_time_still_takes_the_lease(every_s: float) -> None:
    found = await Foreign().looks(0.0, *[every_s] * 5)
    assert found[-1]
