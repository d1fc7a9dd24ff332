"""Tokens, inference keys and the audit trail, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import text
from tests.api.conftest import NOW, SECRET, Clock, World, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.audit import Audit
from busbar.api.access.identity import CallerRole, Scope
from busbar.api.access.keys import Keys
from busbar.api.access.spending import Spending
from busbar.api.access.tenancy import Tenancy
from busbar.api.access.token_rules import TokenRules
from busbar.api.access.tokens import Tokens, TokenState
from busbar.api.database.engine import Database
from busbar.api.errors import Conflict, Invalid, NotFound, Unavailable
from busbar.api.kubernetes.store import Store
from busbar.api.settings import Settings, load
from busbar.kube.contracts.keys import digest_of
from busbar.kube.errors import SettingsError
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
    (noted,) = await tokens.page(subject="alice")
    assert noted.last_used_at == NOW
    clock.forward(seconds=30)
    await tokens.used(noted)
    assert (await tokens.page(subject="alice"))[0].last_used_at == NOW
    clock.forward(seconds=31)
    await tokens.used(noted)
    assert (await tokens.page(subject="alice"))[0].last_used_at == NOW + timedelta(seconds=61)


async def test_hidden_keys_are_not_listed_and_are_forgotten_when_over(database: Database) -> None:
    clock = Clock()
    tokens = Tokens(database, clock)
    key, _ = await tokens.create("alice", created_by="alice", hidden=True, lifetime=timedelta(minutes=10))
    assert await tokens.page() == []
    assert await tokens.find(digest_of(key)) is not None
    clock.forward(minutes=10)
    await tokens.prune_hidden()
    async with database.read() as db:
        assert (await db.execute(text("SELECT count(*) FROM tokens"))).scalar_one() == 0


async def test_pages_reach_every_token_however_many_there_are(database: Database) -> None:
    """Tokens of the same moment are told apart too; 500 was once the end of the list."""
    clock = Clock()
    tokens = Tokens(database, clock)
    made = []
    for index in range(7):
        made.append((await tokens.create("alice", created_by="alice"))[1].id)
        clock.forward(seconds=index % 2)
    await tokens.create("bob", created_by="bob")
    seen: list[str] = []
    before = None
    while page := await tokens.page(subject="alice", before=before, limit=2):
        seen += [token.id for token in page]
        before = page[-1].id
    assert sorted(seen) == sorted(made)
    times = {token.id: token.created_at for token in await tokens.page()}
    assert [times[i] for i in seen] == sorted((times[i] for i in seen), reverse=True)
    for nowhere in ("none", (await tokens.page(subject="bob"))[0].id, "a\0b"):
        with pytest.raises(Invalid):
            await tokens.page(subject="alice", before=nowhere)


async def test_lists_are_filtered_by_state(database: Database) -> None:
    clock = Clock()
    tokens = Tokens(database, clock)
    _, old = await tokens.create("alice", created_by="alice", lifetime=timedelta(hours=1))
    _, ended = await tokens.create("alice", created_by="alice")
    await tokens.revoke(ended.id, owner="alice")
    clock.forward(hours=1)
    _, live = await tokens.create("alice", created_by="alice", lifetime=timedelta(hours=1))
    assert [t.id for t in await tokens.page(state=TokenState.LIVE)] == [live.id]
    async with database.read() as db:
        hashes: dict[str, str] = {
            row.id: row.sha256 for row in await db.execute(text("SELECT id, sha256 FROM tokens"))
        }
    found = {token.id: await tokens.ended(hashes[token.id]) for token in (old, ended, live)}
    assert [(i, token and token.id) for i, token in found.items()] == [
        (old.id, old.id),
        (ended.id, ended.id),
        (live.id, None),
    ]
    assert await tokens.ended("0" * 64) is None
    assert {t.id for t in await tokens.page(state=TokenState.ENDED)} == {old.id, ended.id}


async def test_a_person_has_at_most_so_many_live_tokens(database: Database) -> None:
    """Ended, hidden and other people's tokens do not count, and requests at once do not slip through."""
    clock = Clock()
    tokens = Tokens(database, clock)
    await tokens.create("alice", created_by="alice", lifetime=timedelta(hours=1), limit=3)
    await tokens.create("alice", created_by="alice", hidden=True)
    await tokens.create("bob", created_by="bob")
    made = await asyncio.gather(
        *(tokens.create("alice", created_by="alice", limit=3) for _ in range(5)), return_exceptions=True
    )
    refused = [answer for answer in made if isinstance(answer, Conflict)]
    assert (len(refused), len(made)) == (3, 5)
    assert "alice has 3 live tokens, and 3 is the limit" in refused[0].message
    clock.forward(hours=1)
    await tokens.create("alice", created_by="alice", limit=3)


async def test_revoking_many_leaves_nothing_but_what_is_kept(database: Database) -> None:
    tokens = Tokens(database, Clock())
    mine, kept = [await tokens.create("alice", created_by="alice") for _ in range(2)]
    hidden, _ = await tokens.create("alice", created_by="alice", hidden=True)
    other, _ = await tokens.create("bob", created_by="bob")
    assert await tokens.revoke_many("alice", keep_token=kept[1].id) == 1
    assert [await tokens.find(digest_of(t)) is None for t in (mine[0], kept[0], hidden, other)] == [
        True,
        False,
        True,
        False,
    ]
    assert await tokens.revoke_many(None) == 2
    assert await tokens.page(state=TokenState.LIVE) == []


def test_bounds_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="BUSBAR_API_TOKEN_DAYS=400 is longer"):
        TokenRules.of(Settings(session_secret=SECRET, token_days=400.0))


@pytest.mark.parametrize(
    "wrong", [{"TOKENS_PER_PERSON": "0"}, {"TOKEN_DAYS": "0"}, {"TOKEN_MAX_DAYS": "-1"}], ids=str
)
def test_a_bound_that_lets_nobody_have_a_token_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="BUSBAR_API_TOKEN"):
        load({f"BUSBAR_API_{name}": value for name, value in wrong.items()}, needs_secret=False)


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
    yield Keys(tokens, Tenancy(store), Spending(database, clock)), tokens, kube, store, clock
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
        "accounts": [],
        "countedThrough": 0,
    }


async def test_before_the_first_list_of_tenants_nobody_is_told_that_a_key_is_unknown(
    database: Database,
) -> None:
    tokens = Tokens(database, Clock())
    key, _ = await tokens.create("alice", created_by="alice", tenant="ada")
    desk = Keys(tokens, Tenancy(Store(MemoryKube())), Spending(database))
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
        ("root", {"role": CallerRole.ADMIN, "tenant": "no-such-tenant"}),
    ],
)
async def test_keys_without_scope_membership_or_tenant_are_unknown(
    keys: tuple[Keys, Tokens, MemoryKube, Store, Clock], subject: str, more: dict[str, object]
) -> None:
    desk, tokens, _, _, _ = keys
    key, _ = await tokens.create(subject, created_by="test", **more)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await desk.lookup(digest_of(key))


async def test_the_keys_of_a_member_who_leaves_the_tenant_are_unknown(world: World) -> None:
    key = await world.token("alice", tenant="ada")
    assert (await world.services.keys.lookup(digest_of(key))).tenant == "ada"
    tenant = world.kube.objects["tenants", "", "ada"]
    tenant["spec"]["members"] = [m for m in tenant["spec"]["members"] if m["subject"]["name"] != "alice"]
    world.kube.put(TENANTS, tenant)
    await world.settle()
    with pytest.raises(NotFound):
        await world.services.keys.lookup(digest_of(key))
