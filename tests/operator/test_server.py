"""The internal port, the routes stream, and what is open: health and metrics."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from tests.operator.builders import RENDERING, SETTINGS, replica, service

from busbar.kube.client import KubeClient
from busbar.kube.contracts.bearers import Role, bearer_for, former_bearer_for
from busbar.kube.contracts.power_view import NodePower, PowerPicture, PowerSeries, Resolution
from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.contracts.routes import Routes
from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.contracts.service_series import SeriesSpan, ServiceSeries
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.operator.errors import Busy, PreviewFailed
from busbar.operator.metrics import Metrics
from busbar.operator.scheduling.snapshot import Draft
from busbar.operator.server import RoutesFeed, Server
from busbar.operator.serving.routes import build_routes
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Node
from busbar.scheduler import Node as SNode
from busbar.scheduler import Pool, Resources, Snapshot

LOOPBACK = Node("node-0", (), (), 0, 0, 0, (), True, ("127.0.0.0/8",))


class Reviewing:
    """Answers TokenReviews: a token is its user's name."""

    async def call(self, method: str, path: str, *, body: Mapping[str, Any]) -> dict[str, Any]:
        token = body["spec"]["token"]
        known = token != "stranger"
        return {
            "status": {"authenticated": known, "audiences": ["busbar-operator"], "user": {"username": token}}
        }


async def preview(draft: Draft, admin: bool) -> PreviewAnswer:
    if draft.metadata.name == "busy":
        raise Busy("others are asking")
    if draft.metadata.name == "slow":
        raise PreviewFailed("it took too long")
    return PreviewAnswer(
        starts_now=True, possible=True, reason="There is room.", when="Now", nodes=("n",) if admin else ()
    )


async def plan(asked: ServicePlanRequest) -> ServicePlanAnswer:
    if asked.name == "busy":
        raise Busy("others are asking")
    return ServicePlanAnswer(possible=True, reason=f"{asked.name} has enough.", rate=asked.rate)


def series(key: Key, span: SeriesSpan) -> ServiceSeries:
    return ServiceSeries(
        namespace=key.namespace,
        name=key.name,
        span=span,
        begins=datetime(2026, 11, 29, tzinfo=UTC),
        percentile=99.0,
        requests_per_second=(None, 2.5),
    )


SNAPSHOT = Snapshot(
    pools=(Pool("l4", "L4", "nvidia.com/gpu"),), nodes=(SNode("node-0", "l4", Resources(8000, 8000, 64000)),)
)


class Drawn:
    """Says what it was asked."""

    def picture(self) -> PowerPicture:
        return PowerPicture(nodes=(NodePower(name="node-0"),))

    def series(self, feed: str, node: str, resolution: Resolution) -> PowerSeries:
        return PowerSeries(name=feed or node, resolution=resolution, watts=(1.0, None))


@asynccontextmanager
async def server(
    feed: RoutesFeed, *, leads: bool = True, asked: bool = True
) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    settings = replace(
        SETTINGS, namespace="busbar-system", internal_host="127.0.0.1", internal_port=0, metrics_port=0
    )
    client: Any = Reviewing()
    made = Server(
        settings,
        client,
        Metrics(),
        feed,
        lambda: SNAPSHOT,
        preview,
        plan,
        series,
        Drawn(),
        list,
        lambda: leads,
        lambda: asked,
    )
    await made.start()
    async with aiohttp.ClientSession() as session:
        yield made, session
    await made.stop()


API = {"Authorization": "Bearer system:serviceaccount:busbar-system:busbar-api"}


@pytest.mark.parametrize(
    "path",
    [
        "/snapshot",
        "/nodes",
        "/routes",
        "/preview",
        "/service-plan",
        "/service-series",
        "/power",
        "/power/series",
    ],
)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer stranger"}, 401),
        ({"Authorization": "Bearer system:serviceaccount:team:default"}, 403),
        ({"Authorization": "Bearer system:serviceaccount:other:busbar-api"}, 403),
    ],
)
async def test_the_internal_port_is_for_our_own_processes(
    path: str, headers: dict[str, str], status: int
) -> None:
    feed = RoutesFeed(lambda revision: Routes(revision=revision))
    feed.refresh()
    async with (
        server(feed) as (made, session),
        session.get(f"http://127.0.0.1:{made.ports['internal']}{path}", headers=headers) as response,
    ):
        assert response.status == status


