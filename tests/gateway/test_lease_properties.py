"""Several gateways with the API's real leases and ledger: whatever is lost, late or killed, no limit is exceeded."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from tests.api.conftest import sqlite_template

from busbar.api.access.budget_leases import BudgetLeases
from busbar.api.access.lease_shares import Holding, decide, fair_shares
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.records.usage_ledger import UsageLedger
from busbar.gateway.accounts import Accounts, Grant
from busbar.gateway.admissions import AdmissionRing
from busbar.gateway.errors import LimitReached
from busbar.gateway.request_cost import Estimate
from busbar.gateway.windows import WINDOW_S
from busbar.kube.contracts.allowances import NANO, Account, CostAllowance, Price
from busbar.kube.contracts.budget_leases import FALLBACK_S, LEASE_S, LeaseRequest
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import ServiceRoute
from busbar.kube.contracts.usage import UsageRecord

__all__ = ["sqlite_template"]

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
REQUESTS, TOKENS, MONEY = 24, 1600, 4000 * NANO // 10**6
"""Per minute and per day. A token costs a millionth."""
SERVICE = ServiceRoute(
    tenant="ada",
    namespace="ns",
    name="m",
    uid="u",
    model_id="m",
    bearer="b",
    price=Price(prompt=1.0, cached=1.0, output=1.0),
)


@dataclass
class Platform:
    """Virtual time, the database, and every acceptance of every gateway."""

    database: Database
    folder: Path
    gateways: int
    s: float = 0.0
    accepted: list[tuple[float, list[int]]] = field(default_factory=list)
    """When, and the tokens that it counts with now."""
    late: list[LeaseRequest] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = BudgetLeases(self.database, self.now)
        self.ledger = UsageLedger(self.database, self.now)
        self.sites = [Site(self, index) for index in range(self.gateways)]

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.s)

    def key(self) -> KeyIdentity:
        day = NOON.replace(hour=0)
        cost = CostAllowance(period="day", started=day, ends=day + timedelta(days=1), limit_nano=MONEY)
        limits = Account(name="key/k", requests_per_minute=REQUESTS, tokens_per_minute=TOKENS, costs=[cost])
        return KeyIdentity(key_id="k", subject="ann", tenant="ada", accounts=[limits])

    async def check(self) -> None:
        """The limits hold for all gateways together, and the API's leases are within them."""
        minute = [tokens for at, (tokens,) in self.accepted if at > self.s - WINDOW_S]
        assert len(minute) <= REQUESTS
        assert sum(minute) <= TOKENS
        async with self.database.read() as db:
            spent = sum((await db.scalars(select(tables.spending.c.cost_nano))).all())
            rows = (await db.execute(select(tables.budget_leases))).all()
        pending = sum(site.pending_nano for site in self.sites)
        assert spent / 2 + pending <= MONEY  # one sum for the key, one for the tenant
        for kind, limit in (("requests", REQUESTS), ("tokens", TOKENS), ("day", MONEY - spent / 2)):
            held = [
                row.amount if row.until > self.now() else row.fallback for row in rows if row.kind == kind
            ]
            assert sum(held) <= limit


@dataclass
class Running:
    name: str
    grant: Grant
    reserved: int
    counted: list[int]


