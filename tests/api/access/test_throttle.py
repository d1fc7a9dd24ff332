"""How often one may log in and make tokens, and whose word counts for where a request came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import pytest
from tests.api.conftest import BASE, SECRET, Clock, World, running, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.forwarded import Forwarded
from busbar.api.access.identity import CallerRole
from busbar.api.access.throttle import Throttle
from busbar.api.errors import TooMany
from busbar.api.settings import Settings
from busbar.kube.errors import SettingsError

PROXY = "10.0.0.5"


def settings_with(**more: Any) -> Settings:
    return Settings(session_secret=SECRET, **more)


def scope(peer: str = PROXY, scheme: str = "http", **headers: str | list[str]) -> dict[str, Any]:
    """An ASGI scope; `_` in a header's name is `-`."""
    pairs = [
        (name.replace("_", "-").encode(), value.encode())
        for name, values in headers.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    return {"type": "http", "client": (peer, 1) if peer else None, "scheme": scheme, "headers": pairs}


def test_a_bucket_refills_evenly_and_says_when() -> None:
    clock = Clock()
    throttle = Throttle(6, "logins", clock)
    for _ in range(6):
        throttle.take(["a"])
    with pytest.raises(TooMany, match="too many logins; try again in 10 s") as caught:
        throttle.take(["a"])
    assert caught.value.retry_after_s == 10
    throttle.take(["b"])
    clock.forward(seconds=10)
    throttle.take(["a"])
    clock.forward(seconds=-3600)
    with pytest.raises(TooMany):
        throttle.take(["a"])
    clock.forward(seconds=7200)
    for _ in range(6):
        throttle.take(["a"])
    with pytest.raises(TooMany):
        throttle.take(["a"])


def test_a_refusal_counts_for_none_of_the_keys() -> None:
    throttle = Throttle(1, "logins", Clock())
    throttle.take(["a"])
    with pytest.raises(TooMany):
        throttle.take(["a", "b"])
    throttle.take(["b"])
    throttle.give_back(["b"])
    throttle.give_back(["b"])
    throttle.take(["b"])
    with pytest.raises(TooMany):
        throttle.take(["b"])


def test_only_so_many_keys_are_remembered() -> None:
    throttle = Throttle(1, "logins", Clock(), max_keys=2)
    for key in ("a", "b", "c"):
        throttle.take([key])
    throttle.take(["a"])
    with pytest.raises(TooMany):
        throttle.take(["c"])


@pytest.mark.parametrize(
    ("trusted", "asked", "address"),
    [
        ("", scope(x_forwarded_for="1.2.3.4"), PROXY),
        ("10.0.0.6", scope(x_forwarded_for="1.2.3.4"), PROXY),
        ("10.0.0.0/8", scope(x_forwarded_for="1.2.3.4"), "1.2.3.4"),
        ("10.0.0.0/8", scope(x_forwarded_for="6.6.6.6, 1.2.3.4"), "1.2.3.4"),
        ("10.0.0.0/8", scope(x_forwarded_for="6.6.6.6, 1.2.3.4, 10.0.0.9"), "1.2.3.4"),
        ("10.0.0.0/8", scope(x_forwarded_for=["6.6.6.6", "1.2.3.4"]), "1.2.3.4"),
        ("10.0.0.0/8", scope(x_forwarded_for="1.2.3.4, junk"), PROXY),
        ("10.0.0.0/8", scope(x_forwarded_for=""), PROXY),
        ("10.0.0.0/8", scope(), PROXY),
        ("10.0.0.0/8", scope(x_forwarded_for="10.0.0.7"), "10.0.0.7"),
        ("10.0.0.0/8", scope("::ffff:10.0.0.5", x_forwarded_for="1.2.3.4"), "1.2.3.4"),
        ("fd00::/8", scope("fd00::1", x_forwarded_for="2001:db8::7"), "2001:db8::/64"),
        ("10.0.0.0/8", scope(""), "unknown"),
        ("", scope("testclient"), "unknown"),
    ],
)
def test_only_trusted_proxies_say_where_a_request_came_from(
    trusted: str, asked: dict[str, Any], address: str
) -> None:
    assert Forwarded(settings_with(trusted_proxies=trusted)).address(asked) == address


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.1/8", "10.0.0.0/99"])
def test_a_trusted_proxy_that_is_no_network_stops_the_start(wrong: str) -> None:
    with pytest.raises(SettingsError, match="TRUSTED_PROXIES"):
        Forwarded(settings_with(trusted_proxies=wrong))


async def test_guesses_from_one_address_are_refused_before_they_are_checked(world: World) -> None:
    """Writing another X-Forwarded-For changes nothing, and a right token waits like every other."""
    statuses = []
    for index in range(40):
        headers = {"X-Forwarded-For": f"1.2.3.{index}"}
        answer = await world.public.post("/login", data={"token": f"bb_{index:043}"}, headers=headers)
        statuses.append(answer.status_code)
    assert (statuses.count(401), statuses[30:]) == (30, [429] * 10)
    assert int(answer.headers["Retry-After"]) >= 1
    assert "too many logins" in answer.text
    right = {"token": await world.token("alice")}
    assert (await world.public.post("/login", data=right)).status_code == 429
    world.clock.forward(seconds=2)
    assert (await world.public.post("/login", data=right)).status_code == 303
    refused = [e for e in await world.services.audit.page() if e.outcome == "Unauthenticated"]
    assert len(refused) == 30
    assert (refused[0].action, refused[0].name) == ("login", "127.0.0.1")


async def test_people_behind_a_trusted_proxy_are_counted_apart(settings: Settings) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(replace(settings, trusted_proxies="127.0.0.0/8", logins_per_minute=2), kube) as world:

        async def guess(address: str) -> httpx2.Response:
            return await world.public.post(
                "/login", data={"token": "bb_x"}, headers={"X-Forwarded-For": address}
            )

        assert [(await guess("1.1.1.1")).status_code for _ in range(3)] == [401, 401, 429]
        assert (await guess("2.2.2.2")).status_code == 401


async def test_one_person_logs_in_and_makes_tokens_only_so_often(settings: Settings) -> None:
    kube = MemoryKube()
    seed(kube)
    bounds = replace(settings, logins_per_minute=2, token_creations_per_minute=2)
    async with running(bounds, kube) as world:
        right = {"token": await world.token("alice")}
        logins = [(await world.public.post("/login", data=right)).status_code for _ in range(3)]
        assert logins == [303, 303, 429]
        alice, bob = await world.as_("alice"), await world.as_("bob", CallerRole.ADMIN)
        ask = {"scopes": ["rest"]}
        made = [await alice.post(f"{BASE}/tokens", json=ask) for _ in range(3)]
        assert [answer.status_code for answer in made] == [201, 201, 429]
        assert made[2].json()["error"]["code"] == "TooManyRequests"
        assert made[2].headers["Retry-After"] == "30"
        assert (await bob.post(f"{BASE}/tokens", json=ask)).status_code == 429, "the same address"
        world.clock.forward(seconds=30)
        assert (await bob.post(f"{BASE}/tokens", json=ask)).status_code == 201
