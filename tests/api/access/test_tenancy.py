"""Tenant A learns nothing of tenant B: every route and page is requested as A's member, with B's and with A's names."""

from __future__ import annotations

import re

import httpx2
import pytest
from tests.api.conftest import BASE, NOW, World, apps_of
from tests.api.routes.test_routes import Route, permissions, routes

from busbar.api.access.identity import CallerRole
from busbar.api.dependencies import Public
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.resources import EVENTS, PERFORMANCE_PROFILES, TRAINING_JOBS

BOBS = re.compile(r"bob", re.IGNORECASE)
"""Every name, namespace, pool, person, log and model of tenant B contains this word."""


async def lived_in(world: World) -> None:
    """Both tenants have history, usage, tokens, audit rows, events and a waiting job."""
    kube, services = world.kube, world.services
    world.clock.forward(hours=1)
    for namespace, prefix, tenant in (("ada-lab", "ada", "ada"), ("bob-lab", "bob", "bob-corp")):
        kube.status(
            TRAINING_JOBS,
            namespace,
            f"{prefix}-run",
            phase="Running",
            message=f"{prefix} trains",
            attempt=1,
            admission={"id": "a1", "pool": "cpu", "accelerator": "cpu", "nodes": ["cpu-node-0"], "pods": 1},
            progress={"step": 5, "totalSteps": 10, "loss": 1.5, "tokensPerSecond": 10.0},
            usage={"acceleratorSeconds": 10.0, "cost": 1.0},
        )
        kube.put(
            EVENTS,
            {
                "metadata": {"name": f"{prefix}-e", "namespace": namespace},
                "reason": "Started",
                "message": f"{prefix} started",
                "involvedObject": {"kind": "TrainingJob", "name": f"{prefix}-run"},
            },
        )
        kube.put(
            TRAINING_JOBS,
            {
                **kube.objects["trainingjobs", namespace, f"{prefix}-run"],
                "metadata": {"name": f"{prefix}-old", "namespace": namespace},
            },
        )
        await world.settle()
        await services.history.flush()
        kube.remove(TRAINING_JOBS, f"{prefix}-old", namespace)
        await world.settle()
        await services.history.flush()
        await services.usage_ledger.accept(
            f"gateway-{prefix}",
            [
                UsageRecord(
                    seq=1,
                    key_id=f"{prefix}-key",
                    tenant=tenant,
                    namespace=namespace,
                    service=f"{prefix}-chat",
                    model=f"{prefix}-chat",
                    prompt_tokens=3,
                    completion_tokens=4,
                    request_id="r",
                    finished_at=NOW,
                )
            ],
        )
        await world.token(
            "alice" if prefix == "ada" else "bob", description=f"{prefix}'s laptop", tenant=tenant
        )
        await services.audit.note(
            prefix, "create", "TrainingJob", namespace, f"{prefix}-run", "Done", "", "token"
        )


def aimed(path: str, prefix: str, namespace: str) -> str:
    """A route's path at one tenant's objects."""
    name = f"{prefix}-chat" if "/services" in path or "/modelservices" in path else f"{prefix}-run"
    path = path.replace("{namespace}", namespace).replace("{token_id}", "0" * 16)
    return path.replace("{name:path}", "portal.css").replace("{name}", name)


async def ask(http: httpx2.AsyncClient, method: str, path: str) -> httpx2.Response:
    body = {"kind": "TrainingJob", "metadata": {"name": "x"}, "spec": {"suspend": True}}
    return await http.request(method, path, json=body if method in ("POST", "PATCH", "PUT") else None)


def walk(world: World) -> list[tuple[str, Route]]:
    return [
        (method, route)
        for route in routes(apps_of(world.services)[0])
        for method in sorted(route.methods)
        if not isinstance(permissions(route)[0], Public) and not route.path.endswith("/changes")
    ]


