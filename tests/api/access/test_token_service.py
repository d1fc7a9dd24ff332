"""What callers may do with tokens: lists, lifetimes, limits and revoking, through REST and the portal."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta

import httpx2
import pytest
from tests.api.conftest import BASE, NOW, World, client, running, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.identity import CallerRole, Scope
from busbar.api.settings import Settings
from busbar.kube.contracts.keys import digest_of

TOKENS = f"{BASE}/tokens"


@pytest.fixture
async def strict(settings: Settings) -> AsyncIterator[World]:
    """An API that lets a person have three live tokens of at most ten days."""
    kube = MemoryKube()
    seed(kube)
    bounds = replace(settings, tokens_per_person=3, token_days=5.0, token_max_days=10.0)
    async with running(bounds, kube) as made:
        yield made


async def browser(
    world: World, subject: str, role: CallerRole = CallerRole.USER
) -> tuple[httpx2.AsyncClient, str]:
    """A browser with a session, and its CSRF token."""
    found = client(world.public, {})
    await found.post("/login", data={"token": await world.token(subject, role)})
    csrf = re.search(r'name="csrf_token" value="([0-9a-f]{64})"', (await found.get("/tokens")).text)
    assert csrf
    return found, csrf[1]


async def test_rest_pages_and_filters(world: World) -> None:
    alice = await world.as_("alice")
    for _ in range(4):
        await world.token("alice")
    await world.token("bob")
    first = (await alice.get(TOKENS, params={"limit": 3})).json()
    assert (len(first["items"]), first["next"]) == (3, first["items"][-1]["id"])
    rest = (await alice.get(TOKENS, params={"limit": 3, "before": first["next"]})).json()
    assert (len(rest["items"]), rest["next"]) == (2, None)
    assert (await alice.get(TOKENS, params={"state": "ended"})).json()["items"] == []
    for params, status in (
        ({"subject": "bob"}, 403),
        ({"before": "none"}, 422),
        ({"state": "asleep"}, 422),
        ({"limit": 501}, 422),
    ):
        assert (await alice.get(TOKENS, params=params)).status_code == status
    root = await world.as_("root", CallerRole.ADMIN)
    assert {t["subject"] for t in (await root.get(TOKENS)).json()["items"]} == {"alice", "bob", "root"}
    assert {t["subject"] for t in (await root.get(TOKENS, params={"subject": "bob"})).json()["items"]} == {
        "bob"
    }


async def test_a_token_ends_by_itself_and_nobody_gets_a_longer_one(strict: World) -> None:
    alice = await strict.as_("alice")
    usual = (await alice.post(TOKENS, json={"scopes": ["rest"]})).json()["info"]
    assert usual["expiresAt"] == (NOW + timedelta(days=5)).isoformat().replace("+00:00", "Z")
    for days, status in ((10, 201), (10.01, 422)):
        answer = await alice.post(TOKENS, json={"scopes": ["rest"], "expiresInDays": days})
        assert answer.status_code == status
    assert "at most 10 days" in answer.json()["error"]["message"]
    assert answer.json()["error"]["field"] == "expiresInDays"


async def test_the_token_too_many_is_refused_and_the_refusal_audited(strict: World) -> None:
    """Also when an admin makes it: the limit is of the person who holds them."""
    alice = await strict.as_("alice")
    for _ in range(2):
        assert (await alice.post(TOKENS, json={"scopes": ["rest"]})).status_code == 201
    root = await strict.as_("root", CallerRole.ADMIN)
    for http, body in ((alice, {}), (root, {"subject": "alice"})):
        answer = await http.post(TOKENS, json={"scopes": ["rest"], **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "Conflict")
        assert "revoke one first" in answer.json()["error"]["message"]
    assert [(e.subject, e.action, e.outcome) for e in await strict.services.audit.page(limit=2)] == [
        ("root", "create", "Conflict"),
        ("alice", "create", "Conflict"),
    ]


async def test_a_rotated_token_and_its_successor_are_both_valid_until_the_overlap_ends(world: World) -> None:
    alice = await world.as_("alice")
    limits = {"tokensPerMinute": 500, "budgets": [{"period": "day", "cost": 2.0}]}
    asked = {
        "scopes": ["inference"],
        "tenant": "ada",
        "description": "chat",
        "expiresInDays": 20,
        "limits": limits,
    }
    old = (await alice.post(TOKENS, json=asked)).json()
    world.clock.forward(seconds=86400)
    answer = await alice.post(f"{TOKENS}/{old['info']['id']}/rotate", json={"overlapHours": 2})
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    new = answer.json()
    same = ("subject", "role", "scopes", "tenant", "description", "limits")
    assert {name: new["info"].get(name) for name in same} == {name: old["info"].get(name) for name in same}
    assert new["token"] != old["token"]
    moment = NOW + timedelta(days=1)
    assert datetime.fromisoformat(new["info"]["expiresAt"]) == moment + timedelta(days=20)
    assert datetime.fromisoformat(new["former"]["expiresAt"]) == moment + timedelta(hours=2)
    find = world.services.tokens.find
    assert [await find(digest_of(made["token"])) is not None for made in (old, new)] == [True, True]
    world.clock.forward(seconds=2 * 3600)
    assert [await find(digest_of(made["token"])) is not None for made in (old, new)] == [False, True]
    again = await alice.post(f"{TOKENS}/{old['info']['id']}/rotate", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "Conflict")
    rows = [(e.name, e.outcome, e.message) for e in await world.services.audit.page() if e.action == "rotate"]
    assert rows == [
        (old["info"]["id"], "Conflict", f"token {old['info']['id']} has ended; make a new one"),
        (old["info"]["id"], "Done", f"token {new['info']['id']} replaces it"),
    ]


async def test_rotating_gives_nobody_more_than_they_have(strict: World) -> None:
    alice, root = await strict.as_("alice"), await strict.as_("root", CallerRole.ADMIN)
    (mine,) = await strict.services.tokens.page(subject="alice")
    (theirs,) = await strict.services.tokens.page(subject="root")
    _, strong = await strict.services.tokens.create("alice", created_by="root", role=CallerRole.ADMIN)
    assert (await alice.post(f"{TOKENS}/{theirs.id}/rotate", json={})).status_code == 404
    assert (await alice.post(f"{TOKENS}/{strong.id}/rotate", json={})).status_code == 403
    for hours in (-1, 721, "x"):
        refused = await alice.post(f"{TOKENS}/{mine.id}/rotate", json={"overlapHours": hours})
        assert refused.status_code == 422
    first = await root.post(f"{TOKENS}/{strong.id}/rotate", json={"overlapHours": 720})
    assert (first.status_code, first.json()["info"]["role"]) == (201, "admin")
    # It had no end: the new one has the usual lifetime. The owner now has three, which is the limit here.
    assert first.json()["info"]["expiresAt"] == (NOW + timedelta(days=5)).isoformat().replace("+00:00", "Z")
    assert (await alice.post(f"{TOKENS}/{mine.id}/rotate", json={})).status_code == 409
    at_once = await alice.post(f"{TOKENS}/{mine.id}/rotate", json={"overlapHours": 0})
    assert at_once.status_code == 201
    assert (await alice.get(f"{BASE}/me")).status_code == 401
    narrow, _ = await strict.services.tokens.create("bob", created_by="bob", scopes=[Scope.REST])
    _, both = await strict.services.tokens.create("bob", created_by="bob")
    bob = client(strict.public, {"Authorization": f"Bearer {narrow}"})
    assert (await bob.post(f"{TOKENS}/{both.id}/rotate", json={})).status_code == 403


async def test_a_refused_rotation_leaves_the_end_of_the_former_token(strict: World) -> None:
    alice = await strict.as_("alice")
    for _ in range(2):
        assert (await alice.post(TOKENS, json={"scopes": ["rest"]})).status_code == 201
    last, *_ = before = await strict.services.tokens.page(subject="alice")
    assert (await alice.post(f"{TOKENS}/{last.id}/rotate", json={})).status_code == 409
    after = await strict.services.tokens.page(subject="alice")
    assert [t.expires_at for t in after] == [t.expires_at for t in before]


async def test_the_page_rotates_a_token_and_shows_the_new_one_once(world: World) -> None:
    window, csrf = await browser(world, "alice")
    (mine,) = await world.services.tokens.page(subject="alice")
    assert f'action="/tokens/{mine.id}/rotate"' in (await window.get("/tokens")).text
    shown = await window.post(f"/tokens/{mine.id}/rotate", data={"csrf_token": csrf})
    text = re.search(r'value="(bb_[^"]+)"', shown.text)
    assert shown.status_code == 201
    assert text
    found = await world.services.tokens.find(digest_of(text[1]))
    assert found is not None
    assert found.subject == "alice"
    ended = await window.post("/tokens/none/rotate", data={"csrf_token": csrf})
    assert (ended.status_code, "token none does not exist" in ended.text) == (404, True)


async def test_people_revoke_all_of_their_own_and_admins_of_anybody(world: World) -> None:
    alice, other = await world.as_("alice"), await world.as_("alice")
    window, _ = await browser(world, "alice")
    bob, root = await world.as_("bob"), await world.as_("root", CallerRole.ADMIN)
    for body in ({"subject": "bob"}, {"everyone": True}):
        assert (await alice.post(f"{TOKENS}/revoke", json=body)).status_code == 403
    assert (await alice.post(f"{TOKENS}/revoke", json={"subject": "alice"})).json() == {"revoked": 2}
    assert [(await http.get(f"{BASE}/me")).status_code for http in (alice, other, window)] == [200, 401, 401]
    assert (await root.post(f"{TOKENS}/revoke", json={"everyone": True})).json() == {"revoked": 2}
    assert [(await http.get(f"{BASE}/me")).status_code for http in (root, alice, bob)] == [200, 401, 401]
    rows = [
        (e.subject, e.name, e.outcome, e.message)
        for e in await world.services.audit.page()
        if e.action == "revoke"
    ]
    assert rows == [
        ("root", "*", "Done", "2 live tokens"),
        ("alice", "alice", "Done", "2 live tokens"),
        ("alice", "*", "Forbidden", "only admins revoke other people's tokens"),
        ("alice", "bob", "Forbidden", "only admins revoke other people's tokens"),
    ]


@pytest.mark.parametrize(
    "body", [{}, {"subject": "alice", "everyone": True}, {"everyone": False}, {"subject": ""}]
)
async def test_whose_tokens_to_revoke_is_said_exactly_once(world: World, body: dict[str, object]) -> None:
    root = await world.as_("root", CallerRole.ADMIN)
    assert (await root.post(f"{TOKENS}/revoke", json=body)).status_code == 422
    assert (await root.get(f"{BASE}/me")).status_code == 200


async def test_the_page_shows_the_older_ones_too_and_revokes_many(world: World) -> None:
    window, csrf = await browser(world, "root", CallerRole.ADMIN)
    for _ in range(101):
        await world.token("bob")
    newest = await window.get("/tokens", params={"subject": "bob"})
    older = re.search(r'href="(/tokens\?[^"]*before=[^"]*)"', newest.text)
    assert older
    last = await window.get(older[1].replace("&amp;", "&"))
    assert last.text.count('aria-label="Revoke ') == 1
    done = await window.post("/tokens/revoke", data={"csrf_token": csrf, "subject": "bob"})
    assert done.status_code == 303
    assert "No such tokens" in (await window.get("/tokens?subject=bob&state=live")).text
    for wrong in ({}, {"subject": "bob", "everyone": "true"}):
        answer = await window.post("/tokens/revoke", data={"csrf_token": csrf, **wrong})
        assert answer.status_code == 422


async def test_the_page_makes_tokens_with_limits_and_says_what_is_wrong_with_one(world: World) -> None:
    window, csrf = await browser(world, "alice")
    form = {"csrf_token": csrf, "scope": "inference", "tenant": "ada", "period": "week"}
    made = await window.post("/tokens", data={**form, "tokens_per_minute": "1500", "cost": "2.5"})
    assert made.status_code == 201
    assert "1,500 tokens/min, 2.50 a week" in made.text
    for wrong in ({"tokens_per_minute": "0"}, {"requests_per_minute": "x"}, {"cost": "much"}, {"cost": "-1"}):
        answer = await window.post("/tokens", data={**form, **wrong})
        assert answer.status_code == 422, wrong
    unlimited = await window.post("/tokens", data=form)
    assert unlimited.status_code == 201
