"""Login through OpenID Connect, against a provider that follows the protocol: discovery, PKCE, nonce, RS256."""

from __future__ import annotations

import base64
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from joserfc import jwk, jwt
from tests.api.conftest import BASE, World, client, running, seed
from tests.api.memory_kube import MemoryKube

from busbar.api.access.identity import CallerRole
from busbar.api.errors import BadRequest
from busbar.api.portal.oidc import caller_of
from busbar.api.settings import Oidc, Settings


@dataclass
class Provider:
    """A small OpenID Connect provider on loopback."""

    url: str
    claims: dict[str, Any] = field(default_factory=lambda: {"email": "alice", "groups": ["ml"]})
    wrong_nonce: bool = False
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    key: Any = field(default_factory=lambda: jwk.RSAKey.generate_key(2048, {"kid": "k1"}, private=True))

    def authorize(self, location: str) -> str:
        """What the provider's page does when the person consents: it makes a code for the redirect address."""
        asked = {key: values[0] for key, values in parse_qs(urlsplit(location).query).items()}
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert asked["nonce"]
        code = secrets.token_hex(8)
        self.codes[code] = asked
        return f"{urlsplit(asked['redirect_uri']).path}?code={code}&state={asked['state']}"

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/.well-known/openid-configuration")
        async def discovery() -> dict[str, Any]:
            return {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/jwks",
                "id_token_signing_alg_values_supported": ["RS256"],
            }

        @app.get("/jwks")
        async def keys() -> dict[str, Any]:
            return {"keys": [self.key.as_dict(private=False)]}

        @app.post("/token")
        async def token(request: Request) -> JSONResponse:
            form = await request.form()
            asked = self.codes.pop(str(form["code"]), None)
            verifier = hashlib.sha256(str(form.get("code_verifier", "")).encode()).digest()
            challenge = base64.urlsafe_b64encode(verifier).rstrip(b"=").decode()
            if asked is None or asked["code_challenge"] != challenge:
                return JSONResponse({"error": "invalid_grant"}, status_code=400)
            now = int(time.time())
            nonce = "forged" if self.wrong_nonce else asked["nonce"]
            claims = {
                "iss": self.url,
                "aud": "busbar",
                "sub": "1",
                "iat": now,
                "exp": now + 60,
                "nonce": nonce,
                **self.claims,
            }
            signed = jwt.encode({"alg": "RS256", "kid": "k1"}, claims, self.key)
            return JSONResponse(
                {"access_token": "a", "token_type": "Bearer", "id_token": signed, "expires_in": 60}
            )

        return app


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    made = Provider(f"http://127.0.0.1:{listener.getsockname()[1]}")
    server = uvicorn.Server(uvicorn.Config(made.app(), log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield made
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
async def world(settings: Settings, provider: Provider) -> AsyncIterator[World]:
    provider.claims = {"email": "alice", "groups": ["ml", "system:masters", "busbar:admins"]}
    provider.wrong_nonce = False
    oidc = Oidc(provider.url, "busbar", "s3cret-of-the-client", admin_group="gpu-admins")
    kube = MemoryKube()
    seed(kube)
    async with running(replace(settings, oidc=oidc), kube) as made:
        yield made


async def begin(world: World, provider: Provider, after: str = "/jobs") -> tuple[httpx2.AsyncClient, str]:
    """A browser that has logged in at the provider, and the redirect address with the code."""
    browser = client(world.public, {})
    answer = await browser.get(f"/login/oidc?next={after}")
    assert answer.status_code == 302
    assert answer.headers["location"].startswith(f"{provider.url}/authorize?")
    return browser, provider.authorize(answer.headers["location"])


async def test_a_person_logs_in_with_pkce_and_nonce_and_lands_where_they_wanted(
    world: World, provider: Provider
) -> None:
    browser, back = await begin(world, provider, "/pools")
    answer = await browser.get(back)
    assert (answer.status_code, answer.headers["location"]) == (303, "/pools")
    me = (await browser.get(f"{BASE}/me")).json()
    assert (me["subject"], me["source"], me["admin"]) == ("alice", "oidc", False)
    assert me["groups"] == ["ml"], "a provider cannot assert Kubernetes' or Busbar's own groups"
    assert "busbar:admins" not in world.kube.reviews[-1]["groups"]
    assert "Log in with your organisation" in (await world.public.get("/login")).text


async def test_the_admin_group_makes_an_admin(world: World, provider: Provider) -> None:
    provider.claims = {"email": "carol", "groups": ["gpu-admins"]}
    browser, back = await begin(world, provider)
    await browser.get(back)
    assert (await browser.get(f"{BASE}/me")).json()["admin"] is True


@pytest.mark.parametrize("how", ["forged", "missing", "foreign browser"])
async def test_a_forged_state_is_a_bad_request_and_opens_nothing(
    world: World, provider: Provider, how: str
) -> None:
    browser, back = await begin(world, provider)
    if how == "forged":
        back = back.split("&state=")[0] + "&state=forged"
    elif how == "missing":
        back = back.split("&state=")[0]
    else:
        browser = client(world.public, {})
    answer = await browser.get(back)
    assert answer.status_code == 400
    assert "busbar_session" not in answer.headers.get("set-cookie", "")
    (row,) = await world.services.audit.page()
    assert (row.subject, row.action, row.name) == ("", "login", "127.0.0.1")
    assert (row.outcome, row.source) == ("BadRequest", "oidc")


async def test_forged_states_are_refused_after_so_many_and_a_right_one_costs_nothing(
    world: World, provider: Provider
) -> None:
    _, back = await begin(world, provider)
    forged = back.split("&state=")[0] + "&state=forged"
    found = [(await world.public.get(forged)).status_code for _ in range(31)]
    assert (found[:30], found[30]) == ([400] * 30, 429)
    world.clock.forward(minutes=1)
    for _ in range(2):
        browser, back = await begin(world, provider)
        assert (await browser.get(back)).status_code == 303
    assert [(await world.public.get(forged)).status_code for _ in range(31)][29:] == [400, 429]


async def test_an_answer_for_another_nonce_is_refused(world: World, provider: Provider) -> None:
    provider.wrong_nonce = True
    browser, back = await begin(world, provider)
    answer = await browser.get(back)
    assert answer.status_code == 400
    assert "busbar_session" not in answer.headers.get("set-cookie", "")


async def test_a_code_works_once(world: World, provider: Provider) -> None:
    browser, back = await begin(world, provider)
    assert (await browser.get(back)).status_code == 303
    assert (await client(world.public, dict(browser.headers)).get(back)).status_code == 400


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"email": ""},
        {"email": "system:admin"},
        {"email": "eve@x", "email_verified": False},
        {"email": ["a"]},
    ],
)
def test_claims_that_name_nobody_or_a_reserved_name_are_refused(claims: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        caller_of(claims, Oidc("https://issuer", "busbar", "x"))
    accepted = caller_of({"email": "eve@x", "email_verified": True}, Oidc("https://issuer", "busbar", "x"))
    assert (accepted.subject, accepted.role) == ("eve@x", CallerRole.USER)