class Site:
    """One gateway: its process, and what lies on its disk."""

    def __init__(self, platform: Platform, index: int) -> None:
        self.platform = platform
        self.name = f"gateway-{index}"
        self.boot_s = 1000.0 * index + 0.37 * index
        self.records: list[dict[str, Any]] = []
        self.acknowledged = self.written = self.processes = self.booked_through = 0
        self.count = 0
        self.running: list[Running] = []
        self.start()

    @property
    def pending_nano(self) -> int:
        """Of the records that the ledger lacks, and of what runs. A record whose receipt was not heard is in the ledger."""
        records: int = sum(each["costNano"] for each in self.records if each["seq"] > self.booked_through)
        return records + sum(each.reserved * NANO // 10**6 for each in self.running)

    def start(self) -> None:
        self.processes += 1
        self.number = self.processes * 2**32
        platform = self.platform
        self.accounts = Accounts(self.clock, platform.now, gateways=platform.gateways)
        assert self.accounts.shared is not None
        self.shared = self.accounts.shared
        for record in self.records:
            self.accounts.ended(record)
        delivered = {record["requestId"]: record["completionTokens"] for record in self.records}
        ring = AdmissionRing(platform.folder / self.name, entries=256)
        self.accounts.restore(ring, delivered, self.acknowledged)

    def clock(self) -> float:
        return self.boot_s + self.platform.s

    def accept(self, tokens: int, again: bool = False) -> bool:
        self.count += 1
        self.accounts.learn(self.platform.key(), self.name)  # a new process knows no limits before
        asks = Estimate(0, tokens, output_field="max_tokens")
        name = f"{self.name}-{self.count}"
        try:
            grant = self.accounts.accept(self.platform.key(), name, asks, SERVICE, again=again)
        except LimitReached:
            return False
        counted = [tokens]
        self.platform.accepted.append((self.platform.s, counted))
        self.running.append(Running(name, grant, tokens, counted))
        return True

    def end(self, part: float) -> None:
        """The oldest request ends, with a part of the tokens that it may use."""
        if self.running:
            self._end(self.running.pop(0), part)

    def _end(self, request: Running, part: float, *, killed: bool = False) -> None:
        tokens = int(request.reserved * part)
        request.counted[0] = tokens
        self.written += 1
        record = {
            "keyId": "k",
            "tenant": "ada",
            "namespace": "ns",
            "service": "m",
            "model": "m",
            "promptTokens": 0,
            "cachedTokens": 0,
            "completionTokens": tokens,
            "requestId": request.name,
            "costNano": tokens * NANO // 10**6,
            "finishedAt": self.platform.now().isoformat(),
            "seq": self.written,
        }
        self.records.append(record)
        if not killed:
            self.accounts.ended(record)
            request.grant.settle(tokens)

    async def deliver(self, heard: bool) -> None:
        """Usage goes to the ledger; the receipt may be lost."""
        if self.records:
            records = [UsageRecord.model_validate(record) for record in self.records]
            self.booked_through = await self.platform.ledger.accept(self.name, records)
            if heard:
                self.acknowledged = self.booked_through
                self.records = [each for each in self.records if each["seq"] > self.acknowledged]
                self.accounts.delivered(self.acknowledged)

    async def ask(self, fate: str, last: bool = False) -> None:
        """A round of leases; `fate` is what the network does to it."""
        asked_at = self.clock()
        self.number += 1
        request = LeaseRequest(
            gateway=self.name,
            number=self.number,
            gateways=self.platform.gateways,
            through=self.shared.through,
            asks=self.shared.asks(asked_at, last=last),
        )
        if fate == "late":
            self.platform.late.append(request)
        if fate not in ("heard", "unheard", "overtaken"):
            return
        answer = await self.platform.leases.renew(request)
        if fate == "overtaken":
            await self.deliver(heard=True)
        if fate != "unheard":
            assert answer.number == request.number
            self.shared.take(answer, asked_at)

    def kill(self, part: float) -> None:
        """kill -9, and the next start: what runs counts with what was delivered of it."""
        for request in self.running:
            self._end(request, part, killed=True)
        self.running = []
        self.accounts.close()
        self.start()


SITE = st.integers(0, 1)
STEP = st.one_of(
    st.tuples(st.just("accept"), SITE, st.integers(1, 5), st.integers(1, 300)),
    st.tuples(st.just("rush"), SITE, st.integers(5, 25), st.integers(1, 120)),
    st.tuples(st.just("end"), SITE, st.floats(0, 1)),
    st.tuples(st.just("deliver"), SITE, st.booleans()),
    st.tuples(
        st.just("ask"), SITE, st.sampled_from(["heard", "heard", "unheard", "lost", "late", "overtaken"])
    ),
    st.tuples(st.just("arrive"), st.integers(0, 3)),
    st.tuples(st.just("kill"), SITE, st.floats(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1, 5, 20, 45, 61, 125, 700])),
)


