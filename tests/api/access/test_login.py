"""Who may log in, and the limits of a browser session."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from tests.api.conftest import BASE, World, client, running, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.identity import ADMIN_GROUP, CallerRole, Scope
from busbar.api.access.sessions import COOKIE
from busbar.api.portal.login import local
from busbar.api.settings import Settings


async def logged_in(world: World, subject: str, role: CallerRole = CallerRole.USER) -> httpx2.AsyncClient:
    """A browser with a session."""
    browser = client(world.public, {})
    answer = await browser.post("/login", data={"token": await world.token(subject, role), "next": "/jobs"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
    return browser


async def csrf(browser: httpx2.AsyncClient) -> str:
    found = re.search(r'name="csrf_token" value="([0-9a-f]{64})"', (await browser.get("/tokens")).text)
    assert found
    return found[1]


async def test_a_token_opens_a_session_whose_cookie_scripts_and_other_sites_cannot_use(world: World) -> None:
    browser = client(world.public, {})
    answer = await browser.post("/login", data={"token": await world.token("alice")})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "alice" in (await browser.get("/jobs")).text


@pytest.mark.parametrize(
    ("more", "address", "headers", "tls"),
    [
        ({}, "http://busbar.test", {}, False),
        ({}, "http://busbar.test", {"X-Forwarded-Proto": "https"}, False),
        ({}, "https://busbar.test", {}, True),
        ({"secure_cookies": True}, "http://busbar.test", {}, True),
        ({"public_url": "https://busbar.test"}, "http://busbar.test", {}, True),
        ({"public_url": "http://busbar.test"}, "http://busbar.test", {}, False),
        ({"trusted_proxies": "127.0.0.1"}, "http://busbar.test", {"X-Forwarded-Proto": "https"}, True),
        ({"trusted_proxies": "127.0.0.1"}, "http://busbar.test", {"X-Forwarded-Proto": "https, http"}, False),
        ({"trusted_proxies": "127.0.0.2"}, "http://busbar.test", {"X-Forwarded-Proto": "https"}, False),
    ],
)
async def test_cookies_are_secure_and_browsers_bound_where_people_use_tls(
    settings: Settings, more: dict[str, Any], address: str, headers: dict[str, str], tls: bool
) -> None:
    kube = MemoryKube()
    seed(kube)
    async with running(replace(settings, **more), kube) as world:
        token = {"token": await world.token("alice")}
        answer = await world.public.post(f"{address}/login", data=token, headers=headers)
        assert ("; Secure" in answer.headers["set-cookie"]) is tls
        assert ("strict-transport-security" in answer.headers) is tls


@pytest.mark.parametrize("token", ["bb_" + "x" * 43, "", "not-a-token", "bb_"])
async def test_a_wrong_token_opens_nothing(world: World, token: str) -> None:
    answer = await world.public.post("/login", data={"token": token})
    assert answer.status_code in (401, 422)
    assert "set-cookie" not in answer.headers


async def test_an_inference_token_opens_no_session_and_no_rest(world: World) -> None:
    token = await world.token("alice", scopes=(Scope.INFERENCE,))
    answer = await world.public.post("/login", data={"token": token})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    (row,) = await world.services.audit.page()
    assert (row.subject, row.action, row.name, row.outcome) == ("alice", "login", "127.0.0.1", "Forbidden")
    rest = await client(world.public, {"Authorization": f"Bearer {token}"}).get(f"{BASE}/me")
    assert rest.json()["error"]["code"] == "Forbidden"


async def test_logging_out_ends_the_session_on_the_server_too(world: World) -> None:
    browser = await logged_in(world, "alice")
    cookie = browser.cookies[COOKIE]
    assert (await browser.post("/logout", data={"csrf_token": await csrf(browser)})).status_code == 303
    again = client(world.public, {"Cookie": f"{COOKIE}={cookie}"})
    assert (await again.get(f"{BASE}/me")).status_code == 401


async def test_revoking_a_token_ends_the_sessions_that_began_with_it(world: World) -> None:
    browser = await logged_in(world, "alice")
    (token,) = await world.services.tokens.page(subject="alice")
    await world.services.tokens.revoke(token.id, owner="alice")
    assert (await browser.get(f"{BASE}/me")).status_code == 401


async def test_a_session_and_a_token_end_when_their_time_is_up(world: World) -> None:
    browser = await logged_in(world, "alice")
    world.clock.forward(hours=12, seconds=1)
    assert (await browser.get(f"{BASE}/me")).status_code == 401


async def test_a_sessions_write_needs_its_own_csrf_token(world: World) -> None:
    browser, other = await logged_in(world, "alice"), await logged_in(world, "alice")
    path = f"{BASE}/namespaces/ada-lab/trainingjobs/ada-run/cancel"
    assert (await browser.post(path)).status_code == 403
    assert (await browser.post(path, headers={"X-CSRF-Token": await csrf(other)})).status_code == 403
    assert (await browser.post(path, headers={"X-CSRF-Token": await csrf(browser)})).status_code == 200
    page = "/jobs/ada-lab/ada-run/resume"
    assert (await browser.post(page, data={"csrf_token": "0" * 64})).status_code == 403
    assert (await browser.post(page, data={"csrf_token": await csrf(browser)})).status_code == 303


async def test_every_write_of_the_portal_refuses_a_missing_csrf_token(world: World) -> None:
    browser = await logged_in(world, "alice")
    for path in (
        "/logout",
        "/submit",
        "/submit/preview",
        "/tokens",
        "/tokens/revoke",
        "/tokens/0123456789abcdef/revoke",
        "/tokens/0123456789abcdef/rotate",
        "/jobs/ada-lab/ada-run/cancel",
        "/jobs/ada-lab/ada-run/delete",
        "/services/ada-lab/ada-chat/scale",
        "/services/ada-lab/ada-chat/adapters",
        "/services/ada-lab/ada-chat/adapters/sql/unload",
        "/services/ada-lab/ada-chat/complete",
        "/services/ada-lab/ada-chat/chat",
    ):
        answer = await browser.post(path, data={"prompt": "x"})
        assert answer.status_code == 403, path
        assert "CSRF" in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "null", "Host": ""},
        {"Origin": "http://["},
        {"Origin": ""},
        {"Origin": "ftp://busbar.test"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_another_site_cannot_log_a_person_in(world: World, headers: dict[str, str]) -> None:
    answer = await world.public.post("/login", data={"token": await world.token("alice")}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("origin", ["http://busbar.test", "https://busbar.test"])
async def test_our_own_form_logs_in_behind_tls_too(world: World, origin: str) -> None:
    answer = await world.public.post(
        "/login", data={"token": await world.token("alice")}, headers={"Origin": origin}
    )
    assert answer.status_code == 303


@pytest.mark.parametrize(
    ("target", "goes"),
    [
        ("/jobs?show=active", "/jobs?show=active"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("http://[", "/"),
        ("//[", "/"),
        ("/[", "/["),
        ("jobs", "/"),
    ],
)
def test_after_the_login_only_our_own_paths_are_gone_to(target: str, goes: str) -> None:
    assert local(target) == goes


async def test_a_kubernetes_token_for_our_audience_is_a_caller(world: World) -> None:
    world.kube.users["k8s"] = {
        "username": "system:serviceaccount:ada-lab:robot",
        "uid": "u1",
        "groups": ["system:serviceaccounts"],
    }
    tenant = world.kube.objects["tenants", "", "ada"]
    tenant["spec"]["members"].append(
        {"subject": {"kind": "ServiceAccount", "name": "robot", "namespace": "ada-lab"}, "role": "member"}
    )
    robot = client(world.public, {"Authorization": "Bearer k8s"})
    me = (await robot.get(f"{BASE}/me")).json()
    assert (me["subject"], me["source"], me["admin"]) == (
        "system:serviceaccount:ada-lab:robot",
        "kubernetes",
        False,
    )
    assert (await robot.get(f"{BASE}/namespaces/ada-lab/trainingjobs/ada-run")).status_code == 200
    assert world.kube.reviews[-1]["uid"] == "u1"


async def test_a_kubernetes_token_for_another_audience_is_nobody(world: World) -> None:
    world.kube.users["k8s"] = {"username": "mallory", "groups": ["system:masters"]}
    world.kube.audiences["k8s"] = ["busbar-operator"]
    answer = await client(world.public, {"Authorization": "Bearer k8s"}).get(f"{BASE}/me")
    assert answer.status_code == 401


async def test_when_kubernetes_is_away_no_caller_is_allowed(world: World) -> None:
    alice = await world.as_("alice")
    world.kube.away = True
    answer = await alice.get(f"{BASE}/namespaces/ada-lab/trainingjobs/ada-run")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "Unavailable")
    assert answer.headers["retry-after"]
    unknown = await client(world.public, {"Authorization": "Bearer some-k8s-token"}).get(f"{BASE}/me")
    assert unknown.status_code == 503


async def test_only_an_admin_token_carries_the_admin_group(world: World) -> None:
    await (await world.as_("alice")).get(f"{BASE}/me")
    assert ADMIN_GROUP not in world.kube.reviews[-1]["groups"]
    await (await world.as_("root", CallerRole.ADMIN)).get(f"{BASE}/me")
    assert ADMIN_GROUP in world.kube.reviews[-1]["groups"]


@pytest.mark.parametrize(
    "name", ["system:admin", "busbar:admins", "system:serviceaccount:a:b", "a b", "", "x" * 254]
)
async def test_nobody_gets_a_token_in_a_reserved_or_malformed_name(world: World, name: str) -> None:
    root = await world.as_("root", CallerRole.ADMIN)
    answer = await root.post(f"{BASE}/tokens", json={"subject": name or " ", "scopes": ["rest"]})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "subject")


async def test_people_make_tokens_for_themselves_only_and_never_stronger_ones(world: World) -> None:
    alice = await world.as_("alice")
    for body, field in (
        ({"subject": "bob"}, "subject"),
        ({"role": "admin"}, "role"),
        ({"tenant": "bob-corp"}, "tenant"),
    ):
        answer = await alice.post(f"{BASE}/tokens", json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (403, field)
    rest_only = await world.token("alice", scopes=(Scope.REST,))
    weak = client(world.public, {"Authorization": f"Bearer {rest_only}"})
    answer = await weak.post(f"{BASE}/tokens", json={"scopes": ["inference"]})
    assert (answer.status_code, answer.json()["error"]["field"]) == (403, "scopes")


async def test_a_caller_who_may_only_read_the_cluster_makes_no_admin_token(world: World) -> None:
    """The right to read all tenants makes nobody an admin: a read-only auditor must not be able to grant rights."""
    world.kube.users["audit"] = {"username": "auditor", "groups": ["readers"]}
    allowed = world.kube._allowed

    def readers(spec: dict[str, object]) -> bool:
        asked = spec["resourceAttributes"]
        assert isinstance(asked, dict)
        return allowed(spec) or (spec["user"] == "auditor" and asked["verb"] in ("get", "list"))

    world.kube._allowed = readers  # type: ignore[method-assign]
    auditor = client(world.public, {"Authorization": "Bearer audit"})
    assert (await auditor.get(f"{BASE}/me")).json()["admin"] is True
    for body in ({"role": "admin", "scopes": ["rest"]}, {"subject": "root", "scopes": ["rest"]}):
        assert (await auditor.post(f"{BASE}/tokens", json=body)).status_code == 403
    assert (await auditor.get(f"{BASE}/audit")).status_code == 403