async def test_a_member_of_a_reads_nothing_of_b_in_any_list_or_page(world: World) -> None:
    await lived_in(world)
    alice = await world.as_("alice")
    chance = [token.prefix for token in await world.services.tokens.page(subject="alice")]
    seen = 0
    for method, route in walk(world):
        if method != "GET":
            continue
        path = aimed(route.path, "ada", "ada-lab")
        for suffix in ("", "?by=tenant", "?by=namespace", "?by=service", "?by=model", "?by=key"):
            if suffix and not path.endswith("/usage"):
                continue
            for headers in ({}, {"HX-Request": "true"}):
                answer = await alice.get(path + suffix, headers=headers)
                assert answer.status_code < 500, f"{path}: {answer.text}"
                told = answer.text
                for prefix in chance:  # seven random letters, which may contain a name by chance
                    told = told.replace(prefix, "")
                assert not BOBS.search(told), f"GET {path + suffix} tells: {answer.text[:2000]}"
                seen += answer.status_code == 200
    assert seen > 50


async def test_objects_of_b_answer_exactly_like_objects_that_do_not_exist(world: World) -> None:
    await lived_in(world)
    alice = await world.as_("alice")
    compared = 0
    for method, route in walk(world):
        if "{namespace}" not in route.path:
            continue
        theirs = await ask(alice, method, aimed(route.path, "bob", "bob-lab"))
        absent = await ask(alice, method, aimed(route.path, "nob", "nob-lab"))
        assert theirs.status_code == absent.status_code == 404, (
            f"{method} {route.path}: {theirs.status_code} {absent.status_code}"
        )
        assert theirs.text.replace("bob", "nob") == absent.text, f"{method} {route.path}"
        compared += 1
    assert compared > 30
    assert ("trainingjobs", "bob-lab", "bob-run") in world.kube.objects


async def test_a_stranger_without_a_tenant_sees_empty_lists(world: World) -> None:
    await lived_in(world)
    nobody = await world.as_("nobody")
    for kind in (
        "trainingjobs",
        "modelservices",
        "pools",
        "profiles",
        "nodes",
        "tenants",
        "models",
        "history",
    ):
        assert (await nobody.get(f"{BASE}/{kind}")).json()["items"] == [], kind
    for kind in ("power/domains", "power/nodes"):
        assert (await nobody.get(f"{BASE}/{kind}")).json()["items"] == [], kind
    usage = (await nobody.get(f"{BASE}/usage")).json()
    assert (usage["inference"], usage["compute"]) == ([], [])


async def test_an_admin_sees_both_tenants(world: World) -> None:
    await lived_in(world)
    root = await world.as_("root", CallerRole.ADMIN)
    jobs = {o["metadata"]["name"] for o in (await root.get(f"{BASE}/trainingjobs")).json()["items"]}
    assert jobs == {"ada-run", "bob-run"}
    assert {t["metadata"]["name"] for t in (await root.get(f"{BASE}/tenants")).json()["items"]} == {
        "ada",
        "bob-corp",
    }
    assert {p["metadata"]["name"] for p in (await root.get(f"{BASE}/pools")).json()["items"]} == {
        "cpu",
        "h100",
        "bobs-own",
    }
    assert {row["group"] for row in (await root.get(f"{BASE}/usage")).json()["inference"]} == {
        "ada",
        "bob-corp",
    }