def simulated(template: Path, gateways: int, play: Callable[[Platform], Coroutine[Any, Any, None]]) -> None:
    """Runs a scene on a fresh database."""

    async def scene(folder: Path) -> None:
        shutil.copy(template, folder / "api.db")
        database = Database(f"sqlite+aiosqlite:///{folder}/api.db")
        platform = Platform(database, folder, gateways)
        try:
            await play(platform)
        finally:
            for site in platform.sites:
                site.accounts.close()
            await database.close()

    with TemporaryDirectory() as folder:
        asyncio.run(scene(Path(folder)))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, min_size=10, max_size=60))
def test_no_limit_is_exceeded_over_losses_delays_and_kills(
    sqlite_template: Path, steps: list[tuple[Any, ...]]
) -> None:
    async def play(platform: Platform) -> None:
        for verb, *words in steps:
            if verb == "wait":
                platform.s += words[0]
            elif verb == "arrive":
                if platform.late:
                    await platform.leases.renew(platform.late.pop(words[0] % len(platform.late)))
            else:
                site = platform.sites[words[0]]
                if verb == "accept":
                    for _ in range(words[1]):
                        site.accept(words[2])
                elif verb == "rush":
                    for _ in range(words[1]):
                        if not site.accept(words[2]):
                            await site.ask("heard")
                elif verb in ("deliver", "ask"):
                    await getattr(site, verb)(words[1])
                else:
                    getattr(site, verb)(words[1])
            await platform.check()

    simulated(sqlite_template, 2, play)


async def ask_until_refused(platform: Platform, turns: list[Site], tokens: int) -> int:
    """How many requests the gateways accept in these turns, each asking the API and trying again as it does."""
    count = 0
    for site in turns:
        for attempt in range(6):
            if site.accept(tokens, again=attempt > 0):
                count += 1
                break
            await site.ask("heard")
            for other in platform.sites:  # their round of each second
                if other is not site:
                    await other.ask("heard")
                    await other.ask("heard")
        await platform.check()
    return count


@pytest.mark.parametrize("pattern", ["one", "turns", "mostly one", "one, then the other"])
def test_the_gateways_accept_all_of_the_limit_wherever_the_requests_come(
    sqlite_template: Path, pattern: str
) -> None:
    async def play(platform: Platform) -> None:
        first, second = platform.sites
        turns = {
            "one": [first] * 40,
            "turns": [first, second] * 20,
            "mostly one": [first, first, first, second] * 10,
            "one, then the other": [first] * 12 + [second] * 28,
        }[pattern]
        assert await ask_until_refused(platform, turns, 10) == REQUESTS

    simulated(sqlite_template, 2, play)


def test_money_is_spent_to_the_end_and_not_beyond_over_three_gateways(sqlite_template: Path) -> None:
    async def play(platform: Platform) -> None:
        accepted = 0
        for minute in range(6):
            turns = [platform.sites[index % 3] for index in range(6)]
            accepted += await ask_until_refused(platform, turns, 250)
            for index, site in enumerate(platform.sites):
                while site.running:
                    site.end(1.0)
                await site.deliver(heard=index != minute % 3)
            platform.s += 70
            await platform.check()
        assert accepted == MONEY // (250 * NANO // 10**6) == 16

    simulated(sqlite_template, 3, play)


async def spend_the_rest(platform: Platform, site: Site) -> int:
    """How many requests of 250 tokens one gateway accepts in seven minutes, while the others only tell and hear."""
    accepted = 0
    for _ in range(6):
        accepted += await ask_until_refused(platform, [site] * 6, 250)
        while site.running:
            site.end(1.0)
        await site.deliver(heard=True)
        platform.s += 70
        await platform.check()
    return accepted


def test_money_of_a_former_process_goes_to_who_needs_it(sqlite_template: Path) -> None:
    """The restarted gateway has no request of the account, so it holds nothing that it knows of."""

    async def play(platform: Platform) -> None:
        first, second = platform.sites
        accepted = await ask_until_refused(platform, [first], 250)
        first.end(1.0)
        await first.deliver(heard=True)
        first.kill(0.0)
        accepted += await spend_the_rest(platform, second)
        assert accepted == MONEY // (250 * NANO // 10**6) == 16
        assert not first.shared.held, "what it gave back it need not tell again"

    simulated(sqlite_template, 2, play)


