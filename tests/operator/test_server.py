"""The internal port, the routes stream, and what is open: health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.operator.builders import SETTINGS

from busbar.kube.contracts.forecast import ForecastAnswer
from busbar.kube.contracts.routes import Routes
from busbar.operator.errors import Busy
from busbar.operator.metrics import Metrics
from busbar.operator.pods import Node
from busbar.operator.server import Draft, RoutesFeed, Server
from busbar.scheduler import Snapshot

LOOPBACK = Node("node-0", (), (), 0, 0, 0, (), True, ("127.0.0.0/8",))


class Reviewing:
    """Answers TokenReviews: a token is its user's name."""

    async def call(self, method: str, path: str, *, body: Mapping[str, Any]) -> dict[str, Any]:
        token = body["spec"]["token"]
        known = token != "stranger"
        return {
            "status": {"authenticated": known, "audiences": ["busbar-operator"], "user": {"username": token}}
        }


async def forecast(draft: Draft) -> ForecastAnswer:
    if draft.metadata.name == "busy":
        raise Busy("others are asking")
    return ForecastAnswer(start_p50_seconds=60, start_p90_seconds=120, ended_jobs=7)


@asynccontextmanager
async def server(feed: RoutesFeed) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    settings = replace(
        SETTINGS, namespace="busbar-system", internal_host="127.0.0.1", internal_port=0, metrics_port=0
    )
    client: Any = Reviewing()
    made = Server(
        settings,
        client,
        Metrics(),
        feed,
        lambda draft: Snapshot(version=1 if draft else 0),
        forecast,
        list,
        lambda: True,
    )
    await made.start()
    async with aiohttp.ClientSession() as session:
        yield made, session
    await made.stop()


API = {"Authorization": "Bearer system:serviceaccount:busbar-system:busbar-api"}


@pytest.mark.parametrize("path", ["/snapshot", "/routes", "/forecast"])
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


async def test_a_draft_is_added_and_a_wrong_one_is_named_by_its_field() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/snapshot"
        draft = {"kind": "TrainingJob", "metadata": {"name": "d"}, "spec": {"template": {"image": "i"}}}
        async with session.post(url, json={"object": draft}, headers=API) as response:
            assert (await response.json())["version"] == 1
        draft["spec"] = {"template": {"image": "i"}, "priority": 5000}
        async with session.post(url, json={"object": draft}, headers=API) as response:
            assert response.status == 422
            assert (await response.json())["error"]["field"] == "spec.priority"
        async with session.post(url, data=b"[]", headers=API) as response:
            assert response.status == 400


async def test_a_forecast_is_answered_and_too_many_at_once_are_told_to_come_back() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/forecast"
        draft = {"kind": "TrainingJob", "metadata": {"name": "d"}, "spec": {"template": {"image": "i"}}}
        async with session.post(url, json={"object": draft}, headers=API) as response:
            assert await response.json() == {
                "startP50Seconds": 60.0, "startP90Seconds": 120.0, "endedJobs": 7, "promises": 0,
            }  # fmt: skip
        draft["metadata"] = {"name": "busy"}
        async with session.post(url, json={"object": draft}, headers=API) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "Busy")
        async with session.post(url, data=b"[]", headers=API) as response:
            assert response.status == 400


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


def _route() -> dict[str, Any]:
    return {"tenant": "t", "namespace": "team", "name": "web", "uid": "u", "modelId": "web", "bearer": "b"}


async def test_nothing_is_streamed_before_everything_was_seen() -> None:
    feed = RoutesFeed(lambda revision: Routes(revision=revision))
    async with server(feed) as (made, session):
        url = f"http://127.0.0.1:{made.ports['internal']}/routes"
        async with session.get(url, headers=API) as response:
            feed.refresh()
            assert Routes.model_validate_json(await response.content.readline()).revision == 1


async def test_metrics_and_health_are_open() -> None:
    async with server(RoutesFeed(lambda revision: Routes(revision=revision))) as (made, session):
        base = f"http://127.0.0.1:{made.ports['metrics']}"
        async with session.get(f"{base}/metrics") as response:
            assert "busbar_lease_held" in await response.text()
        async with session.get(f"{base}/healthz") as response:
            assert response.status == 200
