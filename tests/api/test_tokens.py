"""Tokens, inference keys, the ledger and the audit trail, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import text
from tests.api.conftest import NOW, Clock, World, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.audit import Audit
from busbar.api.database.engine import Database
from busbar.api.errors import Invalid, NotFound, Unavailable
from busbar.api.identity import Role, Scope
from busbar.api.keys import Keys
from busbar.api.ledger import By, Ledger
from busbar.api.store import Store
from busbar.api.tenancy import Tenancy
from busbar.api.tokens import Tokens
from busbar.kube.contracts.keys import digest_of
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.resources import TENANTS


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


async def test_a_token_is_stored_as_prefix_and_digest_only(database: Database) -> None:
    token, record = await Tokens(database, Clock()).create("alice", created_by="root")
    assert len(token) == 46
    assert record.prefix == token[:10]
    async with database.read() as db:
        row = (await db.execute(text("SELECT * FROM tokens"))).mappings().one()
    assert token not in str(dict(row))
    assert row["sha256"] == digest_of(token)


async def test_a_token_is_found_until_it_expires_or_is_revoked(database: Database) -> None:
    clock = Clock()
    tokens = Tokens(database, clock)
    short, _ = await tokens.create("alice", created_by="alice", lifetime=timedelta(hours=1))
    long, record = await tokens.create("alice", created_by="alice", scopes=[Scope.REST])
    assert await tokens.find(digest_of(short)) is not None
    clock.forward(hours=1)
    assert await tokens.find(digest_of(short)) is None
    found = await tokens.find(digest_of(long))
    assert found is not None
    assert found.scopes == {Scope.REST}
    with pytest.raises(NotFound):
        await tokens.revoke(record.id, owner="bob")
    await tokens.revoke(record.id, owner="alice")
    assert await tokens.find(digest_of(long)) is None


async def test_use_is_noted_at_most_once_a_minute(database: Database) -> None:
    clock = Clock()
    tokens = Tokens(database, clock)
    _, record = await tokens.create("alice", created_by="alice")
    await tokens.used(record)
    (noted,) = await tokens.listing("alice")
    assert noted.last_used_at == NOW
    clock.forward(seconds=30)
    await tokens.used(noted)
    assert (await tokens.listing("alice"))[0].last_used_at == NOW
    clock.forward(seconds=31)
    await tokens.used(noted)
    assert (await tokens.listing("alice"))[0].last_used_at == NOW + timedelta(seconds=61)


async def test_hidden_keys_are_not_listed_and_are_forgotten_when_over(database: Database) -> None:
    clock = Clock()
    tokens = Tokens(database, clock)
    key, _ = await tokens.create("alice", created_by="alice", hidden=True, lifetime=timedelta(minutes=10))
    assert await tokens.listing(None) == []
    assert await tokens.find(digest_of(key)) is not None
    clock.forward(minutes=10)
    await tokens.prune_hidden()
    async with database.read() as db:
        assert (await db.execute(text("SELECT count(*) FROM tokens"))).scalar_one() == 0


def record(seq: int, tenant: str = "ada", tokens: int = 10, hours_ago: float = 1) -> UsageRecord:
    return UsageRecord(
        seq=seq,
        key_id="k",
        tenant=tenant,
        namespace=f"{tenant}-lab",
        service="chat",
        model="chat",
        prompt_tokens=tokens,
        completion_tokens=2 * tokens,
        request_id=f"r{seq}",
        finished_at=NOW - timedelta(hours=hours_ago),
    )


async def test_no_token_is_counted_twice_however_often_a_batch_arrives(database: Database) -> None:
    ledger = Ledger(database, Clock())
    assert await ledger.accept("g1", [record(1), record(2)]) == 2
    assert await ledger.accept("g1", [record(1), record(2), record(3)]) == 3
    assert await ledger.accept("g1", []) == 3
    assert await ledger.accept("g2", [record(1)]) == 1
    (total,) = await ledger.usage(By.TENANT, since=NOW - timedelta(days=1), until=NOW, tenants=None)
    assert (total.requests, total.prompt_tokens, total.completion_tokens) == (4, 40, 80)


async def test_usage_is_summed_by_each_group_within_the_range_and_the_tenants_asked_for(
    database: Database,
) -> None:
    ledger = Ledger(database, Clock())
    await ledger.accept(
        "g", [record(1), record(2, "bob-corp", 5), record(3, hours_ago=30), record(4, hours_ago=1000)]
    )
    since = NOW - timedelta(days=2)
    by_tenant = await ledger.usage(By.TENANT, since=since, until=NOW, tenants=None)
    assert [(s.group, s.requests) for s in by_tenant] == [("ada", 2), ("bob-corp", 1)]
    by_day = await ledger.usage(By.DAY, since=since, until=NOW, tenants={"ada"})
    assert [(s.group, s.requests) for s in by_day] == [("2026-02-28", 1), ("2026-03-01", 1)]
    for by in By:
        assert await ledger.usage(by, since=since, until=NOW, tenants=set()) == []
        assert sum(s.requests for s in await ledger.usage(by, since=since, until=NOW, tenants=None)) == 3


async def test_audit_rows_tell_how_each_write_ended_and_page_backwards(database: Database) -> None:
    audit = Audit(database, Clock())
    for index in range(5):
        async with audit.write("alice", "create", "TrainingJob", namespace="ada-lab", name=f"j{index}"):
            pass
    with pytest.raises(Invalid):
        async with audit.write("bob", "create", "TrainingJob", name="bad"):
            raise Invalid("steps must be positive")
    first = await audit.page(limit=3)
    assert [(e.subject, e.outcome, e.message) for e in first[:1]] == [
        ("bob", "Invalid", "steps must be positive")
    ]
    rest = await audit.page(before=first[-1].id, limit=10)
    assert [e.name for e in rest] == ["j2", "j1", "j0"]
    assert [e.name for e in await audit.page(subject="bob")] == ["bad"]
    await audit.prune(NOW + timedelta(seconds=1))
    assert await audit.page() == []


async def test_words_that_one_of_the_databases_would_refuse_are_kept_all_the_same(database: Database) -> None:
    audit = Audit(database, Clock())
    odd = "a\0b\ud83d" + "x" * 400
    with pytest.raises(Invalid):
        async with audit.write(odd, "create", "TrainingJob", namespace=odd, name=odd):
            raise Invalid(odd * 9)
    (row,) = await audit.page(subject=odd)
    assert (len(row.name), row.name[:4], row.outcome) == (253, "a\ufffdb?", "Invalid")
    _, token = await Tokens(database, Clock()).create("alice", created_by="root", description=odd, tenant=odd)
    assert len(token.description) == 200


@pytest.fixture
async def keys(database: Database) -> AsyncIterator[tuple[Keys, Tokens, MemoryKube, Store, Clock]]:
    kube, clock = MemoryKube(), Clock()
    seed(kube)
    store = Store(kube, backoff_s=(0.001, 0.01))
    await store.start()
    await store.synced(30)
    tokens = Tokens(database, clock)
    yield Keys(tokens, Tenancy(store)), tokens, kube, store, clock
    await store.stop()


async def test_a_key_says_whose_it_is_and_which_namespaces_it_opens(
    keys: tuple[Keys, Tokens, MemoryKube, Store, Clock],
) -> None:
    desk, tokens, _, _, _ = keys
    key, made = await tokens.create("alice", created_by="alice", tenant="ada")
    found = await desk.lookup(digest_of(key))
    assert found.to_wire() == {
        "keyId": made.id,
        "subject": "alice",
        "tenant": "ada",
        "namespaces": ["ada-lab"],
        "scopes": ["inference"],
    }


async def test_before_the_first_list_of_tenants_nobody_is_told_that_a_key_is_unknown(
    database: Database,
) -> None:
    tokens = Tokens(database, Clock())
    key, _ = await tokens.create("alice", created_by="alice", tenant="ada")
    desk = Keys(tokens, Tenancy(Store(MemoryKube())))
    with pytest.raises(Unavailable):
        await desk.lookup(digest_of(key))


async def test_a_key_without_a_tenant_counts_for_the_only_one_its_owner_has(
    keys: tuple[Keys, Tokens, MemoryKube, Store, Clock],
) -> None:
    desk, tokens, _, _, _ = keys
    key, _ = await tokens.create("bob", created_by="bob")
    assert (await desk.lookup(digest_of(key))).tenant == "bob-corp"


@pytest.mark.parametrize(
    ("subject", "more"),
    [
        ("alice", {"scopes": [Scope.REST]}),
        ("alice", {"tenant": "bob-corp"}),
        ("vera", {"tenant": "ada"}),
        ("stranger", {}),
        ("root", {"role": Role.ADMIN, "tenant": "no-such-tenant"}),
    ],
)
async def test_keys_without_scope_membership_or_tenant_are_unknown(
    keys: tuple[Keys, Tokens, MemoryKube, Store, Clock], subject: str, more: dict[str, object]
) -> None:
    desk, tokens, _, _, _ = keys
    key, _ = await tokens.create(subject, created_by="test", **more)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await desk.lookup(digest_of(key))


async def test_a_member_who_leaves_the_tenant_takes_no_key_along(world: World) -> None:
    key = await world.token("alice", tenant="ada")
    assert (await world.services.keys.lookup(digest_of(key))).tenant == "ada"
    tenant = world.kube.objects["tenants", "", "ada"]
    tenant["spec"]["members"] = [m for m in tenant["spec"]["members"] if m["subject"]["name"] != "alice"]
    world.kube.put(TENANTS, tenant)
    await world.settle()
    with pytest.raises(NotFound):
        await world.services.keys.lookup(digest_of(key))