def test_what_a_former_process_spent_and_nobody_booked_is_kept_from_others(sqlite_template: Path) -> None:
    """The restarted gateway has records on its disk, and nobody has told it the limits of their accounts yet."""

    async def play(platform: Platform) -> None:
        first, second = platform.sites
        accepted = 0
        for _ in range(2):
            accepted += await ask_until_refused(platform, [first] * 3, 250)
            platform.s += 70
        first.kill(1.0)
        accepted += await spend_the_rest(platform, second)
        assert accepted == 16
        await first.deliver(heard=True)
        await platform.check()

    simulated(sqlite_template, 2, play)


def test_money_whose_return_was_lost_goes_to_who_needs_it(sqlite_template: Path) -> None:
    async def play(platform: Platform) -> None:
        first, second = platform.sites
        accepted = await ask_until_refused(platform, [first], 250)
        first.end(1.0)
        await first.deliver(heard=True)
        platform.s += 700
        await first.ask("lost")
        assert not first.shared.held
        accepted += await spend_the_rest(platform, second)
        assert accepted == 16

    simulated(sqlite_template, 2, play)


def test_what_was_spent_in_a_former_period_is_not_told_in_the_next(sqlite_template: Path) -> None:
    """The gateway has forgotten the lease before the period ends, and hears of the next one by a key's look-up."""

    async def play(platform: Platform) -> None:
        site = platform.sites[0]

        def key(day: datetime) -> KeyIdentity:
            cost = CostAllowance(period="day", started=day, ends=day + timedelta(days=1), limit_nano=MONEY)
            limits = Account(name="tenant/ada", costs=[cost])
            return KeyIdentity(key_id="k", subject="ann", tenant="ada", accounts=[limits])

        today = NOON.replace(hour=0)
        site.accounts.learn(key(today), site.name)
        for again in (False, True):
            with suppress(LimitReached):
                site.accounts.accept(key(today), "r", Estimate(0, 250), SERVICE, again=again).settle(250)
                site._end(Running("r", Grant(site.accounts, {}), 250, [250]), 1.0)
            await site.ask("heard")
        for _ in range(2):  # before and after the ledger has it
            (use,) = site.accounts.tenants()
            assert use.costs[0].spent_nano == 250 * NANO // 10**6
            await site.deliver(heard=True)
        for wait in (700, 86_400):
            platform.s += wait
            await site.ask("heard")
        site.accounts.learn(key(today + timedelta(days=1)), site.name)
        (use,) = site.accounts.tenants()
        assert use.costs[0].spent_nano == 0

    simulated(sqlite_template, 2, play)


def test_a_killed_gateway_gets_its_use_back_and_the_others_the_rest(sqlite_template: Path) -> None:
    async def play(platform: Platform) -> None:
        first, second = platform.sites
        assert await ask_until_refused(platform, [first] * 10, 10) == 10
        first.kill(0.5)  # and it does not ask again
        for _ in range(40):
            if not second.accept(10, again=True):
                await second.ask("heard")
            await platform.check()
        in_time = len(platform.accepted) - 10
        assert 0 < in_time <= REQUESTS - 10
        platform.s += LEASE_S + WINDOW_S + 3
        await platform.check()
        before = len(platform.accepted)
        for _ in range(60):
            if not second.accept(10, again=True):
                await second.ask("heard")
        # All but the fall-back part, which the killed one could still use. Nobody waits for that.
        assert len(platform.accepted) - before == REQUESTS - REQUESTS // 16
        for kind, lease in second.accounts._states["key/k"].leases.items():
            assert kind.is_money or lease.elsewhere == 0
        await platform.check()

    simulated(sqlite_template, 2, play)


async def drained(platform: Platform) -> Site:
    """A gateway that holds most of the limit and has used nothing of it in the last minute. Its lease ends in 53 s."""
    first = platform.sites[0]
    assert await ask_until_refused(platform, [first] * 20, 10) == 20
    platform.s += 55
    await first.ask("heard")
    platform.s += 7
    return first


async def rush(platform: Platform, site: Site) -> int:
    """How many requests one gateway accepts while the others say nothing."""
    count = 0
    for _ in range(2 * REQUESTS):
        if site.accept(10):
            count += 1
        else:
            await site.ask("heard")
        await platform.check()
    return count


