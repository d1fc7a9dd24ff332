"""Who is no trusted proxy may write what it likes into forwarding headers: on the real port nothing believes it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx2
import pytest
import uvicorn
from tests.api.conftest import BASE, World, apps_of, running, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.serve import _config
from busbar.api.settings import Settings

EVIL = "evil.example"


def lies(number: int) -> dict[str, str]:
    """A new origin for each request, over a connection that is said to be TLS to another host."""
    address = f"203.0.113.{number}"
    return {
        "X-Forwarded-For": address,
        "X-Real-IP": address,
        "X-Client-IP": address,
        "CF-Connecting-IP": address,
        "True-Client-IP": address,
        "Forwarded": f"for={address};proto=https;host={EVIL}",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Ssl": "on",
        "X-Forwarded-Host": EVIL,
        "X-Forwarded-Prefix": f"//{EVIL}",
        "X-Forwarded-User": "root",
        "X-Remote-User": "root",
        "X-Original-URL": f"{BASE}/audit",
        "X-Rewrite-URL": f"{BASE}/audit",
    }


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    kube = MemoryKube()
    seed(kube)
    async with running(replace(settings, logins_per_minute=3), kube) as made:
        yield made


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the public port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(_config(world.services.settings, apps_of(world.services)[0], 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(30):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as made:
        yield made
    server.should_exit = True
    await serving


async def test_another_origin_for_each_guess_gains_no_guesses(world: World, http: httpx2.AsyncClient) -> None:
    wrong = [
        await http.get(f"{BASE}/tenants", headers={"Authorization": f"Bearer bb_{n:043}", **lies(n)})
        for n in range(6)
    ]
    assert [answer.status_code for answer in wrong] == [401, 401, 401, 429, 429, 429]
    form = {"token": "bb_wrong"}
    logins = [await http.post("/login", data=form, headers=lies(100 + n)) for n in range(6)]
    assert [answer.status_code for answer in logins[3:]] == [429, 429, 429]
    told = await world.services.audit.page()
    assert told
    assert {word for entry in told for word in entry.message.split()} & {
        "203.0.113.100",
        "203.0.113.1",
    } == set()


async def test_nobody_becomes_another_person_scheme_host_or_path(
    world: World, http: httpx2.AsyncClient
) -> None:
    alone = await http.get(f"{BASE}/tenants", headers=lies(1))
    assert alone.status_code == 401
    assert "strict-transport-security" not in alone.headers, "the browser does not speak TLS"
    page = await http.get("/jobs", headers=lies(2))
    assert page.status_code in (302, 303)
    assert page.headers["location"].startswith("/login")
    assert EVIL not in page.text + str(page.headers)
    token = await world.token("alice")
    came = await http.post("/login", data={"token": token}, headers=lies(3))
    assert came.status_code == 303
    assert "secure" not in came.headers["set-cookie"].lower()
    assert EVIL not in str(came.headers)
    alice = {"Authorization": f"Bearer {token}"}
    assert (await http.get(f"{BASE}/audit", headers={**alice, **lies(4)})).status_code == 403
    mine = await http.get(f"{BASE}/tenants", headers={**alice, **lies(5)})
    assert [item["metadata"]["name"] for item in mine.json()["items"]] == ["ada"], (
        "the path is the request line's"
    )
