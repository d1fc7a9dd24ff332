"""Keeps the services' load over time over restarts of the operator, in a fixed number of objects.

A service is in one of them, by its uid. Each is written at most once in `Settings.series_period_s`, one after the other within
that time, and not at all while nothing is counted of its services; and once more when the operator stops. Of one that was
killed at most one period is lost, and the time in which nobody took samples is a gap.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, TypeAdapter

from busbar.kube.client import KubeClient
from busbar.operator.serving.kept_services import Copied, KeptServices
from busbar.operator.serving.load_series import KeptSeries, LoadSeries
from busbar.operator.serving.series_keeper import SeriesKeeper
from busbar.operator.settings import Settings
from busbar.operator.write.kept_object import KeptObject

NAMES = tuple(f"busbar-series-{number}" for number in range(8))
_Kept = TypeAdapter(Annotated[dict[str, KeptSeries], Field(max_length=100_000)])


def name_of(uid: str) -> str:
    """The object in which a service is."""
    return NAMES[zlib.crc32(uid.encode()) % len(NAMES)]


class SeriesStore:
    """`run`: reads what was kept, lets the keeper go on from it, and writes. `save` when that has ended."""

    def __init__(
        self, reader: KubeClient, writer: KubeClient, keeper: SeriesKeeper, settings: Settings
    ) -> None:
        self._keeper, self._period_s = keeper, settings.series_period_s
        self._parts: dict[str, KeptServices[KeptSeries]] = {}
        self._goes_on = False
        """Whether the keeper has what was kept."""
        for name in NAMES:
            what = f"the services' load over time ({name})"
            kept = KeptObject(reader, writer, settings.namespace, name, what)
            self._parts[name] = KeptServices(kept, _Kept, lambda series: series.requests, what)

    async def run(self) -> None:
        """Runs until cancelled, the keeper too: its samples begin when what was kept is read."""
        for kept in await asyncio.gather(*(part.load() for part in self._parts.values())):
            self._keeper.go_on(kept)
        self._goes_on = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keeper.run())
            for number, (name, part) in enumerate(self._parts.items(), 1):
                first_s = self._period_s * number / len(self._parts)
                group.create_task(part.run(self._period_s, self._copied_of(name), first_s))

    async def save(self) -> None:
        """Takes a last sample, and writes what is not written yet, once `run` has ended."""
        if self._goes_on:
            await self._keeper.sample()
            async with asyncio.TaskGroup() as group:
                for name, part in self._parts.items():
                    group.create_task(part.save(self._copied_of(name)))

    def _copied_of(self, name: str) -> Copied[KeptSeries]:
        def copied() -> Callable[[], dict[str, KeptSeries]]:
            copies = self._keeper.copies(lambda uid: name_of(uid) == name)
            return lambda: _kept(copies)

        return copied


def _kept(copies: dict[str, LoadSeries]) -> dict[str, KeptSeries]:
    candidates = ((uid, series.kept()) for uid, series in sorted(copies.items()))
    return {uid: series for uid, series in candidates if series is not None}
