"""The handler of AcceleratorPools, and the pools that are made for devices which no pool covers."""

from __future__ import annotations

import logging
import time

from busbar.kube.errors import Forbidden, Invalid
from busbar.kube.informer import Key
from busbar.kube.resources import ACCELERATOR_POOLS
from busbar.kube.types.reasons import Reason
from busbar.operator.decisions import Decision
from busbar.operator.handlers.shared import Shared
from busbar.operator.pools.discovery import discover
from busbar.operator.pools.reconcile import COUNTS_S as POOL_COUNTS_S
from busbar.operator.pools.reconcile import reconcile as reconcile_pool
from busbar.operator.steady_clock import utc_now

log = logging.getLogger(__name__)


class Pools:
    """Reconciles one pool at a time; remembers when its counts were written, and whether pools may be made."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._told: dict[Key, float] = {}  # when a pool's status was written
        self._discovers = True
        self.undiscovered = True
        """Whether a node or a pool changed since devices without a pool were looked for."""

    async def reconcile(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._shared.caches.pools.items.get(key)
        allocation = self._shared.allocations.pools.get(key.name)
        if found is None or allocation is None:
            return None
        update = reconcile_pool(found, allocation, utc_now())
        if update.waits and (left_s := self._told.get(key, 0.0) + POOL_COUNTS_S - time.monotonic()) > 0:
            return left_s
        if update.status is not None:
            self._told[key] = time.monotonic()
            await self._shared.writer.write_status(ACCELERATOR_POOLS, found, update.status)
            if update.event:
                self._shared.writer.notice(ACCELERATOR_POOLS, found, Reason.FOREIGN_PODS, update.event)
        return None

    async def discover(self) -> None:
        """Makes pools for devices that no pool covers, after a node or a pool changed."""
        if not self._discovers or not self.undiscovered:
            return
        self.undiscovered = False
        found = discover(self._shared.caches.nodes.items.values(), self._shared.caches.pools.items.values())
        try:
            await self._shared.writer.carry_out(tuple(found))
        except (Forbidden, Invalid) as error:
            self._discovers = False
            log.warning("pools are not discovered: %s", error)
