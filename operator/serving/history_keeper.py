"""Keeps the services' last day, and how their load goes over a day, over restarts of the operator: one object, written once
a minute if something came or was spent, or five minutes of load are over.

What came while no operator read the gateway is not in it, and of one that was killed the last minute.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, TypeAdapter

from busbar.kube.client import KubeClient
from busbar.kube.errors import ApiError, ConnectionFailed, Forbidden
from busbar.operator.errors import Fenced
from busbar.operator.serving.history import HOUR_S, HOURS, History
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import CLOCK
from busbar.operator.write.kept_object import AGAIN_S, MOST_BYTES, KeptObject, unpacked

log = logging.getLogger(__name__)

NAME = "busbar-services"
_Kept = TypeAdapter(Annotated[dict[str, History], Field(max_length=100_000)])


class HistoryKeeper:
    """`load` once, then `run`. The histories, by the services' uids, are those that others add to."""

    def __init__(
        self,
        reader: KubeClient,
        writer: KubeClient,
        histories: dict[str, History],
        settings: Settings,
        wall_s: Callable[[], float] = CLOCK.now_s,
    ) -> None:
        self._settings, self._wall_s, self._histories = settings, wall_s, histories
        self._kept = KeptObject(reader, writer, settings.namespace, NAME, "the services' last day")
        self._written = b""

    async def load(self) -> None:
        """Lets the histories go on from what was kept, if there is something."""
        data = await self._kept.load() if self._settings.gateway_url else None
        if data is None:
            return
        try:
            self._histories.update(_Kept.validate_json(unpacked(data)))
        except ValueError as error:
            log.warning("the services' last day cannot be read, and is passed over: %s", error)
            return
        self._written = data
        log.info("the services' last day goes on", extra={"services": len(self._histories)})

    async def run(self) -> None:
        """Runs until cancelled; without a gateway nothing is counted, and there is nothing to keep."""
        pause_s = period_s = self._settings.history_period_s
        while self._settings.gateway_url:
            await asyncio.sleep(pause_s)
            pause_s = period_s
            copies = {uid: found.copied() for uid, found in sorted(self._histories.items())}
            data = await asyncio.to_thread(self._encoded, copies)
            if data == self._written:
                continue
            try:
                await self._kept.write(data)
                self._written = data
            except (ApiError, ConnectionFailed, Fenced) as error:
                log.warning("the services' last day was not written, and is tried again: %s", error)
                pause_s = period_s if isinstance(error, Forbidden) else min(period_s, AGAIN_S)

    def _encoded(self, copies: dict[str, History]) -> bytes:
        """Those with something to keep, without the ones with the fewest requests where all would be too large."""
        oldest = int(self._wall_s() // HOUR_S) - HOURS
        candidates = ((uid, found.kept(oldest)) for uid, found in copies.items())
        histories = {uid: found for uid, found in candidates if found is not None}
        kept, most = dict(histories), len(histories)
        while len(data := zlib.compress(_Kept.dump_json(kept, exclude_defaults=True))) > MOST_BYTES:
            most = most * 3 // 4
            busiest = sorted(histories, key=lambda uid: -sum(h.requests for h in histories[uid].hours))
            kept = {uid: histories[uid] for uid in sorted(busiest[:most])}
        if most < len(histories):
            log.warning(
                "the services' last day is too large", extra={"services left out": len(histories) - most}
            )
        return data
