"""Leases reach an agent over HTTP, and only from the operator that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.agent.boards import Clock
from tests.operator.agent.lease_keys import CERTIFICATE
from tests.operator.agent.lease_keys import KEY as SIGNING
from tests.operator.power.parts import domain, node

from busbar.kube.contracts.power import SIMULATOR, LeaseState
from busbar.operator.agent.probing import probed
from busbar.operator.agent.server import Agent
from busbar.operator.agent.settings import Settings as AgentSettings
from busbar.operator.power.gatherer import Gatherer, Source
from busbar.operator.power.lessor import Lessor
from busbar.operator.power.membership import membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.settings import Settings

KEY = b"0123456789abcdef"
FOUND = membership([domain("rack", 1000.0, None, "Static", 100.0, rack="a")], [node("n", rack="a")])


class Site:
    """One agent, the operator's two ends of the lines to it, and one clock."""

    def __init__(self, agent: Agent, clock: Clock) -> None:
        self.agent, self.clock = agent, clock
        settings = Settings(power_key=KEY, power_lease_key=SIGNING)
        self.registry = CollectorRegistry()
        self.gatherer = Gatherer(settings, clock)
        self.settings = settings
        self.lessor = Lessor(settings, PowerMetrics(self.registry), clock)
        self.source = Source(f"http://127.0.0.1:{agent.port}/telemetry", SIMULATOR, frozenset({"n"}))

    async def second(self) -> LeaseState | None:
        """One second: looks, a question, a round, and its messages."""
        for _ in range(5):
            self.clock.now_s += 0.2
            self.agent.sample()
        await self.gatherer._ask(self.source)
        await self.lessor.round(FOUND, self.gatherer.readings, [self.source])
        await asyncio.gather(*self.lessor._sending)
        limits = self.gatherer.readings["n"].limits
        return limits.state if limits is not None else None


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    clock = Clock()
    settings = AgentSettings(
        key=KEY, backend="simulated", host="127.0.0.1", port=0, simulated_nodes=("n",), simulated_boards=2,
        simulated_host_watts=100.0, set_limits=True, lease_cert=CERTIFICATE,
    )  # fmt: skip
    agent = Agent(settings, probed(settings), clock)
    await agent.start()
    made = Site(agent, clock)
    yield made
    await made.gatherer.close()
    await made.lessor.close()
    await agent.stop()


def total(registry: CollectorRegistry, name: str) -> float:
    return registry.get_sample_value(name) or 0.0


async def test_an_operator_sends_only_while_it_leads(site: Site) -> None:
    for _ in range(3):
        assert await site.second() is LeaseState.STANDING
    assert site.lessor.feeds == {}
    left_s = 20.0
    site.lessor.left_s = lambda: left_s
    await site.second()
    assert await site.second() is LeaseState.LEASED
    for _ in range(20):
        await site.second()
    lease_w = site.gatherer.readings["n"].limits
    assert lease_w is not None
    assert lease_w.lease_watts == pytest.approx(900.0), "the nameplate: a budget of 1,000 W is no limit"
    assert site.lessor.feeds["rack"].leased_w == pytest.approx(900.0)
    assert site.lessor.why == {"n": "the domain's policy is Static: every node has the same lease"}
    sent = total(site.registry, "busbar_power_actuation_seconds_count")
    assert 5 <= sent < 22, "a lease that stays is not sent each second"
    left_s = 0.0
    states = [await site.second() for _ in range(12)]
    assert states[0] is LeaseState.LEASED
    assert states[-1] is LeaseState.STANDING, "leases end"
    await site.lessor.close()
    site.lessor = Lessor(
        site.settings, PowerMetrics(CollectorRegistry()), site.clock
    )  # another process leads
    site.lessor.left_s = lambda: 20.0
    await site.second()
    assert await site.second() is LeaseState.LEASED, "its sequences are above those of the leader before"


async def test_what_was_decided_before_the_lead_was_lost_is_not_sent(site: Site) -> None:
    answers = iter([20.0, 0.0])
    site.lessor.left_s = lambda: next(answers)
    await site.second()
    site.lessor.left_s = lambda: 0.0
    assert await site.second() is LeaseState.STANDING


async def test_an_agent_that_refuses_or_is_away_is_logged_once_and_delays_nobody(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.lessor.left_s = lambda: 20.0
    await site.gatherer._ask(site.source)
    away = replace(site.source, url="http://127.0.0.1:1/telemetry")
    for _ in range(3):
        await site.lessor.round(FOUND, site.gatherer.readings, [away])
        await asyncio.gather(*site.lessor._sending)
    assert sum("leases not taken" in record.message for record in caplog.records) == 1
