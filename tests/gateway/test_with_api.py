"""The gateway against the real API: its keys, and its ledger in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.api.conftest import GATEWAY, World, settings, sqlite_template, sqlite_url, world
from tests.cli.loopback import app_of, listening
from tests.gateway.parts import House, route

from busbar.api.access.identity import CallerRole, Scope
from busbar.api.records.usage_ledger import By
from busbar.kube.types.budget import Period
from busbar.kube.types.inference import CostLimit, InferenceLimits

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]


@pytest.fixture
async def real(world: World, house: House) -> AsyncIterator[House]:
    """The gateway's test set-up with the real API; alice's namespace is ada-lab."""
    world.kube.users["to-api"] = {"username": GATEWAY, "groups": ["system:serviceaccounts"]}
    await house.stop_gateway()
    async with listening(app_of(world.internal)) as url:
        house.overrides["api_url"] = url
        await house.start_gateway()
        yield house
        await house.stop_gateway()


async def sums(world: World) -> list[tuple[str, int, int, int]]:
    now = world.services.clock()
    found = await world.services.usage_ledger.usage(
        By.KEY, since=now - timedelta(days=3650), until=now + timedelta(days=3650), tenants=None
    )
    return [(row.group, row.requests, row.prompt_tokens, row.completion_tokens) for row in found]


async def test_a_token_of_the_api_opens_the_models_of_its_tenant_and_its_use_is_booked_once(
    real: House, world: World
) -> None:
    engine = await real.engine("a", "b")
    await real.publish(
        route("m", engine, tenant="ada", namespace="ada-lab"),
        route("b", engine, tenant="bob-corp", namespace="bob-lab"),
    )
    token = await world.token("alice", tenant="ada")
    assert (await real.ask(api_key=token))[0] == 200
    assert len(await real.stream(api_key=token)) == 3
    assert (await real.ask("b", api_key=token))[0] == 404
    await real.stop_gateway()  # delivers on shutdown
    await real.start_gateway()  # and has nothing more to deliver
    await real.stop_gateway()
    assert [row[1:] for row in await sums(world)] == [(2, 14, 4)]


async def test_a_token_without_the_scope_and_a_revoked_one_are_refused(real: House, world: World) -> None:
    await real.publish(route("m", await real.engine("a"), tenant="ada", namespace="ada-lab"))
    rest = await world.token("alice", scopes=(Scope.REST,), tenant="ada")
    assert (await real.ask(api_key=rest))[0] in (401, 403)
    text, token = await world.services.tokens.create(
        "alice", created_by="test", scopes=(Scope.INFERENCE,), tenant="ada"
    )
    await world.services.tokens.revoke(token.id, owner=None)
    assert (await real.ask(api_key=text))[0] == 401
    assert await sums(world) == []


async def test_a_key_of_an_admin_without_a_tenant_is_refused_with_what_it_lacks(
    real: House, world: World
) -> None:
    await real.publish(route("m", await real.engine("a"), tenant="ada", namespace="ada-lab"))
    without = await world.token("root", role=CallerRole.ADMIN)
    status, said = await real.ask(api_key=without)
    assert status == 401
    assert "counts for no tenant" in said["error"]["message"]
    assert "--tenant NAME" in said["error"]["message"]
    of_one = await world.token("root", role=CallerRole.ADMIN, tenant="ada")
    assert (await real.ask(api_key=of_one))[0] == 200


async def test_a_budget_is_the_same_after_a_restart_and_for_a_gateway_with_an_empty_disk(
    real: House, world: World, tmp_path: Path
) -> None:
    world.clock.forward(seconds=(datetime.now(UTC) - world.services.clock()).total_seconds())
    price = {"prompt": 1.0, "cached": 1.0, "output": 10.0}
    service = route("m", await real.engine("a", "b"), tenant="ada", namespace="ada-lab", price=price)
    await real.publish(service)
    # A request costs 7 + 2 * 10 millionths, and may cost as much: two fit, and a third does not.
    limits = InferenceLimits(budgets=[CostLimit(period=Period.MONTH, cost=0.000_060)])
    token, made = await world.services.tokens.create(
        "alice", created_by="test", scopes=(Scope.INFERENCE,), tenant="ada", limits=limits
    )
    assert (await real.ask(api_key=token, prompt=[1] * 7, max_tokens=2))[0] == 200
    await real.stop_gateway()
    await real.start_gateway()
    await real.publish(service)
    assert (await real.ask(api_key=token, prompt=[1] * 7, max_tokens=2))[0] == 200
    for folder in ("state", "another"):
        await real.stop_gateway()
        real.overrides["state_dir"] = tmp_path / folder
        await real.start_gateway()
        await real.publish(service)
        status, document = await real.ask(api_key=token, prompt=[1] * 7, max_tokens=2)
        assert (status, document["error"]["code"]) == (429, "insufficient_quota")
    now = world.services.clock()
    (used,) = await world.services.usage_ledger.usage(
        By.KEY, since=now - timedelta(days=1), until=now + timedelta(days=1), tenants=None
    )
    assert (used.group, used.requests, used.cost) == (made.id, 2, 0.000_054)
