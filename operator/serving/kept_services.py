"""What a part of the operator keeps of each service over restarts, in one object: written where it has changed, at most once
in a period, and once more at a clean stop, without the quietest services where all would be too large.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pydantic import BaseModel, TypeAdapter

from busbar.kube.errors import ApiError, ConnectionFailed, Forbidden
from busbar.operator.errors import Fenced
from busbar.operator.write.kept_object import AGAIN_S, MOST_BYTES, KeptObject, unpacked

log = logging.getLogger(__name__)

Kept = TypeVar("Kept", bound=BaseModel)
Copied = Callable[[], Callable[[], dict[str, Kept]]]
"""Takes copies, and returns what makes of them what is kept, in another thread."""


class KeptServices(Generic[Kept]):
    """`load` once, then `run`; and `save` when that has ended."""

    def __init__(
        self,
        kept: KeptObject,
        adapter: TypeAdapter[dict[str, Kept]],
        requests_of: Callable[[Kept], float],
        what: str,
    ) -> None:
        """
        Args:
            adapter: of what is kept by the services' uids; it refuses what nobody here wrote.
            requests_of: by it the services are left out, those with the fewest first.
            what: it is, for the log.
        """
        self._kept, self._adapter, self._requests_of, self._what = kept, adapter, requests_of, what
        self._written = b""
        self._loaded = False

    async def load(self) -> dict[str, Kept]:
        """What was kept, by uid; nothing where there is none or it cannot be read."""
        data = await self._kept.load()
        self._loaded = True
        if data is None:
            return {}
        try:
            found = self._adapter.validate_json(unpacked(data))
        except ValueError as error:
            log.warning("%s cannot be read, and is passed over: %s", self._what, error)
            return {}
        self._written = data
        log.info("%s goes on", self._what, extra={"services": len(found)})
        return found

    async def run(self, period_s: float, copied: Copied[Kept], first_s: float | None = None) -> None:
        """Writes until cancelled.

        Args:
            period_s: between two writes.
            first_s: until the first write; None: a period.
        """
        pause_s = period_s if first_s is None else first_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = period_s
            try:
                await self._write(copied, self._kept.write)
            except (ApiError, ConnectionFailed, Fenced) as error:
                log.warning("%s was not written, and is tried again: %s", self._what, error)
                pause_s = period_s if isinstance(error, Forbidden) else min(period_s, AGAIN_S)

    async def save(self, copied: Copied[Kept]) -> None:
        """Writes what has changed since the last write. Nothing where it was never loaded: what is kept is more than what is
        known here."""
        if not self._loaded:
            return
        try:
            await self._write(copied, self._kept.write_last)
        except (ApiError, ConnectionFailed, Fenced) as error:
            log.warning("%s was not written at the end: %s", self._what, error)

    async def _write(self, copied: Copied[Kept], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Raises ApiError, ConnectionFailed or Fenced."""
        data = await asyncio.to_thread(self._encoded, copied())
        if data != self._written:
            await write(data)
            self._written = data

    def _encoded(self, make: Callable[[], dict[str, Kept]]) -> bytes:
        """Those with something to keep, without the ones with the fewest requests where all would be too large; empty
        where there are none and there never were any."""
        services = make()
        if not services and not self._written:
            return b""
        kept, most = dict(services), len(services)
        while len(data := zlib.compress(self._adapter.dump_json(kept, exclude_defaults=True))) > MOST_BYTES:
            most = most * 3 // 4
            busiest = sorted(services, key=lambda uid: -self._requests_of(services[uid]))
            kept = {uid: services[uid] for uid in sorted(busiest[:most])}
        if most < len(services):
            log.warning("%s is too large", self._what, extra={"services left out": len(services) - most})
        return data
