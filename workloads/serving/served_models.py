"""The model names a replica answers to: its own, and those of its adapters; loading and unloading adapters over HTTP.

An adapter is asked for as `model:adapter`, with any name of the model, or by its own name alone, unless the model has
that name. A name that is not known is the same 404, whatever it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from busbar.kube.contracts.workload import AdapterReport
from busbar.kube.documents import shown
from busbar.workloads.serving.adapters import Adapter, AdapterStore
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import AdapterInvalid, BadRequest, NotFound, SettingsError
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.openai_fields import known_fields
from busbar.workloads.serving.settings import AdapterSource, ServerSettings

log = logging.getLogger(__name__)
MOST_REPORTED, MOST_MESSAGE = 64, 300
"""Adapters, and characters of each one's message, in the status, which must stay short."""
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ServedModels:
    """Names, and what they stand for."""

    def __init__(self, settings: ServerSettings, engine: Engine, started: int) -> None:
        self._settings = settings
        self._engine = engine
        self._started = started
        self._reading = asyncio.Lock()

    def adapter_name(self, model: str) -> str | None:
        """The adapter that a request for `model` means; None: the model alone. Raises NotFound."""
        names = (self._settings.model_id, *self._settings.aliases)
        if model in names:
            return None
        before = next((name for name in names if model.startswith(f"{name}:")), None)
        adapter = model if before is None else model[len(before) + 1 :]
        if self._engine.loaded is None or adapter not in self._engine.loaded.adapters:
            raise NotFound(
                f"the model {shown(model)} is not served here; this replica serves {self._settings.model_id!r}",
                param="model",
            )
        return adapter

    @asynccontextmanager
    async def chosen(self, model: str) -> AsyncIterator[Adapter | None]:
        """The adapter for a request, in memory and held; None: the model alone. Raises NotFound, or Overloaded."""
        name, loaded = self.adapter_name(model), self._engine.loaded
        if name is None or loaded is None:
            yield None
            return
        adapter = loaded.adapters.held(name) or await self._read_again(loaded.adapters, name)
        try:
            yield adapter
        finally:
            adapter.release()

    async def _read_again(self, adapters: AdapterStore, name: str) -> Adapter:
        """An adapter that is known but not in memory, held. Raises NotFound, or Overloaded."""
        async with self._reading:  # so that waiting takes no thread, and no other one evicts it at once
            try:
                await asyncio.to_thread(adapters.bring, name)
            except AdapterInvalid as error:
                log.error("adapter %s cannot be read again: %s", name, error)
            adapter = adapters.held(name)
        if adapter is None:
            raise NotFound(f"the adapter {name!r} is gone: removed, or changed on disk", param="model")
        return adapter

    def cards(self) -> list[Mapping[str, object]]:
        """/v1/models: the model, then its adapters."""
        loaded = self._engine.loaded
        return [self.card(None), *map(self.card, loaded.adapters.names if loaded else [])]

    def card(self, adapter: str | None) -> Mapping[str, object]:
        model, loaded = self._settings.model_id, self._engine.loaded
        return {
            "id": model if adapter is None else f"{model}:{adapter}",
            "object": "model",
            "created": self._started,
            "owned_by": "busbar",
            "root": model,
            "parent": None if adapter is None else model,
            "max_model_len": loaded.core.max_model_len if loaded else None,
        }

    def reports(self, loaded: Loaded) -> list[AdapterReport]:
        """What the operator reads of adapters."""
        resident, names = set(loaded.adapters.resident), loaded.adapters.names
        served = [AdapterReport(name=name, in_memory=name in resident) for name in names]
        refused = [
            AdapterReport(name=name, message=message[:MOST_MESSAGE])
            for name, message in loaded.refused_adapters.items()
            if name not in names
        ]
        return [*refused, *served][:MOST_REPORTED]

    def tell_metrics(self, core: EngineCore, now: float) -> None:
        """Which adapters are in use now."""
        scheduler = core.scheduler
        running, waiting = (
            [s.adapter.name for s in list(each) if s.adapter is not None]
            for each in (scheduler.running, scheduler.waiting)
        )
        core.metrics.lora_info(scheduler.limits.max_running, running, waiting, now)

    async def load(self, body: object) -> Mapping[str, object]:
        """Adds an adapter from below the folder for that. Raises BadRequest, or Overloaded."""
        fields = known_fields(body, {"lora_name", "lora_path"})
        name, path = (_text(fields, key) for key in ("lora_name", "lora_path"))
        if self._engine.loaded is None:
            raise self._engine.unavailable()
        root = self._settings.engine.adapter_root
        if root is None:
            raise BadRequest("no adapter can be loaded over HTTP: this server has no --adapter-root")
        try:
            source = AdapterSource(name, _below(root, path))
        except SettingsError as error:
            raise BadRequest(str(error), param="lora_name") from error
        try:
            async with self._reading:
                await asyncio.to_thread(self._engine.loaded.adapters.add, source)
        except AdapterInvalid as error:
            raise BadRequest(str(error), param="lora_path") from error
        log.info("adapter %s is loaded", name)
        return {"id": self.card(name)["id"], "loaded": True}

    async def unload(self, body: object) -> Mapping[str, object]:
        """Forgets an adapter; requests that run with it end as usual. Raises NotFound."""
        name = _text(known_fields(body, {"lora_name"}), "lora_name")
        if self._engine.loaded is None:
            raise self._engine.unavailable()
        if not await asyncio.to_thread(self._engine.loaded.adapters.remove, name):
            raise NotFound(f"no adapter has the name {shown(name)}", param="lora_name")
        log.info("adapter %s is unloaded", name)
        return {"id": self.card(name)["id"], "loaded": False}

    async def put(self, loaded: Loaded, source: AdapterSource) -> None:
        """Serves an adapter, in place of one that has its name. Raises AdapterInvalid, or Overloaded."""
        async with self._reading:
            await asyncio.to_thread(loaded.adapters.put, source)
        log.info("adapter %s is loaded", source.name)


def _text(fields: Mapping[str, object], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadRequest(f"{key} must be a text, not {shown(value)}", param=key)
    return value


def _below(root: Path, path: str) -> Path:
    """`path`, absolute or relative to `root`; it must lie below the root, also behind links."""
    try:
        found = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, half a character
        raise BadRequest(f"{shown(path)} is no path: {error}", param="lora_path") from error
    if not found.is_relative_to(root.resolve()):
        raise BadRequest(f"{shown(path)} leads out of the folder for adapters", param="lora_path")
    return found
