"""Requests about the engine: the front passes them on to the engine's process, and its answers back, byte by byte."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from busbar.kube.contracts.adapters import ADAPTERS_PATH
from busbar.kube.contracts.workload import KV_SHARES_PATH, MIGRATE_PATH
from busbar.workloads.serving.engine_link import GONE, EngineLink
from busbar.workloads.serving.engine_routes import SECRET_HEADER
from busbar.workloads.serving.errors import EngineFailed
from busbar.workloads.serving.served_models import LOAD_PATH, UNLOAD_PATH

GET = ("/metrics", "/v1/models", "/v1/models/{id:.+}", "/is_sleeping")
POST = (
    *("/wake_up", LOAD_PATH, UNLOAD_PATH, ADAPTERS_PATH, KV_SHARES_PATH, MIGRATE_PATH),
    *(f"{MIGRATE_PATH}/{part}" for part in ("begin", "blocks", "commit", "abort")),
)
SENT = ("Content-Type", "Content-Length")
"""Headers that matter to the engine's routes."""
KEPT = ("Content-Type", "Retry-After", "Allow")


class EnginePassage:
    """To the routes of one engine."""

    def __init__(self, path: str, secret: str, link: EngineLink) -> None:
        """`path`: of the socket on which the engine's process answers."""
        self._path = path
        self._secret = secret
        self._link = link
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.get(path, self.hand_on) for path in GET),
            *(web.post(path, self.hand_on) for path in POST),
        ]

    async def hand_on(self, request: web.Request) -> web.StreamResponse:
        """The engine's answer. Where it is given, the link has heard of what the request has changed."""
        if self._session is None:
            connector = aiohttp.UnixConnector(self._path, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        url = f"http://engine{request.rel_url.raw_path_qs}"
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        headers[SECRET_HEADER] = self._secret
        body = request.content if request.can_read_body else None
        try:
            async with self._session.request(request.method, url, headers=headers, data=body) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(GONE) from error
        await self._link.call("sync")
        kept = {name: answer.headers[name] for name in KEPT if name in answer.headers}
        return web.Response(body=content, status=answer.status, headers=kept)

    async def close(self, _: web.Application) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
