"""The API against a real kube-apiserver with the whole chart: its own service account, real RBAC and policies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.api.conftest import BASE, JOB, SECRET, SERVICE, apps_of
from tests.api.memory_kube import MemoryKube
from tests.api.process import COMMAND, environment
from tests.api.scripted_operator import ScriptedOperator
from tests.cluster.apiserver import ApiServer
from tests.cluster.attempts import refused
from tests.cluster.conftest import platform  # noqa: F401 - the fixture, used by name
from tests.cluster.rights import give_role
from tests.free_port import free_port

from busbar.api import services as wiring
from busbar.api.access.identity import CallerRole
from busbar.api.kubernetes.client import Kubernetes
from busbar.api.services import Services
from busbar.api.settings import Settings
from busbar.kube.login import Login
from busbar.kube.types import Tenant, TrainingJob

pytestmark = pytest.mark.apiserver
_numbers = count(1)


@dataclass
class Real:
    """An API over the real server, and two tenants that no other test uses."""

    services: Services
    server: ApiServer
    public: httpx2.AsyncClient
    mine: str
    theirs: str

    async def as_(self, subject: str, role: CallerRole = CallerRole.USER) -> httpx2.AsyncClient:
        token, _ = await self.services.tokens.create(subject, created_by="test", role=role)
        return self.bearer(token)

    def bearer(self, token: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            transport=self.public._transport,
            base_url="http://busbar.test",
            headers={"Authorization": f"Bearer {token}"},
        )


def make_tenant(server: ApiServer, name: str, members: dict[str, str]) -> None:
    """A tenant with one namespace of the same name and the RoleBindings that the operator renders; waits until they
    work."""
    server.make_namespace(name, {"busbar.dev/tenant": name})
    rows = [{"subject": {"kind": "User", "name": who}, "role": role} for who, role in members.items()]
    server.admin.create(
        {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": name},
            "spec": {"namespaces": [name], "members": rows},
        }
    ).expect()
    for who, role in members.items():
        give_role(server, name, name, role, who)


@pytest.fixture
async def real(platform: ApiServer, sqlite_url: str) -> AsyncIterator[Real]:  # noqa: F811
    number = next(_numbers)
    mine, theirs = f"api-mine-{number}", f"api-theirs-{number}"
    make_tenant(platform, mine, {"alice": "member", "vera": "viewer"})
    make_tenant(platform, theirs, {"bob": "member"})
    login = Login(
        server=platform.url,
        ca_pem=platform.ca_file.read_text(),
        token=platform.service_account_token("busbar-system", "busbar-api"),
    )
    settings = Settings(session_secret=SECRET, database_url=sqlite_url, gateway_url="http://127.0.0.1:9")
    built = wiring.build(settings, Kubernetes(login), ScriptedOperator(MemoryKube()))
    tasks = await built.start()
    await built.store.synced(60)
    async with asyncio.timeout(60):
        while not all(built.store.find(Tenant, name) for name in (mine, theirs)):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.05)
    public = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=apps_of(built)[0]), base_url="http://busbar.test"
    )
    yield Real(built, platform, public, mine, theirs)
    await built.stop(tasks)


async def eventually(ask: Any, wanted: Any) -> None:
    """Repeats the request until the answer is as wanted: policies and watches take effect after a short delay."""
    async with asyncio.timeout(60):
        while True:
            found = await ask()
            if found == wanted:
                return
            await asyncio.sleep(0.1)


async def test_the_life_of_a_job_with_the_rights_that_the_chart_gives(real: Real) -> None:
    alice, at = await real.as_("alice"), f"{BASE}/namespaces/{real.mine}/trainingjobs"
    made = await alice.post(at, json=JOB)
    assert made.status_code == 201, made.text
    body = made.json()
    assert body["metadata"]["annotations"] == {"busbar.dev/requester": "alice"}
    assert body["spec"]["priority"] == 100, "the server's defaults are in the answer"
    assert "managedFields" not in body["metadata"]
    assert [o["metadata"]["name"] for o in (await alice.get(at)).json()["items"]] == ["stdlib"]
    assert (await alice.patch(f"{at}/stdlib", json={"spec": {"priority": 200}})).json()["spec"][
        "priority"
    ] == 200
    assert (await alice.post(f"{at}/stdlib/cancel")).json()["spec"]["suspend"] is True
    assert (await alice.post(f"{at}/stdlib/resume")).json()["spec"]["suspend"] is False
    assert (await alice.get(f"{at}/stdlib/events")).json()["items"] == []
    logs = await alice.get(f"{at}/stdlib/logs")
    assert (logs.status_code, "no pods yet" in logs.json()["error"]["message"]) == (404, True)
    assert (await alice.delete(f"{at}/stdlib")).status_code == 204
    await eventually(lambda: _names(alice, at), [])


async def _names(http: httpx2.AsyncClient, path: str) -> list[str]:
    return [o["metadata"]["name"] for o in (await http.get(path)).json()["items"]]


async def test_a_service_is_scaled_and_given_back_to_the_autoscaler(real: Real) -> None:
    alice, at = await real.as_("alice"), f"{BASE}/namespaces/{real.mine}/modelservices"
    assert (await alice.post(at, json=SERVICE)).status_code == 201
    assert (await alice.put(f"{at}/chat/scale", json={"replicas": 2})).json()["spec"]["replicas"] == 2
    assert "replicas" not in (await alice.put(f"{at}/chat/scale", json={"replicas": None})).json()["spec"]


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"metadata": {"name": "Bad_Name"}}, 422, "metadata.name"),
        ({"spec": {**JOB["spec"], "priority": 5000}}, 422, "spec.priority"),
        ({"spec": {**JOB["spec"], "template": {"image": "x"}}}, 422, "spec"),
        ({"spec": {**JOB["spec"], "prioritty": 5}}, 400, None),
        ({"kind": "Pod"}, 422, "kind"),
        ({"metadata": {"name": "x", "namespace": "kube-system"}}, 422, "metadata.namespace"),
        ({"metadata": {"name": "x", "ownerReferences": []}}, 422, "metadata.ownerReferences"),
        (
            {"metadata": {"name": "x", "annotations": {"busbar.dev/requester": "root"}}},
            422,
            "metadata.annotations",
        ),
    ],
)
async def test_a_bad_object_is_refused_with_its_field_by_create_and_by_preview(
    real: Real, change: dict[str, Any], status: int, field: str | None
) -> None:
    alice = await real.as_("alice")
    draft = {**JOB, **change}
    for path in ("trainingjobs", "preview"):
        if path == "preview" and change == {"kind": "Pod"}:
            continue
        answer = await alice.post(f"{BASE}/namespaces/{real.mine}/{path}", json=draft)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"].get("field") == field, answer.text
    assert await _names(alice, f"{BASE}/namespaces/{real.mine}/trainingjobs") == []


async def test_a_name_that_is_taken_is_a_conflict(real: Real) -> None:
    alice, at = await real.as_("alice"), f"{BASE}/namespaces/{real.mine}/trainingjobs"
    await alice.post(at, json=JOB)
    answer = await alice.post(at, json=JOB)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "Conflict")
    stale = await alice.patch(
        f"{at}/stdlib", json={"metadata": {"resourceVersion": "1"}, "spec": {"priority": 1}}
    )
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "Conflict")


async def test_rest_says_what_kubectl_would(real: Real) -> None:
    """The cluster's own RBAC alone decides what members, viewers, strangers and admins may do."""
    jobs = f"{BASE}/namespaces/{real.mine}/trainingjobs"
    await (await real.as_("alice")).post(jobs, json=JOB)
    vera, bob, root = await real.as_("vera"), await real.as_("bob"), await real.as_("root", CallerRole.ADMIN)
    assert (await vera.get(f"{jobs}/stdlib")).status_code == 200
    assert (await vera.delete(f"{jobs}/stdlib")).status_code == 403
    for method, path in (
        ("GET", jobs),
        ("GET", f"{jobs}/stdlib"),
        ("POST", jobs),
        ("DELETE", f"{jobs}/stdlib"),
        ("GET", f"{jobs}/stdlib/logs"),
    ):
        assert (await bob.request(method, path, json=JOB if method == "POST" else None)).status_code == 404, (
            path
        )
    assert real.mine not in (await bob.get(f"{BASE}/trainingjobs")).text
    assert real.mine not in (await bob.get(f"{BASE}/tenants")).text
    assert (await root.get(f"{jobs}/stdlib")).status_code == 200
    assert {real.mine, real.theirs} <= {
        t["metadata"]["name"] for t in (await root.get(f"{BASE}/tenants")).json()["items"]
    }
    assert (await root.get(f"{BASE}/audit")).status_code == 200
    assert (await vera.get(f"{BASE}/audit")).status_code == 403


