"""The lease, with a server that hangs, fails or answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from busbar.kube.client import Object
from busbar.kube.errors import ConnectionFailed
from busbar.operator import lease as module
from busbar.operator.errors import Fenced
from busbar.operator.lease import LeaseKeeper


@pytest.fixture(autouse=True)
async def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still while anything runs, and jumps to the next timer: no machine is too slow for a lease."""
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
    """One Lease; ``faults`` says what becomes of the next reads: "hang" or "fail"."""

    def __init__(self, holder: str = "me") -> None:
        self.lease: Object = {
            "metadata": {"resourceVersion": "1"},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 1},
        }
        self.faults: list[str] = []
        self.renewals = 0
        self.renewed = asyncio.Event()

    async def get(self, *_: Any) -> Object:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "fail":
            raise ConnectionFailed("away")
        return self.lease

    async def replace(self, resource: Any, body: Object, namespace: str) -> Object:
        self.lease = {**body, "metadata": {"resourceVersion": str(self.renewals + 2)}}
        self.renewals += 1
        self.renewed.set()
        return self.lease


def keeper(server: Server) -> LeaseKeeper:
    return LeaseKeeper(server, "ns", "lease", "me", duration_s=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("faults", [["hang"], ["fail", "fail", "fail"]])
async def test_a_renewal_that_hangs_or_fails_is_tried_again_in_time(faults: list[str]) -> None:
    server = Server()
    lease = keeper(server)
    await lease.acquire()
    server.renewed.clear()
    server.faults = faults
    task = asyncio.create_task(lease.keep())
    async with asyncio.timeout(5):
        await server.renewed.wait()
    assert lease.held()
    assert not task.done()
    task.cancel()


@pytest.mark.parametrize("fault", ["hang", "fail"])
async def test_the_fence_closes_when_no_renewal_succeeds(fault: str) -> None:
    server = Server()
    lease = keeper(server)
    await lease.acquire()
    server.faults = [fault] * 1000
    with pytest.raises(Fenced):
        async with asyncio.timeout(5):
            await lease.keep()


async def test_somebody_elses_lease_is_not_written() -> None:
    server = Server()
    lease = keeper(server)
    await lease.acquire()
    server.lease["spec"]["holderIdentity"] = "another"
    with pytest.raises(Fenced):
        async with asyncio.timeout(5):
            await lease.keep()
    assert server.lease["spec"]["holderIdentity"] == "another"
