"""POST /adapters: other adapters of the service's spec, while requests run.

The operator sends all adapters of the spec whenever they are others than those that this replica was asked for last
(`ServingStatus.adapters_asked`). The answer comes at once; then those that are not named are forgotten, and new ones
read, one after another. One whose address is another is replaced under its name. Requests end with the adapter with
which they began. What is refused is not served, and /status says why, as after a start; each further request to serve
others tries it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web
from pydantic import ValidationError

from busbar.kube.contracts.adapters import ADAPTERS_PATH, AskedAdapters
from busbar.kube.contracts.workload import ServingStatus
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import AdapterInvalid, BadRequest, Overloaded, SettingsError
from busbar.workloads.serving.http_request import read_json
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.served_models import ServedModels
from busbar.workloads.serving.settings import AdapterSource, SpecAdapters

log = logging.getLogger(__name__)
AGAIN_S = 2.0
"""After so long an adapter is tried again for which running requests left no memory."""


class AdapterRoute:
    """Of one server: what it was asked for, and the task that serves that."""

    def __init__(self, engine: Engine, spec: SpecAdapters | None, models: ServedModels) -> None:
        self._engine = engine
        self._spec = spec
        self._models = models
        self._digest = spec.asked.digest if spec is not None else None
        self._wanted: Mapping[str, AdapterSource] = {}
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[web.RouteDef]:
        return [web.post(ADAPTERS_PATH, self.change)]

    def told(self, status: ServingStatus) -> ServingStatus:
        """With what this replica was asked for."""
        return status.model_copy(update={"adapters_asked": self._digest})

    async def change(self, request: web.Request) -> web.Response:
        if self._spec is None:
            raise BadRequest(
                "this server has no ModelService whose adapters may change; use /v1/load_lora_adapter"
            )
        asked = _asked(await read_json(request))
        try:
            wanted = {source.name: source for source in self._spec.sources(asked)}
        except SettingsError as error:
            raise BadRequest(str(error), param="adapters") from error
        loaded = self._engine.loaded
        if loaded is None or self._engine.sleep_level:
            raise self._engine.unavailable()
        if asked.digest != self._digest:
            self._digest, self._wanted = asked.digest, wanted
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._follow(loaded))
        return web.json_response({"adapters": len(wanted)})

    async def stop(self, _: web.Application) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self, loaded: Loaded) -> None:
        """Until what is served, or refused, is what was asked for last."""
        done: Mapping[str, AdapterSource] | None = None
        while done is not self._wanted:
            wanted = self._wanted
            for name in [name for name in loaded.adapters.names if name not in wanted]:
                await asyncio.to_thread(loaded.adapters.remove, name)
                log.info("adapter %s is unloaded", name)
            for name in [name for name in loaded.refused_adapters if name not in wanted]:
                del loaded.refused_adapters[name]
            served = loaded.adapters.sources
            for source in wanted.values():
                if served.get(source.name) != source:
                    await self._serve(loaded, source, wanted)
            done = wanted

    async def _serve(
        self, loaded: Loaded, source: AdapterSource, wanted: Mapping[str, AdapterSource]
    ) -> None:
        while wanted is self._wanted:
            try:
                await self._models.put(loaded, source)
            except Overloaded:
                await asyncio.sleep(AGAIN_S)
                continue
            except AdapterInvalid as error:
                log.error("adapter %s is not served: %s", source.name, error)
                loaded.refused_adapters[source.name] = str(error)
                await asyncio.to_thread(loaded.adapters.remove, source.name)
            else:
                loaded.refused_adapters.pop(source.name, None)
            return


def _asked(body: object) -> AskedAdapters:
    try:
        return AskedAdapters.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f'{where}: {first["msg"]}; send {{"adapters": [{{"name", "uri"}}]}}') from error
