"""Reads the ledger's checkpoint when this process begins to lead, and writes the next ones.

One object for the whole cluster, written every `Settings.energy_checkpoint_s` and at a clean stop, however many jobs run:
statuses of jobs may then wait for twelve minutes (`write/pace.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from busbar.kube.client import KubeClient
from busbar.kube.errors import ApiError, ConnectionFailed, Forbidden
from busbar.operator.energy.checkpoint import decode, encode
from busbar.operator.energy.ledger import Ledger
from busbar.operator.errors import Fenced
from busbar.operator.settings import Settings
from busbar.operator.write.kept_object import AGAIN_S, KeptObject

log = logging.getLogger(__name__)

NAME = "busbar-energy"


class CheckpointKeeper:
    """`load` once, then `run`, then `save`."""

    def __init__(
        self,
        reader: KubeClient,
        writer: KubeClient,
        ledger: Ledger,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._settings, self._clock = ledger, settings, clock
        self._kept = KeptObject(reader, writer, settings.namespace, NAME, "the energy ledger's checkpoint")

    async def load(self) -> None:
        """Lets the ledger go on from the last checkpoint, if there is one."""
        data = await self._kept.load() if self._settings.power_key else None
        if data is None:
            return
        try:
            checkpoint = decode(data)
        except ValueError as error:
            log.warning("the energy ledger's checkpoint cannot be read, statuses count: %s", error)
            return
        self._ledger.resume(checkpoint, self._clock())
        counts = {"accounts": len(checkpoint.totals), "nodes": len(checkpoint.nodes)}
        log.info("the energy ledger goes on from its checkpoint", extra=counts)

    async def run(self) -> None:
        """Runs until cancelled; without a power key no agent is asked, and there is nothing to keep."""
        pause_s = period_s = self._settings.energy_checkpoint_s
        while self._settings.power_key:
            await asyncio.sleep(pause_s)
            pause_s = period_s
            try:
                await self._write(self._kept.write)
            except (ApiError, ConnectionFailed, Fenced, ValueError) as error:
                log.warning("the energy ledger's checkpoint was not written, and is tried again: %s", error)
                pause_s = period_s if isinstance(error, Forbidden | ValueError) else min(period_s, AGAIN_S)

    async def save(self) -> None:
        """Writes how far everything is counted, once `run` has ended."""
        try:
            await self._write(self._kept.write_last)
        except (ApiError, ConnectionFailed, Fenced, ValueError) as error:
            log.warning("the energy ledger's checkpoint was not written at the end: %s", error)

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Nothing where no node was heard: without `load` there is none. Raises ApiError, ConnectionFailed, Fenced or
        ValueError."""
        checkpoint = self._ledger.checkpoint(self._clock())
        if not checkpoint.nodes:
            return
        data, left_out = await asyncio.to_thread(encode, checkpoint)
        if left_out:
            log.warning("the energy ledger's checkpoint is too large", extra={"nodes left out": left_out})
        await write(data)
