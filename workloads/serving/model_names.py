"""The names that requests may give the model of a replica; all others are those of adapters, which the engine knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from busbar.workloads.serving.engine_link import ChosenAdapter, EngineLink
from busbar.workloads.serving.settings import ServerSettings


class ModelNames:
    """As the front answers for them."""

    def __init__(self, settings: ServerSettings, link: EngineLink) -> None:
        self._names = frozenset((settings.model_id, *settings.aliases))
        self._link = link

    async def check(self, model: str) -> None:
        """Raises NotFound for a name that nothing has."""
        if model not in self._names:
            await self._link.call("model", {"model": model})

    @asynccontextmanager
    async def chosen(self, model: str) -> AsyncIterator[ChosenAdapter | None]:
        """The adapter for a request, in memory and held; None: the model alone. Raises NotFound, or Overloaded."""
        if model in self._names:
            yield None
            return
        async with self._link.adapter(model) as adapter:
            yield adapter
