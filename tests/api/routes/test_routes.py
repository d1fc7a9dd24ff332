"""Every route has a permission, refuses anonymous callers, and answers as its OpenAPI description says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter
from tests.api.conftest import GATEWAY, JOB, SERVICE, World, apps_of, client
from tools.generate import ROOT

from busbar.api.app import BASE, as_json, rest_app
from busbar.api.dependencies import GatewayOnly, InNamespace, Permission, Public
from busbar.api.errors import Unavailable
from busbar.api.kubernetes.client import translated
from busbar.api.openapi import generated
from busbar.api.routes.description import described
from busbar.api.services import Services
from busbar.kube.errors import ConfigError

PUBLIC = {
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", f"{BASE}/openapi.json"),
    ("GET", "/login"),
    ("POST", "/login"),
    ("GET", "/static/{name:path}"),
    ("GET", "/favicon.ico"),
}


@cache
def description() -> dict[str, Any]:
    """The OpenAPI description, made once because that takes a second."""
    return described(rest_app())


@dataclass(frozen=True)
class Route:
    """A route as these tests look at it."""

    path: str
    methods: frozenset[str]
    dependant: Dependant
    response_model: Any


def routes(app: FastAPI) -> list[Route]:
    """Every route, however deeply routers are nested."""
    found = [
        Route(r.path, frozenset(r.methods), r.dependant, r.response_model)
        for r in iter_route_contexts(app.routes)
        if r.path is not None and r.methods is not None
    ]
    assert found
    return found


def permissions(route: Route) -> list[Permission]:
    def walk(dependant: Dependant) -> Iterator[Permission]:
        call: object = dependant.call
        if isinstance(call, Permission):
            yield call
        for child in dependant.dependencies:
            yield from walk(child)

    return list(walk(route.dependant))


def both(services: Services) -> list[tuple[str, Route]]:
    public, internal = apps_of(services)
    return [("public", r) for r in routes(public)] + [("internal", r) for r in routes(internal)]


def filled(path: str) -> str:
    """A path with plausible values."""
    path = path.replace("{namespace}", "ada-lab").replace("{name:path}", "portal.css")
    path = path.replace("{token_id}", "0123456789abcdef")
    path = path.replace("{batch_id}", f"batch-{'0' * 20}").replace("{kind}", "answers")
    if "/services" in path or "/modelservices" in path:
        return path.replace("{name}", "ada-chat")
    return path.replace("{name}", "ada-run")


async def test_every_route_has_exactly_one_permission(world: World) -> None:
    for where, route in both(world.services):
        found = permissions(route)
        assert len(found) == 1, f"{where} {route.methods} {route.path} has {len(found)} permissions"


async def test_the_walk_sees_every_page_and_every_rest_route(world: World) -> None:
    paths = {route.path for _, route in both(world.services)}
    described = set(description()["paths"])
    assert described <= paths
    assert {
        "/",
        "/jobs",
        "/services",
        "/batches",
        "/pools",
        "/submit",
        "/usage",
        "/tokens",
        "/audit",
        "/internal/usage",
    } <= paths
    assert len(paths) > 55


async def test_only_the_listed_routes_are_public(world: World) -> None:
    found = {
        (method, route.path)
        for _, route in both(world.services)
        for method in route.methods
        if isinstance(permissions(route)[0], Public)
    }
    assert found == PUBLIC


async def test_routes_with_a_namespace_ask_kubernetes_about_it(world: World) -> None:
    for _, route in both(world.services):
        if "{namespace}" in route.path:
            assert isinstance(permissions(route)[0], InNamespace), route.path


async def test_everything_on_the_internal_port_but_probes_and_numbers_is_for_the_gateway(
    world: World,
) -> None:
    for route in routes(apps_of(world.services)[1]):
        if route.path not in ("/health", "/ready", "/metrics"):
            assert isinstance(permissions(route)[0], GatewayOnly), route.path


async def test_numbers_are_served_on_the_internal_port_alone(world: World) -> None:
    answer = await world.internal.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'busbar_api_database_failures_total{operation="write"} 0.0' in answer.text
    assert (await world.public.get("/metrics")).status_code == 404


async def test_anonymous_callers_get_401_or_the_login_from_every_other_route(world: World) -> None:
    for where, route in both(world.services):
        for method in route.methods:
            if (method, route.path) in PUBLIC:
                continue
            http = world.public if where == "public" else world.internal
            answer = await http.request(method, filled(route.path))
            if route.path.startswith(("/api/", "/internal/")):
                assert answer.status_code == 401, f"{method} {route.path}: {answer.status_code}"
                assert answer.json()["error"]["code"] == "Unauthenticated"
            else:
                assert answer.status_code == 303, f"{method} {route.path}: {answer.status_code}"
                assert answer.headers["location"].startswith("/login")


async def test_a_forged_user_header_is_never_believed(world: World) -> None:
    for header in ("X-Remote-User", "Impersonate-User", "kubeflow-userid", "X-Forwarded-User"):
        answer = await world.public.get(f"{BASE}/me", headers={header: "root"})
        assert answer.status_code == 401


async def test_the_committed_description_is_the_generated_one() -> None:
    for path, text in generated().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run `python -m tools.generate openapi`"


async def test_operation_ids_are_unique_and_every_failure_has_our_shape() -> None:
    found = description()
    ids = [op["operationId"] for ops in found["paths"].values() for op in ops.values()]
    assert len(ids) == len(set(ids))
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            for status, answer in operation["responses"].items():
                if status.startswith(("4", "5")):
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, f"{method} {path} {status}"


async def test_every_operation_that_reads_a_body_describes_what_may_be_wrong_with_it() -> None:
    for path, operations in description()["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                assert {"400", "413"} <= set(operation["responses"]), f"{method} {path}"


async def test_every_parameter_and_every_wait_is_described() -> None:
    for path, operations in description()["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), f"{method} {path}: {parameter['name']}"
            for status in {"429", "503"} & set(operation["responses"]):
                assert "Retry-After" in operation["responses"][status]["headers"], f"{method} {path} {status}"


def test_every_503_says_when_to_come_again() -> None:
    """Also where a part that is away tells no time, as a kubeconfig that cannot log in."""
    with pytest.raises(Unavailable) as caught, translated("job a/b"):
        raise ConfigError("no credential")
    assert as_json(caught.value).headers["Retry-After"] == "5"


async def test_a_method_that_a_path_does_not_take_is_answered_with_all_that_it_takes(world: World) -> None:
    http = await world.as_("alice")
    for path, operations in description()["paths"].items():
        answer = await http.request("TRACE", filled(path))
        assert answer.status_code == 405, path
        assert set(answer.headers["Allow"].split(", ")) >= {each.upper() for each in operations}, path
    assert "takes GET, and no TRACE" in answer.json()["error"]["message"]


async def test_every_reference_in_the_description_leads_somewhere() -> None:
    found = description()
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(found)):
        assert name in found["components"]["schemas"], name


@pytest.mark.parametrize("role", ["alice", "root"])
async def test_every_answer_is_as_described(world: World, role: str) -> None:
    """Each GET route is requested, and its answer validated by the model that OpenAPI was made from."""
    from busbar.api.access.identity import CallerRole

    http = await world.as_(role, CallerRole.ADMIN if role == "root" else CallerRole.USER)
    await world.services.history.flush()
    described = description()["paths"]
    checked = 0
    for route in routes(apps_of(world.services)[0]):
        if route.path not in described or "GET" not in route.methods or route.path.endswith("/changes"):
            continue
        answer = await http.get(filled(route.path))
        operation = described[route.path]["get"]
        assert str(answer.status_code) in operation["responses"], (
            f"{route.path}: {answer.status_code} {answer.text}"
        )
        if answer.status_code == 200 and route.response_model is not None:
            TypeAdapter(route.response_model).validate_json(answer.content)
            checked += 1
    assert checked >= 15


async def test_every_write_answers_as_described(world: World) -> None:
    http = await world.as_("alice")
    jobs, services = f"{BASE}/namespaces/ada-lab/trainingjobs", f"{BASE}/namespaces/ada-lab/modelservices"
    steps: list[tuple[str, str, object, int]] = [
        ("POST", jobs, JOB, 201),
        ("POST", jobs, JOB, 409),
        ("POST", jobs, {**JOB, "metadata": {"name": "other"}, "spec": {}}, 422),
        ("POST", jobs, [], 400),
        ("PATCH", f"{jobs}/stdlib", {"spec": {"priority": 7}}, 200),
        ("PATCH", f"{jobs}/stdlib", {"spec": {"priority": 7000}}, 422),
        ("PATCH", f"{jobs}/stdlib", {"status": {"phase": "Succeeded"}}, 422),
        ("POST", f"{jobs}/stdlib/cancel", None, 200),
        ("POST", f"{jobs}/stdlib/resume", None, 200),
        ("POST", f"{jobs}/none/cancel", None, 404),
        ("DELETE", f"{jobs}/stdlib", None, 204),
        ("DELETE", f"{jobs}/stdlib", None, 404),
        ("POST", services, SERVICE, 201),
        ("PUT", f"{services}/chat/scale", {"replicas": 2}, 200),
        ("PUT", f"{services}/chat/scale", {"replicas": None}, 200),
        ("PUT", f"{services}/chat/scale", {"replicas": -1}, 422),
        ("PUT", f"{services}/chat/scale", {"replicas": 1, "extra": 1}, 422),
        ("POST", f"{BASE}/namespaces/ada-lab/preview", JOB, 200),
        ("POST", f"{BASE}/tokens", {"description": "x"}, 201),
        ("POST", f"{BASE}/tokens", {"scopes": []}, 422),
        ("POST", f"{BASE}/tokens", {"role": "admin"}, 403),
        ("DELETE", f"{BASE}/tokens/none", None, 404),
        ("POST", f"{BASE}/tokens/revoke", {"subject": "alice"}, 200),
        ("POST", f"{BASE}/tokens/revoke", {"subject": "bob"}, 403),
        ("POST", f"{BASE}/tokens/revoke", {}, 422),
        ("POST", f"{BASE}/tokens/none/rotate", {}, 404),
        ("POST", f"{BASE}/tokens/none/rotate", {"overlapHours": -1}, 422),
    ]
    described = description()["paths"]
    patterns = {
        re.compile("^" + re.sub(r"\{[^}]+\}", "[^/]+", path) + "$"): ops for path, ops in described.items()
    }
    for method, path, body, status in steps:
        answer = await http.request(method, path, json=body)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        operation = next(ops[method.lower()] for p, ops in patterns.items() if p.match(path))
        assert str(status) in operation["responses"], f"{method} {path}: {status} is not described"
        if status >= 400:
            assert set(answer.json()) == {"error"}
            assert {"code", "message"} <= set(answer.json()["error"])


async def test_the_gateway_and_nobody_else_uses_the_internal_port(world: World) -> None:
    world.kube.users |= {
        "gw": {"username": GATEWAY},
        "op": {"username": "system:serviceaccount:busbar-system:busbar-operator"},
    }
    record = {"sha256": "0" * 64}
    for token, status in (("gw", 404), ("op", 403), ("nobody", 401), (await world.token("alice"), 403)):
        http = client(world.internal, {"Authorization": f"Bearer {token}"})
        assert (await http.post("/internal/keys/lookup", json=record)).status_code == status, token
    world.kube.audiences["gw"] = ["busbar-operator"]
    world.services.authenticator._reviews = type(world.services.authenticator._reviews)(
        world.services.authenticator._reviews._post
    )
    http = client(world.internal, {"Authorization": "Bearer gw"})
    assert (await http.post("/internal/keys/lookup", json=record)).status_code == 401


async def test_every_answer_carries_the_strict_headers(world: World) -> None:
    for path in ("/login", "/health", f"{BASE}/me", "/nowhere", "/static/portal.js"):
        answer = await world.public.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


async def test_bodies_over_one_mebibyte_are_refused_announced_or_not(world: World) -> None:
    http = await world.as_("alice")
    path = f"{BASE}/namespaces/ada-lab/trainingjobs"
    announced = await http.post(path, content=b"x" * (1024 * 1024 + 1))
    assert (announced.status_code, announced.json()["error"]["code"]) == (413, "TooLarge")

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100_000

    for where in (path, f"{BASE}/tokens"):  # parsed by our code, and by the framework
        streamed = await http.post(where, content=chunks(), headers={"Content-Type": "application/json"})
        assert (streamed.status_code, streamed.json()["error"]["code"]) == (413, "TooLarge")


async def test_an_answer_to_our_own_defect_carries_the_strict_headers_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(world.services.cluster, "pools", broken)
    alice = await world.as_("alice")
    calm = httpx2.ASGITransport(app=apps_of(world.services)[0], raise_app_exceptions=False)
    async with httpx2.AsyncClient(
        transport=calm, base_url="http://busbar.test", headers=alice.headers
    ) as http:
        for path in ("/pools", f"{BASE}/pools"):
            answer = await http.get(path)
            assert (answer.status_code, "a defect" in answer.text) == (500, False)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["cache-control"] == "no-store"
