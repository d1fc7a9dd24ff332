"""The client's guard: it stops a write before it begins or is sent, and ends one that would outlast it."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from busbar.kube.client import KubeClient
from busbar.kube.errors import ConnectionFailed
from busbar.kube.login import Login


class Closed(Exception):
    pass


async def test_a_write_begins_and_ends_as_the_guard_allows_and_a_read_does_not_ask_it() -> None:
    met: list[str] = []
    allowed: list[float] = [0.5, 0.5]  # seconds, in which a busy machine makes the connection

    async def hang(request: web.Request) -> web.Response:
        met.append(request.method)
        if request.method == "GET":
            return web.json_response({"kind": "Pod"})
        await asyncio.sleep(60)
        return web.json_response({})

    def guard() -> float:
        if not allowed:
            raise Closed
        return allowed.pop()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hang)
    async with TestServer(app, host="127.0.0.1") as server:
        login = Login(server=str(server.make_url("")).rstrip("/"))
        client = KubeClient(login, guard=guard)
        async with asyncio.timeout(10):  # the client's own limit is 15 s
            with pytest.raises(ConnectionFailed):
                await client.call("PATCH", "/api/v1/pods/p", body={})
        with pytest.raises(Closed):
            await client.call("PATCH", "/api/v1/pods/p", body={})
        assert await client.call("GET", "/api/v1/pods/p") == {"kind": "Pod"}
        await client.close()
    assert met == ["PATCH", "GET"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_nothing_is_sent_where_the_guard_closes_after_the_write_has_begun(method: str) -> None:
    """As in a process that is frozen between the look at its lease and the first byte."""
    met: list[str] = []
    looks: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        met.append(request.method)
        return web.json_response({})

    def guard() -> float:
        looks.append(1)
        if len(looks) == 2:
            raise Closed
        return 10.0

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as server:
        client = KubeClient(Login(server=str(server.make_url("")).rstrip("/")), guard=guard)
        with pytest.raises(Closed):
            await client.call(method, "/api/v1/pods/p", body={"spec": {}})
        assert met == []
        await client.call(method, "/api/v1/pods/p", body={"spec": {}})
        await client.close()
    assert met == [method]