async def test_what_happened_to_power_domains_is_for_admins(world: World) -> None:
    event = {
        "metadata": {"name": "e", "namespace": "default"},
        "type": "Warning",
        "reason": "OverBudget",
        "message": "bobs-own-node-0 draws too much",
        "involvedObject": {"kind": "PowerDomain", "name": "rack-bobs-own"},
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    world.kube.put(EVENTS, event)
    world.kube.put(
        EVENTS,
        {
            **event,
            "metadata": {"name": "f", "namespace": "default"},
            "involvedObject": {"kind": "AcceleratorPool", "name": "h100"},
        },
    )
    alice, root = await world.as_("alice"), await world.as_("root", CallerRole.ADMIN)
    told = (await root.get(f"{BASE}/power/events")).json()["items"]
    assert [(row["object"], row["reason"], row["type"]) for row in told] == [
        ("PowerDomain/rack-bobs-own", "OverBudget", "Warning")
    ]
    assert (await alice.get(f"{BASE}/power/events")).json()["items"] == []
    assert "bobs-own-node-0 draws too much" in (await root.get("/power")).text
    assert "draws too much" not in (await alice.get("/power")).text


async def test_members_see_the_totals_of_feeds_of_nodes_that_they_may_use_and_no_others(world: World) -> None:
    async def names(who: httpx2.AsyncClient, kind: str) -> set[str]:
        return {row["name"] for row in (await who.get(f"{BASE}/power/{kind}")).json()["items"]}

    alice, root = await world.as_("alice"), await world.as_("root", CallerRole.ADMIN)
    assert await names(alice, "domains") == {"row", "rack-cpu", "rack-h100"}
    assert await names(root, "domains") == {"row", "rack-cpu", "rack-h100", "rack-bobs-own"}
    for who, told in ((alice, {""}), (root, {"", "The meter at pdu is away."})):
        rows = (await who.get(f"{BASE}/power/domains")).json()["items"]
        assert {row["meterProblem"] for row in rows} == told
        assert {row["meterError"] for row in rows} == {None, -0.031}
    assert await names(alice, "nodes") == {f"{pool}-node-{i}" for pool in ("cpu", "h100") for i in (0, 1)}
    assert await names(root, "nodes") - await names(alice, "nodes") == {"bobs-own-node-0", "bobs-own-node-1"}
    series = f"{BASE}/power/series"
    for kind, theirs, absent in (
        ("domain", "rack-bobs-own", "rack-nobs-own"),
        ("node", "bobs-own-node-0", "nobs-own-node-0"),
    ):
        found, nothing = [await alice.get(series, params={kind: name}) for name in (theirs, absent)]
        assert found.status_code == nothing.status_code == 404
        assert found.text.replace("bobs", "nobs") == nothing.text
        assert (await root.get(series, params={kind: theirs})).json()["watts"] == [None, 800.0]
    mine = (await alice.get(series, params={"domain": "rack-cpu", "resolution": "minute"})).json()
    assert mine == {
        "name": "rack-cpu",
        "resolution": "minute",
        "periodSeconds": 60,
        "watts": [None, 800.0],
        "leasedWatts": [],
        "forecastWatts": [],
    }
    for wrong in ({}, {"domain": "row", "node": "cpu-node-0"}, {"domain": "row", "resolution": "hour"}):
        assert (await alice.get(series, params=wrong)).status_code == 422, wrong


async def test_members_see_pools_without_the_list_of_who_else_may_use_them(world: World) -> None:
    alice = await world.as_("alice")
    pools = (await alice.get(f"{BASE}/pools")).json()["items"]
    assert {pool["metadata"]["name"] for pool in pools} == {"cpu", "h100"}
    assert all("tenants" not in pool["spec"] for pool in pools)


async def test_members_see_speeds_of_their_own_classes_without_what_they_were_learned_from(
    world: World,
) -> None:
    evidence = [{"tenant": "0123456789abcdef", "accelerator": "cpu", "accelerators": 1, "reports": 3}]
    for name in ("shared", "bobs-own"):
        at = {"accelerators": 1, "tokensPerSecond": 10, "source": "Measured", "reports": 3, "quarantined": 1}
        cells = [{"accelerator": kind, **at} for kind in ("cpu", "L4")]
        world.kube.put(
            PERFORMANCE_PROFILES,
            {
                "metadata": {"name": name, "labels": {"a": "b"}},
                "spec": {"workloadClass": name, "cells": [{"accelerator": "L4", "accelerators": 1, "tokensPerSecond": 9}]},
                "status": {
                    "cells": cells, "evidence": evidence, "conduct": [{"tenant": "x", "failed": 1}],
                    "held": {"measured": 1}, "quarantined": 2, "counted": {"runs": ["a-1"]},
                },
            },
        )  # fmt: skip
    world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", phase="Queued", workloadClass="shared")
    world.kube.status(TRAINING_JOBS, "bob-lab", "bob-run", phase="Queued", workloadClass="bobs-own")
    await world.settle()
    alice = await world.as_("alice")
    (mine,) = (await alice.get(f"{BASE}/profiles")).json()["items"]
    assert mine["spec"] == {"workloadClass": "shared", "cells": []}
    assert mine["status"] == {
        "places": 1,
        "measured": 1,
        "conditions": [],
        "cells": [
            {
                "accelerator": "cpu",
                "accelerators": 1,
                "tokensPerSecond": 10,
                "source": "Measured",
                "reports": 3,
            }
        ],
    }
    assert "labels" not in mine["metadata"]
    page = (await alice.get("/pools", headers={"HX-Request": "true"})).text
    assert "shared" in page
    assert "bobs-own" not in page
    assert "not believed" not in page
    root = await world.as_("root", CallerRole.ADMIN)
    both = (await root.get(f"{BASE}/profiles")).json()["items"]
    assert [p["spec"]["workloadClass"] for p in both] == ["bobs-own", "shared"]
    assert both[0]["status"]["evidence"] == evidence
    assert "1 not believed" in (await root.get("/pools")).text


@pytest.mark.parametrize(("who", "members_shown"), [("alice", False), ("vera", False), ("adam", True)])
async def test_only_a_tenants_admin_reads_its_member_list(
    world: World, who: str, members_shown: bool
) -> None:
    http = await world.as_(who)
    (own,) = (await http.get(f"{BASE}/tenants")).json()["items"]
    assert own["metadata"]["name"] == "ada"
    assert ("members" in own["spec"]) is members_shown


async def test_a_viewer_reads_and_may_not_write(world: World) -> None:
    vera = await world.as_("vera")
    at = f"{BASE}/namespaces/ada-lab/trainingjobs"
    assert (await vera.get(f"{at}/ada-run")).status_code == 200
    assert (await vera.get(f"{at}/ada-run/logs")).text == "ada step 1\nada step 2\n"
    for method, path in (
        ("POST", at),
        ("PATCH", f"{at}/ada-run"),
        ("DELETE", f"{at}/ada-run"),
        ("POST", f"{at}/ada-run/cancel"),
    ):
        answer = await ask(vera, method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "Forbidden"), path


async def test_a_removed_member_is_out_when_the_remembered_yes_ends(world: World) -> None:
    alice = await world.as_("alice")
    path = f"{BASE}/namespaces/ada-lab/trainingjobs/ada-run"
    assert (await alice.get(path)).status_code == 200
    tenant = world.kube.objects["tenants", "", "ada"]
    tenant["spec"]["members"] = [m for m in tenant["spec"]["members"] if m["subject"]["name"] != "alice"]
    reviews = len(world.kube.reviews)
    assert (await alice.get(path)).status_code == 200
    assert len(world.kube.reviews) == reviews, "a yes is remembered"
    cache = world.services.authorizer._reviews._access
    cache.clock = lambda: __import__("time").monotonic() + 61
    assert (await alice.get(path)).status_code == 404


async def test_lists_ask_kubernetes_once_however_many_namespaces_there_are(world: World) -> None:
    alice = await world.as_("alice")
    before = len(world.kube.reviews)
    await alice.get(f"{BASE}/trainingjobs")
    await alice.get(f"{BASE}/trainingjobs")
    asked = world.kube.reviews[before:]
    assert [a["resourceAttributes"].get("namespace") for a in asked] == [None]


@pytest.mark.parametrize(
    "name",
    ["%3F", "x%3Flimit=1", "%2E%2E", "a,b", "x%23y", "x%20y", "A", "x%00", "%E2%80%AE", "x" * 254],
)
async def test_a_name_that_cannot_be_one_never_reaches_kubernetes(world: World, name: str) -> None:
    root = await world.as_("root", CallerRole.ADMIN)
    asked: list[str] = []
    world.kube._answering = asked.append  # type: ignore[method-assign, assignment]
    for path in (
        f"/namespaces/ada-lab/trainingjobs/{name}",
        f"/namespaces/{name}/trainingjobs",
        f"/namespaces/ada-lab/trainingjobs/{name}/logs",
    ):
        for method in ("GET", "DELETE"):
            answer = await root.request(method, BASE + path)
            assert answer.status_code in (404, 405), f"{method} {path}: {answer.status_code}"
    assert [call for call in asked if "accessreview" not in call] == []