async def test_nobody_but_the_api_stamps_the_requester(real: Real) -> None:
    alice, at = await real.as_("alice"), f"{BASE}/namespaces/{real.mine}/trainingjobs"
    made = (await alice.post(at, json=JOB)).json()
    forged = {"metadata": {"annotations": {"busbar.dev/requester": "bob"}}}
    kubectl = real.server.client("alice")
    await asyncio.to_thread(refused, lambda **p: kubectl.merge(made, forged, **p), "only Busbar writes them")
    again = await alice.patch(
        f"{at}/stdlib", json={"metadata": {"annotations": {"busbar.dev/requester": "bob"}}}
    )
    assert again.status_code == 422


async def test_a_service_accounts_token_for_our_audience_logs_in_and_one_for_another_does_not(
    real: Real,
) -> None:
    real.server.admin.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot", "namespace": real.mine}}
    ).expect()
    ours = real.server.service_account_token(real.mine, "robot", "busbar-api")
    me = await real.bearer(ours).get(f"{BASE}/me")
    assert me.json()["subject"] == f"system:serviceaccount:{real.mine}:robot"
    for audience in ("busbar-operator", None):
        other = real.server.service_account_token(real.mine, "robot", audience)
        assert (await real.bearer(other).get(f"{BASE}/me")).status_code == 401


