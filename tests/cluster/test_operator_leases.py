"""Leases from the real operator to processes of agent and guard: what dies and comes back never overruns the feed.

The boards are simulated, and their limits are files, which stay when a process ends as they stay in a real board. The
truth is the sum of these limits: what the boards may draw at most, whatever they are doing. A task looks at it all the
time, from when the budget first holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_power import KEY, add_racks, conditions, feed
from tests.free_port import free_port
from tests.operator.agent.lease_keys import CERTIFICATE
from tests.operator.agent.lease_keys import KEY as SIGNING

from busbar.kube.contracts.power import SIMULATED_LABEL
from busbar.kube.resources import EVENTS, NODES, POWER_DOMAINS
from busbar.operator.agent.simulated import FolderLimits

HOME = "lease-home"
"""The platform's namespace here."""
NAMES = ("red-0", "red-1")
BOARDS = tuple(f"SIMULATED-{name}-{i}" for name in NAMES for i in range(2))
HOSTS_W, FLOORS_W, NAMEPLATES_W = 200.0, 600.0, 1800.0
BUDGET_W = 1500.0


@dataclass
class Rack:
    """Nodes with boards of 100 to 400 W and hosts of 100 W, and the processes that limit them."""

    folder: Path
    names: tuple[str, ...] = NAMES
    boards: int = 2
    """Of each node."""
    port: int = field(default_factory=free_port)
    most_w: float | None = None
    """What the boards may draw at most; None: nobody looks."""
    overruns: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "power-key").write_bytes(KEY)
        (self.folder / "certificate").write_bytes(CERTIFICATE)
        (self.folder / "limits").mkdir()
        self.limits = FolderLimits(self.folder / "limits")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def watts(self) -> float:
        """What hosts and boards may draw."""
        boards = (f"SIMULATED-{name}-{i}" for name in self.names for i in range(self.boards))
        return 100.0 * len(self.names) + sum(self.limits.get(uuid, 400.0) for uuid in boards)

    @contextlib.asynccontextmanager
    async def process(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        env = {
            **os.environ,
            "PYTHONPATH": ".src",
            "BUSBAR_POWER_KEY_FILE": str(self.folder / "power-key"),
            "BUSBAR_POWER_LEASE_CERT_FILE": str(self.folder / "certificate"),
            "BUSBAR_AGENT_BACKEND": "simulated",
            "BUSBAR_AGENT_SIMULATED_NODES": ",".join(self.names),
            "BUSBAR_AGENT_SIMULATED_BOARDS": str(self.boards),
            "BUSBAR_AGENT_SIMULATED_HOST_WATTS": "100",
            "BUSBAR_AGENT_SIMULATED_LIMITS_DIR": str(self.folder / "limits"),
            "BUSBAR_AGENT_SET_LIMITS": "true",
            "BUSBAR_AGENT_HEARTBEAT_FILE": str(self.folder / "beat"),
            "BUSBAR_AGENT_HOST": "127.0.0.1",
            "BUSBAR_AGENT_PORT": str(self.port),
            "BUSBAR_AGENT_LOG_LEVEL": "error",
        }
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "busbar.operator.agent.main", *arguments, env=env
        )
        try:
            yield made
        finally:
            if made.returncode is None:
                made.kill()
            await made.wait()

    async def has(self, holds: Callable[[float], bool]) -> None:
        """Waits until the sum is as wanted."""

        async def look() -> float:
            return self.watts

        await becomes(look, holds)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks at the sum until the end, and fails where it was ever too much."""

        async def look() -> None:
            while True:
                # Three times: files that are read while one is lowered and another raised are no sum of one moment.
                if self.most_w is not None and all(self.watts > (self.most_w or 0) for _ in range(3)):
                    self.overruns.append(self.watts)
                await asyncio.sleep(0.01)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()
        assert self.overruns == []


def is_leasing(status: dict[str, Any]) -> bool:
    """Every node has a lease that the operator has read back, and together they use the budget."""
    return (
        conditions(status).get("Ready") == ("True", "Leasing")
        and conditions(status).get("CapConflict") == ("False", "NoConflict")
        and 0.95 * BUDGET_W < status.get("leasedWatts", 0) <= 0.99 * BUDGET_W + 0.1
    )


async def test_leases_hold_whatever_dies_and_end_with_their_domain(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    settings = replace(
        QUICK, namespace=HOME, power_key=KEY, power_lease_key=SIGNING, power_status_s=0.5, power_lease_s=4.0
    )
    await asyncio.to_thread(apiserver.make_namespace, HOME)
    rack = Rack(tmp_path)
    async with (
        Cluster(apiserver, settings=settings) as cluster,
        rack.process("guard"),
        rack.process() as agent,
        rack.watched(),
    ):
        await add_racks(cluster, apiserver, red=2)
        for name in NAMES:
            await cluster.client.patch(NODES, name, {"metadata": {"labels": {SIMULATED_LABEL: ""}}})
        await rack.has(lambda watts: watts == FLOORS_W)  # the agent has started
        await cluster.start(power_simulator_url=rack.url)
        await rack.has(lambda watts: watts == NAMEPLATES_W)  # no domain: released

        domain = feed("red", BUDGET_W, rack="red")
        domain["spec"] |= {"policy": "Lease", "hostWatts": 100}
        await cluster.create(domain)
        status = await cluster.until(POWER_DOMAINS, "red", is_leasing)
        rack.most_w = BUDGET_W
        await rack.has(lambda watts: 0.95 * BUDGET_W < watts <= 0.99 * BUDGET_W)
        assert status["nameplateWatts"] == NAMEPLATES_W
        await cluster.until(POWER_DOMAINS, "red", lambda s: s["cappedNodes"] >= 1)

        agent.send_signal(signal.SIGSTOP)
        await rack.has(lambda watts: watts == FLOORS_W)
        await cluster.until(
            POWER_DOMAINS, "red", lambda s: conditions(s)["TelemetryFresh"] == ("False", "NodesSilent")
        )
        agent.send_signal(signal.SIGCONT)
        await rack.has(lambda watts: watts > 0.95 * BUDGET_W)

        cluster.proxy.killed.set()
        await cluster.kill()
        await rack.has(lambda watts: watts == FLOORS_W)
        cluster.proxy.killed.clear()
        operator = await cluster.start(power_simulator_url=rack.url)
        await cluster.until(POWER_DOMAINS, "red", is_leasing)
        await rack.has(lambda watts: watts > 0.95 * BUDGET_W)

        agent.kill()
        await rack.has(lambda watts: watts == FLOORS_W)
        async with rack.process():
            await rack.has(lambda watts: watts > 0.95 * BUDGET_W)
            operator.handlers.power.show()
            sample = operator.metrics.registry.get_sample_value
            leased = sample("busbar_power_domain_watts", {"domain": "red", "kind": "leased"})
            assert leased is not None
            assert leased <= 0.99 * BUDGET_W + 0.1
            limits = [
                sample("busbar_power_board_limit_watts", {"node": uuid[10:-2], "uuid": uuid})
                for uuid in BOARDS
            ]
            assert all(limit is not None for limit in limits)
            assert HOSTS_W + sum(limit or 0 for limit in limits) <= 0.99 * BUDGET_W
            assert (sample("busbar_power_actuation_seconds_count") or 0) > 1
            assert (
                sample("busbar_power_capped_seconds_total", {"node": "red-0", "reason": "Leased"}) or 0
            ) > 0

            rack.most_w = None  # a foreign limit lasts until the agent looks
            rack.limits[BOARDS[0]] = 390.0 if rack.limits[BOARDS[0]] < 350 else 150.0
            await cluster.until(
                POWER_DOMAINS, "red", lambda s: conditions(s)["CapConflict"] == ("True", "CapConflict")
            )
            await rack.has(lambda watts: watts <= BUDGET_W)
            rack.most_w = BUDGET_W

            await cluster.client.patch(POWER_DOMAINS, "red", {"spec": {"budgetWatts": 700}})
            await rack.has(lambda watts: watts <= 693)
            rack.most_w = 700.0
            await cluster.client.patch(POWER_DOMAINS, "red", {"spec": {"budgetWatts": 500}})
            await cluster.until(
                POWER_DOMAINS, "red", lambda s: conditions(s)["Ready"] == ("False", "FloorAboveBudget")
            )
            assert rack.watts == FLOORS_W

            rack.most_w = None
            await cluster.client.patch(POWER_DOMAINS, "red", {"spec": {"policy": "Observe"}})
            await rack.has(lambda watts: watts == NAMEPLATES_W)
            status = await cluster.until(
                POWER_DOMAINS, "red", lambda s: conditions(s)["Ready"] == ("True", "Observing")
            )
            assert "leasedWatts" not in status
            assert "CapConflict" not in conditions(status)
            await cluster.client.patch(
                POWER_DOMAINS, "red", {"spec": {"policy": "Static", "budgetWatts": BUDGET_W}}
            )
            await rack.has(lambda watts: watts <= BUDGET_W)
            rack.most_w = BUDGET_W
            await rack.has(lambda watts: watts == FLOORS_W or watts > 0.95 * BUDGET_W)
            rack.most_w = None
            await cluster.client.delete(POWER_DOMAINS, "red")
            await rack.has(lambda watts: watts == NAMEPLATES_W)
            events, _ = await cluster.client.list(EVENTS)
            assert "CapConflict" in [e["reason"] for e in events if e["involvedObject"]["name"] == "red"]
