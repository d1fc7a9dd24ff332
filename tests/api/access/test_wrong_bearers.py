"""Wrong bearers at REST: 429 before the look-up, by address and by person, and nobody else is locked out."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import httpx2
import pytest
from tests.api.conftest import BASE, World, running, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.throttle import Throttle
from busbar.api.access.wrong_bearers import WrongBearers
from busbar.api.errors import TooMany, Unauthenticated
from busbar.api.settings import Settings
from busbar.kube.contracts.keys import digest_of

PATH = f"{BASE}/tenants"
UNKNOWN = "bb_" + "x" * 43


@pytest.fixture
def proxied(settings: Settings) -> Settings:
    """Requests say where they come from, and two wrong bearers a minute are looked up."""
    return replace(settings, trusted_proxies="127.0.0.0/8", logins_per_minute=2)


async def ask(world: World, bearer: str, address: str = "1.1.1.1", path: str = PATH) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {bearer}", "X-Forwarded-For": address}
    return await world.public.get(path, headers=headers)


async def statuses(world: World, bearers: list[str], address: str = "1.1.1.1") -> list[int]:
    return [(await ask(world, bearer, address)).status_code for bearer in bearers]


async def test_guesses_are_refused_before_they_are_looked_up(
    proxied: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(proxied, kube) as world:
        looked_up: list[str] = []
        by_bearer = world.services.authenticator.by_bearer

        async def seen(bearer: str) -> object:
            looked_up.append(bearer)
            return await by_bearer(bearer)

        monkeypatch.setattr(world.services.authenticator, "by_bearer", seen)
        guesses = [f"bb_{index:043}" for index in range(4)] + ["kubernetes-token"]
        assert await statuses(world, guesses) == [401, 401, 429, 429, 429]
        assert looked_up == guesses[:2]
        refused = await ask(world, guesses[0])
        assert refused.headers["Retry-After"] == "30"
        assert refused.json()["error"]["code"] == "TooManyRequests"
        assert await statuses(world, guesses, "2.2.2.2") == [401, 401, 429, 429, 429], "another address"
        world.clock.forward(seconds=30)
        assert await statuses(world, guesses) == [401, 429, 429, 429, 429]


async def test_who_was_let_in_before_is_not_locked_out_by_a_neighbours_guesses(proxied: Settings) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(proxied, kube) as world:
        known, new = await world.token("alice"), await world.token("vera")
        assert await statuses(world, [known]) == [200]
        assert await statuses(world, [UNKNOWN] * 3) == [401, 401, 429]
        assert await statuses(world, [known] * 5) == [200] * 5
        assert await statuses(world, [new]) == [429], "not seen here before, so it waits like a guess"
        world.clock.forward(seconds=30)
        assert await statuses(world, [new, new]) == [200, 200]


async def test_right_bearers_are_never_counted(proxied: Settings) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(proxied, kube) as world:
        tokens = [await world.token("alice") for _ in range(5)]
        assert await statuses(world, tokens) == [200] * 5


async def test_an_ended_token_counts_for_its_owner_from_every_address_and_is_audited(
    proxied: Settings,
) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(proxied, kube) as world:
        tokens = world.services.tokens
        text, token = await tokens.create("alice", created_by="alice", lifetime=timedelta(minutes=1))
        assert await statuses(world, [text]) == [200]
        world.clock.forward(minutes=1)
        found = [(await ask(world, text, f"1.1.1.{index}")).status_code for index in range(4)]
        assert found == [401, 401, 429, 429]
        assert await statuses(world, [await world.token("alice")], "1.1.1.9") == [200], (
            "her other tokens work"
        )
        rows = [entry for entry in await world.services.audit.page() if entry.action == "authenticate"]
        assert [(r.subject, r.kind, r.name, r.outcome) for r in rows] == [
            ("alice", "Token", token.id, "Unauthenticated")
        ] * 2
        assert [row.message.rpartition(" ")[2] for row in rows] == ["1.1.1.1)", "1.1.1.0)"]
        assert text not in str(rows)


async def test_unknown_bearers_and_malformed_headers_leave_no_rows(world: World) -> None:
    for header in (f"Bearer {UNKNOWN}", "Bearer nonsense", "Basic YTpi", "Bearer", "x" * 50):
        answer = await world.public.get(PATH, headers={"Authorization": header})
        assert answer.status_code == 401
    assert await world.services.audit.page() == []


async def test_the_internal_port_counts_too(proxied: Settings) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(proxied, kube) as world:
        sent = [
            await world.internal.post(
                "/internal/keys/lookup",
                headers={"Authorization": f"Bearer {UNKNOWN}"},
                json={"sha256": "0" * 64},
            )
            for _ in range(3)
        ]
        assert [answer.status_code for answer in sent] == [401, 401, 429]


async def test_bearers_refused_at_the_same_time_are_counted_as_well(world: World) -> None:
    throttle = Throttle(1, "wrong tokens", world.clock)
    wrong = WrongBearers(throttle, world.services.tokens, world.services.audit)
    error = Unauthenticated("no")
    for _ in range(2):
        wrong.check(UNKNOWN, "1.1.1.1")  # both are asked before either is answered
    await wrong.refused(UNKNOWN, "1.1.1.1", error)
    with pytest.raises(TooMany):
        await wrong.refused(UNKNOWN, "1.1.1.1", error)


async def test_only_so_many_bearers_are_remembered_and_by_their_digest(world: World) -> None:
    throttle = Throttle(1, "wrong tokens", world.clock)
    wrong = WrongBearers(throttle, world.services.tokens, world.services.audit, max_keys=2)
    throttle.take(["address 1.1.1.1"])
    for bearer in ("a", "b", "a", "c"):
        wrong.accepted(bearer)
    for bearer in ("a", "c"):
        wrong.check(bearer, "1.1.1.1")
    with pytest.raises(TooMany):
        wrong.check("b", "1.1.1.1")
    assert list(wrong._accepted) == [digest_of("a"), digest_of("c")]
