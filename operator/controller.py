"""From keys to reconciles: which object is looked at when, by whom, and what an error means.

    watches, readings, timers ──► queue of (kind, key) ──► workers ──► view ──► pure reconcile ──► writer

One lock per object keeps a worker and the scheduling round from deciding about it at the same time. A conflict
means that the object changed: look again at once. A refusal (422, 403) is a fault of ours or of a policy: it is
logged with the object's key and tried again ever more slowly. Losing the lease ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import NamedTuple

from busbar.kube.errors import ApiError, Conflict, ConnectionFailed, NotFound
from busbar.kube.informer import Key
from busbar.operator.errors import Fenced
from busbar.operator.metrics import Metrics
from busbar.operator.orders import Order
from busbar.operator.workqueue import KeyQueue

log = logging.getLogger(__name__)


class Item(NamedTuple):
    """One object to look at."""

    kind: str
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


Handler = Callable[[Key, tuple[Order, ...]], Awaitable[float | None]]
"""Reconciles one object; returns after how many seconds to look again at the latest."""


def utc_now() -> datetime:
    """The wall clock; whole milliseconds, which is what statuses keep."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


class Controller:
    """See the module's head."""

    def __init__(
        self, metrics: Metrics, *, workers: int, backoff_s: tuple[float, float] = (0.05, 60.0)
    ) -> None:
        self.queue: KeyQueue[Item] = KeyQueue(backoff_s)
        self._handlers: dict[str, Handler] = {}
        self._locks: dict[Item, asyncio.Lock] = {}
        self._metrics = metrics
        self._workers = workers

    def handles(self, kind: str, handler: Handler) -> None:
        self._handlers[kind] = handler

    def add(self, kind: str, key: Key) -> None:
        """Looks at an object soon."""
        if kind in self._handlers:
            self.queue.add(Item(kind, key))

    async def run(self) -> None:
        """The workers; ends by cancellation, or by Fenced when the lease is lost."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            item = await self.queue.get()
            try:
                await self.process(item)
            finally:
                self.queue.done(item)

    async def process(self, item: Item, orders: tuple[Order, ...] = ()) -> None:
        """Reconciles one object now; errors are handled as the module's head says."""
        lock = self._locks.setdefault(item, asyncio.Lock())
        async with lock:
            result = "ok"
            try:
                again = await self._handlers[item.kind](item.key, orders)
                self.queue.succeeded(item)
                if again is not None:
                    self.queue.later(item, again)
            except Fenced:
                raise
            except (Conflict, NotFound) as error:
                # Somebody wrote first, or it is gone: our watch is about to say so.
                result = "conflict"
                log.debug("%s: %s", item, error)
                self.queue.failed(item)
            except (ApiError, ConnectionFailed) as error:
                result = "error"
                delay = self.queue.failed(item)
                log.warning("reconcile object=%s error=%s again_in_s=%.1f", item, error, delay)
            except Exception:
                result = "bug"
                delay = self.queue.failed(item)
                log.exception("reconcile object=%s again_in_s=%.1f", item, delay)
            finally:
                self._metrics.reconciles.labels(item.kind, result).inc()
        if not lock.locked() and not getattr(lock, "_waiters", None):
            self._locks.pop(item, None)
