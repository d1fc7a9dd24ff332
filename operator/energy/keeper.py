"""Reads the ledger's checkpoint when this process begins to lead, and writes the next ones.

One object for the whole cluster, written every `Settings.energy_checkpoint_s`, however many jobs run: statuses of jobs
may then wait for ten minutes (`write/pace.py`). Each write names the version that it replaces, and is fenced as all others.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import ApiError, ConnectionFailed, Forbidden, NotFound
from busbar.kube.resources import CONFIG_MAPS
from busbar.operator.energy.checkpoint import Checkpoint, decode, encode
from busbar.operator.energy.ledger import Ledger
from busbar.operator.errors import Fenced
from busbar.operator.settings import Settings

log = logging.getLogger(__name__)

NAME = "busbar-energy"
DATA = "checkpoint"
AGAIN_S = 2.0


class CheckpointKeeper:
    """`load` once, then `run`."""

    def __init__(
        self,
        reader: KubeClient,
        writer: KubeClient,
        ledger: Ledger,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._writer, self._ledger, self._settings = reader, writer, ledger, settings
        self._clock = clock
        self._version: str | None = None
        """Of the object; None: it does not exist."""

    async def load(self) -> None:
        """Lets the ledger go on from the last checkpoint, if there is one; tries until the API server answers."""
        if not self._settings.power_key:
            return
        while True:
            try:
                found = await self._read()
                break
            except Forbidden as error:
                log.warning("the energy ledger's checkpoint may not be read, statuses count: %s", error)
                return
            except (ApiError, ConnectionFailed) as error:
                log.warning("the energy ledger's checkpoint was not read, and is tried again: %s", error)
                await asyncio.sleep(AGAIN_S)
        if found is None:
            return
        try:
            checkpoint = decode(base64.b64decode((found.get("binaryData") or {}).get(DATA) or ""))
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
            checkpoint = self._ledger.checkpoint(self._clock())
            if not checkpoint.nodes:
                continue
            try:
                await self._write(checkpoint)
            except (ApiError, ConnectionFailed, Fenced, ValueError) as error:
                log.warning("the energy ledger's checkpoint was not written, and is tried again: %s", error)
                pause_s = period_s if isinstance(error, Forbidden | ValueError) else min(period_s, AGAIN_S)

    async def _read(self) -> Object | None:
        """The object, whose version is remembered."""
        try:
            found = await self._reader.get(CONFIG_MAPS, NAME, self._settings.namespace)
        except NotFound:
            self._version = None
            return None
        self._version = found["metadata"]["resourceVersion"]
        return found

    async def _write(self, checkpoint: Checkpoint) -> None:
        """Where the write fails, the version is read again: it may have been done, or somebody has deleted the object."""
        data, left_out = await asyncio.to_thread(encode, checkpoint)
        if left_out:
            log.warning("the energy ledger's checkpoint is too large", extra={"nodes left out": left_out})
        metadata: Object = {
            "name": NAME,
            "namespace": self._settings.namespace,
            "labels": {"app.kubernetes.io/managed-by": "busbar"},
        }
        body: Object = {
            "apiVersion": CONFIG_MAPS.api_version,
            "kind": CONFIG_MAPS.kind,
            "metadata": metadata,
            "binaryData": {DATA: base64.b64encode(data).decode()},
        }
        try:
            if self._version is None:
                written = await self._writer.create(CONFIG_MAPS, body, self._settings.namespace)
            else:
                metadata["resourceVersion"] = self._version
                written = await self._writer.replace(CONFIG_MAPS, body, self._settings.namespace)
        except (ApiError, ConnectionFailed):
            await self._read()
            raise
        self._version = written["metadata"]["resourceVersion"]
