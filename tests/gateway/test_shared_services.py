"""A service that several tenants use: who finds it, under which name, at whose cost, and who does not learn of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.gateway.parts import KEY_A, KEY_B, PATIENCE_S, House, key, route

from busbar.kube.contracts.workload import TENANT_HEADER, WEIGHT_HEADER

GUEST = {"access": [{"tenant": "tenant-b", "weight": 0.5, "tokensPerMinute": 100}]}
KEY_C = key("c")


async def names(house: House, api_key: str) -> list[str]:
    headers = {"Authorization": f"Bearer {api_key}"}
    assert house.session is not None
    async with house.session.get(house.public + "/v1/models", headers=headers) as response:
        return [card["id"] for card in (await response.json())["data"]]


async def test_another_tenant_asks_for_it_by_namespace_and_name_and_pays_for_itself(house: House) -> None:
    engine = await house.engine("a", "b")
    await house.publish(route("m", engine, **GUEST))
    assert await names(house, KEY_A) == ["m"]
    assert await names(house, KEY_B) == ["team-a/m"]
    status, _ = await house.ask("team-a/m", api_key=KEY_B, max_tokens=3)
    assert status == 200
    assert engine.bodies[-1]["model"] == "m"
    assert engine.seen_headers[-1][TENANT_HEADER] == "tenant-b"
    assert float(engine.seen_headers[-1][WEIGHT_HEADER]) == 0.5
    await house.ask("m")
    assert float(engine.seen_headers[-1][WEIGHT_HEADER]) == 1.0
    await house.api.wait_for(2)
    found = [(r["tenant"], r["namespace"], r["service"]) for r in house.api.records.values()]
    assert found == [("tenant-b", "team-a", "m"), ("tenant-a", "team-a", "m")]


@pytest.mark.parametrize("name", ["m", "team-a/m", "team-a/m:all", "team-b/m"])
async def test_everybody_else_gets_the_answer_of_an_unknown_model(house: House, name: str) -> None:
    house.api.know(KEY_C, "tenant-c", "team-c")
    engine = await house.engine()
    await house.publish(route("m", engine, adapters=[{"name": "all"}], **GUEST))
    found, unknown = await house.ask(name, api_key=KEY_C), await house.ask("x" * len(name), api_key=KEY_C)
    assert found[0] == unknown[0] == 404
    assert str(found[1]).replace(f"{name!r}", "?") == str(unknown[1]).replace(f"{'x' * len(name)!r}", "?")
    assert await names(house, KEY_C) == []
    assert not engine.bodies


async def test_a_shared_service_cannot_take_the_name_of_a_tenants_own(house: House) -> None:
    own, foreign = await house.engine("own"), await house.engine("foreign")
    await house.publish(
        route("m", foreign, **GUEST), route("m", own, tenant="tenant-b", namespace="team-b", uid="other")
    )
    assert await names(house, KEY_B) == ["m", "team-a/m"]
    assert (await house.ask("m", api_key=KEY_B))[0] == 200
    assert (len(own.bodies), len(foreign.bodies)) == (1, 0)
    status, _ = await house.ask("m:x", api_key=KEY_B)
    assert status == 404


async def test_only_the_model_id_of_an_own_service_is_a_name(house: House) -> None:
    await house.publish(route("m", await house.engine(), **GUEST))
    assert (await house.ask("m", api_key=KEY_B))[0] == 404


async def test_the_part_of_a_guest_is_limited_and_the_owner_is_not(house: House) -> None:
    await house.publish(route("m", await house.engine("a"), **GUEST))
    async with house.post({"model": "team-a/m", "prompt": [1, 2], "max_tokens": 90}, api_key=KEY_B) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == "8"
    statuses = [(await house.ask("team-a/m", api_key=KEY_B, max_tokens=90))[0] for _ in range(2)]
    assert statuses == [200, 429]
    for _ in range(3):
        assert (await house.ask("m", api_key=KEY_A, max_tokens=90))[0] == 200
    status, document = await house.ask("team-a/m", api_key=KEY_B, max_tokens=150)
    assert (status, document["error"]["param"]) == (400, "max_tokens")


async def test_access_that_is_taken_away_ends_with_the_next_request(house: House) -> None:
    engine = await house.engine("a", "b")
    engine.pause_at = 1
    await house.publish(route("m", engine, **GUEST))
    running = asyncio.create_task(house.stream("team-a/m", api_key=KEY_B))
    async with asyncio.timeout(PATIENCE_S):
        await engine.arrived.wait()
    await house.publish(route("m", engine))
    assert (await house.ask("team-a/m", api_key=KEY_B))[0] == 404
    engine.go.set()
    events: list[Any] = await running
    assert events[-1] == "[DONE]"


async def test_an_adapter_for_the_owner_is_not_for_a_guest(house: House) -> None:
    adapters = [{"name": "all"}, {"name": "ours", "tenants": ["tenant-a"]}]
    engine = await house.engine("a")
    await house.publish(route("m", engine, adapters=adapters, **GUEST))
    assert await names(house, KEY_B) == ["team-a/m", "team-a/m:all"]
    assert (await house.ask("team-a/m:all", api_key=KEY_B))[0] == 200
    assert (await house.ask("team-a/m:ours", api_key=KEY_B))[0] == 404
