"""Who may call what: each REST route as each role of docs/security.md, in a namespace of the tenant ada."""

from __future__ import annotations

from datetime import timedelta

import httpx2
import pytest
from tests.api.access.test_tenancy import aimed, ask, lived_in, walk
from tests.api.conftest import BASE, World, client

from busbar.api.access.identity import CallerRole, Scope

PEOPLE = {
    "viewer": ("vera", CallerRole.USER),
    "member": ("alice", CallerRole.USER),
    "admin of the tenant": ("adam", CallerRole.USER),
    "member of another tenant": ("bob", CallerRole.USER),
    "nobody's member": ("zoe", CallerRole.USER),
    "platform admin": ("root", CallerRole.ADMIN),
}
OUTSIDE = ("member of another tenant", "nobody's member")
FOR_ADMINS = tuple(f"{BASE}/{part}" for part in ("audit", "database"))


def allowed(role: str, method: str, path: str) -> set[int] | None:
    """The statuses of a call that is refused; None: it is not refused."""
    if path.startswith(FOR_ADMINS):
        return None if role == "platform admin" else {403}
    if "{namespace}" not in path:
        return None
    if role in OUTSIDE:
        return {404}  # as for what does not exist
    return {403} if role == "viewer" and method != "GET" else None


@pytest.mark.parametrize("role", PEOPLE)
async def test_each_role_may_call_what_it_is_said_to(world: World, role: str) -> None:
    await lived_in(world)
    caller, checked = await world.as_(*PEOPLE[role]), 0
    for method, route in sorted(walk(world), key=lambda pair: (pair[0] == "DELETE", pair[1].path)):
        if not route.path.startswith(BASE):
            continue
        answer = await ask(caller, method, aimed(route.path, "ada", "ada-lab"))
        refused, told = allowed(role, method, route.path), f"{method} {route.path}: {answer.text}"
        checked += 1
        if refused is not None:
            assert answer.status_code in refused, told
        else:
            assert answer.status_code < 500, told
            assert answer.status_code not in (401, 403), told
            assert answer.status_code != 404 or "{token_id}" in route.path or "no pods yet" in answer.text, (
                told
            )
    assert checked > 40


@pytest.mark.parametrize("end", ["revoked", "expired", "for inference only", "none"])
async def test_a_token_that_is_over_or_for_something_else_opens_no_route(world: World, end: str) -> None:
    scopes = (Scope.INFERENCE,) if end == "for inference only" else (Scope.REST,)
    text, token = await world.services.tokens.create(
        "alice", created_by="alice", scopes=scopes, lifetime=timedelta(hours=1)
    )
    caller = client(world.public, {"Authorization": f"Bearer {text}"} if end != "none" else {})
    if end == "revoked":
        await world.services.tokens.revoke(token.id, owner=None)
    elif end == "expired":
        world.clock.forward(hours=2)
    status = 403 if end == "for inference only" else 401
    for method, route in walk(world):
        if route.path.startswith(BASE):
            world.clock.forward(minutes=1)  # wrong tokens are throttled
            answer: httpx2.Response = await ask(caller, method, aimed(route.path, "ada", "ada-lab"))
            assert answer.status_code == status, f"{method} {route.path}: {answer.text}"
