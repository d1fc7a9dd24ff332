"""vLLM's routes for sleep: POST /sleep?level=1|2, POST /wake_up, GET /is_sleeping. They answer when it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp import web

from busbar.kube.documents import shown
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.sleeping import SleepLevel

log = logging.getLogger(__name__)
LEVELS = {str(level.value): level for level in SleepLevel if level}


class SleepRoutes:
    """Those of one server."""

    def __init__(self, engine: Engine, check_quiet: Callable[[], None]) -> None:
        """`check_quiet` raises where the replica may not sleep."""
        self._engine = engine
        self._check_quiet = check_quiet

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
        ]

    async def sleep(self, request: web.Request) -> web.Response:
        _only(request, "level")
        level = LEVELS.get(request.query.get("level", "1"))
        if level is None:
            raise BadRequest(f"level must be 1 or 2, not {shown(request.query['level'])}", param="level")
        self._check_quiet()
        await self._engine.sleep(level)
        log.info("asleep at level %d", level)
        return web.json_response({"is_sleeping": True, "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        _only(request)
        began = time.monotonic()
        await self._engine.wake_up()
        log.info("awake after %.3f s", time.monotonic() - began)
        return web.json_response({"is_sleeping": False})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._engine.sleep_level > 0})


def _only(request: web.Request, *known: str) -> None:
    """Raises BadRequest for another parameter; vLLM's `tags` would wake a part."""
    other = next((name for name in request.query if name not in known), None)
    if other is not None:
        raise BadRequest(f"{request.path} has no parameter {shown(other)}", param=other[:80])