async def test_history_follows_a_real_watch_and_catches_up_after_being_down(real: Real) -> None:
    alice, at = await real.as_("alice"), f"{BASE}/namespaces/{real.mine}/trainingjobs"
    made = (await alice.post(at, json=JOB)).json()
    operator = real.server.service_account("busbar-system", "busbar-operator")
    status = {
        "status": {"phase": "Running", "attempt": 1, "progress": {"step": 7, "totalSteps": 9, "loss": 2.5}}
    }
    operator.merge(made, status, subresource="/status").expect()

    async def steps() -> list[int]:
        return [p["step"] for p in (await alice.get(f"{at}/stdlib/samples")).json()["items"]]

    await eventually(steps, [7])
    await real.services.store.stop()
    real.server.admin.delete(made).expect()
    await real.services.store.start()

    async def gone() -> list[str]:
        return [row["name"] for row in (await alice.get(f"{BASE}/history")).json()["items"]]

    await eventually(gone, ["stdlib"])
    assert real.services.store.find(TrainingJob, "stdlib", real.mine) is None


async def test_the_process_serves_both_ports_stays_small_and_ends_at_once_on_sigterm(
    platform: ApiServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    """`busbar-api` as the chart starts it: migrate, serve, and stop with an event stream open."""
    port, internal = free_port(), free_port()
    variables = environment(platform, tmp_path, f"sqlite+aiosqlite:///{tmp_path}/api.db", port, internal)
    process = await asyncio.create_subprocess_exec(*COMMAND, env=variables)
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60
        ) as http:
            await eventually(lambda: _status(http, "/ready"), 200)
            assert (await http.get(f"http://127.0.0.1:{internal}/ready")).status_code == 200
            assert (
                await http.post(f"http://127.0.0.1:{internal}/internal/usage", json={})
            ).status_code == 401
            assert (await http.get("/internal/usage")).status_code == 404
            made = await asyncio.create_subprocess_exec(
                *COMMAND,
                "token",
                "create",
                "--subject",
                "root",
                "--role",
                "admin",
                env=variables,
                stdout=asyncio.subprocess.PIPE,
            )
            text = (await made.communicate())[0].decode().strip()
            bearer = {"Authorization": f"Bearer {text}"}
            assert (await http.get(f"{BASE}/me", headers=bearer)).json()["admin"] is True
            resident = _resident_mib(process.pid)
            print(f"busbar-api idles at {resident:.0f} MiB")
            assert resident < 160
            async with http.stream("GET", f"{BASE}/changes", headers=bearer) as stream:
                assert b"hello" in await anext(stream.aiter_bytes())
                process.terminate()
                async with asyncio.timeout(8):
                    assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _status(http: httpx2.AsyncClient, path: str) -> int:
    try:
        return (await http.get(path)).status_code
    except httpx2.HTTPError:
        return 0


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