async def test_a_plan_of_a_service_is_answered_and_a_wrong_load_is_named() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/service-plan"
        asked: dict[str, Any] = {"namespace": "team", "name": "web", "rate": 40}
        async with session.post(url, json=asked, headers=API) as response:
            assert (await response.json())["reason"] == "web has enough."
        async with session.post(url, json=asked | {"name": "busy"}, headers=API) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "Busy")
        for wrong, field in (({"rate": 0}, "rate"), ({"ttftMilliseconds": -1}, "ttftMilliseconds")):
            async with session.post(url, json=asked | wrong, headers=API) as response:
                assert response.status == 422
                assert field in (await response.json())["error"]["message"]


async def test_the_series_of_a_service_are_told_with_their_gaps_and_a_wrong_span_is_named() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/service-series?namespace=team&name=web"
        async with session.get(f"{url}&span=24h", headers=API) as response:
            found = await response.json()
        assert (found["name"], found["span"], found["requestsPerSecond"]) == ("web", "24h", [None, 2.5])
        async with session.get(f"{url}&span=1w", headers=API) as response:
            assert response.status == 400
            assert "1h or 24h" in (await response.json())["error"]["message"]


async def test_a_preview_is_answered_for_who_asks_and_a_wrong_draft_is_named_by_its_field() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/preview"
        draft: dict[str, Any] = {
            "kind": "TrainingJob", "metadata": {"name": "d"}, "spec": {"template": {"image": "i"}},
        }  # fmt: skip
        for admin, nodes in ((False, []), (True, ["n"])):
            async with session.post(url, json={"object": draft, "admin": admin}, headers=API) as response:
                found = await response.json()
                assert (found["startsNow"], found["nodes"]) == (True, nodes)
        async with session.post(url, json={"object": draft}, headers=API) as response:
            assert (await response.json())["nodes"] == []
        for name, code in (("busy", "Busy"), ("slow", "PreviewFailed")):
            draft["metadata"] = {"name": name}
            async with session.post(url, json={"object": draft}, headers=API) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, code)
        draft["spec"] = {"template": {"image": "i"}, "priority": 5000}
        async with session.post(url, json={"object": draft}, headers=API) as response:
            assert response.status == 422
            assert (await response.json())["error"]["field"] == "spec.priority"
        for body in (b"[]", b"{", b"[" * 10_000, b'{"object": 1}'):
            async with session.post(url, data=body, headers=API) as response:
                assert response.status == 400
        async with session.post(url, data=io.BytesIO(b"x" * (2**20 + 1)), headers=API) as response:
            assert response.status == 413


async def test_power_is_told_with_its_gaps() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/power"
        async with session.get(url, headers=API) as response:
            assert (await response.json())["nodes"][0]["name"] == "node-0"
        async with session.get(f"{url}/series?node=n&resolution=minute", headers=API) as response:
            found = await response.json()
            assert found == {
                "name": "n",
                "resolution": "minute",
                "watts": [1.0, None],
                "leased": [],
                "forecast": [],
            }
        async with session.get(f"{url}/series?node=n&resolution=hour", headers=API) as response:
            assert response.status == 400


async def test_the_load_of_nodes_is_one_small_answer() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/nodes"
        async with session.get(url, headers=API) as response:
            assert (await response.json())["nodes"] == [
                {
                    "name": "node-0", "pool": "l4", "accelerator": "L4", "ready": True,
                    "capacity": 8.0, "allocated": 0.0,
                }
            ]  # fmt: skip


async def test_routes_are_sent_whole_and_again_when_they_change() -> None:
    documents = [Routes(revision=0), Routes.model_validate({"revision": 0, "services": [_route()]})]
    feed = RoutesFeed(lambda revision: documents[0].model_copy(update={"revision": revision}))
    feed.refresh()
    async with server(feed) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/routes"
        async with session.get(url, headers=API) as response:
            first = Routes.model_validate_json(await response.content.readline())
            feed.refresh()  # nothing new: no line
            documents.pop(0)
            feed.refresh()
            second = Routes.model_validate_json(await response.content.readline())
    assert (first.revision, first.services) == (1, [])
    assert second.revision == 2
    assert second.services[0].key == "team/web"