def test_a_lease_counts_as_long_as_what_was_accepted_at_its_end(sqlite_template: Path) -> None:
    async def play(platform: Platform) -> None:
        first = await drained(platform)
        platform.s += 52
        assert sum(first.accept(10) for _ in range(REQUESTS)) >= 20
        platform.s += 3
        assert await rush(platform, platform.sites[1]) <= REQUESTS - 20
        platform.s += 60
        assert await rush(platform, platform.sites[1]) >= 20

    simulated(sqlite_template, 2, play)


def test_a_question_that_comes_after_its_lease_has_ended_takes_nothing_from_others(
    sqlite_template: Path,
) -> None:
    async def play(platform: Platform) -> None:
        first = await drained(platform)
        first.accept(10)
        platform.s += 20
        await first.ask("late")
        platform.s += LEASE_S + WINDOW_S + 3
        assert await rush(platform, platform.sites[1]) >= 20
        await platform.leases.renew(platform.late.pop())
        await platform.check()

    simulated(sqlite_template, 2, play)


def test_a_question_that_is_overtaken_by_a_later_one_changes_nothing(sqlite_template: Path) -> None:
    async def play(platform: Platform) -> None:
        first, second = platform.sites
        first.accept(10)
        await first.ask("late")  # holds nothing yet
        assert await ask_until_refused(platform, [first] * 15, 10) == 15
        answer = await platform.leases.renew(platform.late.pop())
        assert answer.number == first.number
        assert not answer.grants
        assert await rush(platform, second) <= REQUESTS - 15

    simulated(sqlite_template, 2, play)


def test_while_the_api_is_away_a_lease_lasts_a_minute_and_its_fall_back_part_an_hour(
    sqlite_template: Path,
) -> None:
    async def play(platform: Platform) -> None:
        site = platform.sites[0]
        assert await ask_until_refused(platform, [site] * 8, 10) == 8
        await site.ask("heard")
        platform.s += LEASE_S - 1
        assert [site.accept(10), site.accept(10)] == [True, False]  # the headroom
        await platform.check()
        platform.s += 200
        assert [site.accept(10), site.accept(10)] == [True, False]  # the fall-back part
        await platform.check()
        platform.s += FALLBACK_S
        assert not site.accept(10)
        await site.ask("heard")
        assert site.accept(10)

    simulated(sqlite_template, 2, play)


def test_a_gateway_that_ends_gives_back_what_it_does_not_use(sqlite_template: Path) -> None:
    async def play(platform: Platform) -> None:
        first, second = platform.sites
        assert first.accept(100) or await ask_until_refused(platform, [first], 100)
        first.end(1.0)
        await first.ask("heard", last=True)
        await first.deliver(heard=True)
        async with platform.database.read() as db:
            rows = (await db.execute(select(tables.budget_leases))).all()
        held = {row.kind: row.amount for row in rows}
        assert held == {"requests": 1, "tokens": 100, "day": 0}
        assert await ask_until_refused(platform, [second] * 30, 10) == REQUESTS - 1

    simulated(sqlite_template, 2, play)


WANTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 50), min_size=1)


@given(capacity=st.integers(-5, 120), wants=WANTS)
def test_fair_shares_are_max_min_fair_and_waste_nothing(capacity: int, wants: dict[str, int]) -> None:
    shares = fair_shares(capacity, wants)
    assert sum(shares.values()) == min(max(0, capacity), sum(wants.values()))
    for name, share in shares.items():
        assert 0 <= share <= wants[name]
        if share < wants[name]:
            assert all(other <= share + 1 for other in shares.values())


@given(
    capacity=st.integers(0, 100),
    wanted=st.integers(0, 100),
    held=st.integers(0, 30),
    others=st.dictionaries(
        st.sampled_from("xyz"), st.builds(Holding, *[st.integers(0, 40)] * 3, st.integers(0, 60))
    ),
)
def test_a_decision_never_gives_what_somebody_holds(
    capacity: int, wanted: int, held: int, others: dict[str, Holding]
) -> None:
    outcome = decide(capacity, Holding(held, 0, wanted // 2, wanted), "me", others)
    assert outcome.amount >= held
    taken = sum(each.amount for each in others.values())
    assert outcome.amount == held or outcome.amount + taken <= capacity
    assert all(target < others[name].amount for name, target in outcome.targets.items())