def test_routes_carry_the_bearer_for_inference_and_a_former_pods_own() -> None:
    caches = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    of = service()
    caches.services.observe(of.model_dump(mode="json", by_alias=True, exclude_none=True))
    for made in (replica(0), replica(1, bearers="")):
        caches.pods.items[made.key] = made
        caches._pod_changed(made.key, None, made)
    key, uid = RENDERING.workload_key, of.metadata.uid
    [route] = build_routes(caches, [key], 1, ("10.0.0.0/8",)).services
    assert route.bearer == bearer_for(key, uid, Role.INFER)
    assert [e.bearer for e in route.endpoints] == [None, former_bearer_for(key, uid)]
    assert route.bearer not in repr(route)


def reading(context: int | None) -> ServingStatus:
    if context is None:
        return ServingStatus(ready=True)
    return ServingStatus.model_validate(
        {"ready": True, "report": {"class": "c", "accelerator": "l4", "maxModelLen": context}}
    )


@pytest.mark.parametrize(
    ("spec", "reports", "expected"),
    [
        ({}, [None, None], None),
        ({"maxModelLen": 4096}, [None, None], 4096),
        ({"maxModelLen": 4096}, [2048, None], 2048),
        ({}, [4096, 2048], 2048),
        ({}, [4096, 0], 4096),
        ({"maxModelLen": 4096, "args": ["--max-model-len=64"]}, [None, None], None),
        ({"maxModelLen": 4096, "args": ["--seed", "1"]}, [None, None], 4096),
    ],
)
def test_routes_carry_the_context_that_every_replica_takes(
    spec: dict[str, Any], reports: list[int | None], expected: int | None
) -> None:
    caches = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    caches.services.observe(service(**spec).model_dump(mode="json", by_alias=True, exclude_none=True))
    pods = [replica(index) for index in range(len(reports))]
    leaving = replace(replica(len(pods)), deleting=True)
    starting = replace(replica(len(pods) + 1), ready=False)
    for made in (*pods, leaving, starting):
        caches.pods.items[made.key] = made
        caches._pod_changed(made.key, None, made)
    readings = {pod.uid: reading(report) for pod, report in zip(pods, reports, strict=True)}
    readings |= {leaving.uid: reading(16), starting.uid: reading(16)}
    [route] = build_routes(caches, [RENDERING.workload_key], 1, ("10.0.0.0/8",), readings).services
    assert route.max_model_len == expected


def _route() -> dict[str, Any]:
    return {"tenant": "t", "namespace": "team", "name": "web", "uid": "u", "modelId": "web", "bearer": "b"}


async def test_nothing_is_streamed_before_everything_was_seen() -> None:
    feed = RoutesFeed(lambda revision: Routes(revision=revision))
    async with server(feed) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/routes"
        async with session.get(url, headers=API) as response:
            feed.refresh()
            assert Routes.model_validate_json(await response.content.readline()).revision == 1


@pytest.mark.parametrize("path", ["/snapshot", "/nodes", "/routes", "/power"])
async def test_a_standby_is_ready_and_answers_nobody(path: str) -> None:
    feed = RoutesFeed(lambda revision: Routes(revision=revision))
    async with server(feed, leads=False) as (made, session):
        async with session.get(f"http://127.0.0.1:{made.ports['internal']}{path}", headers=API) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "NotReady")
        async with session.get(f"http://127.0.0.1:{made.ports['metrics']}/ready") as response:
            assert response.status == 200


async def test_a_process_that_has_never_reached_the_api_server_is_not_ready() -> None:
    feed = RoutesFeed(lambda revision: Routes(revision=revision))
    async with (
        server(feed, leads=False, asked=False) as (made, session),
        session.get(f"http://127.0.0.1:{made.ports['metrics']}/ready") as response,
    ):
        assert response.status == 503


async def test_metrics_and_health_are_open() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        base = f"http://127.0.0.1:{made.ports['metrics']}"
        async with session.get(f"{base}/metrics") as response:
            assert "busbar_lease_held" in await response.text()
        async with session.get(f"{base}/healthz") as response:
            assert response.status == 200
