"""From keys to reconciles: which object is reconciled when, and what happens after an error.

    watches, readings, timers ──► queue of (kind, key) ──► workers ──► view ──► pure reconcile ──► writer

One lock per object keeps a worker and the scheduling round from deciding about it at the same time. A conflict
means that the object changed: it is reconciled again. A refusal (422, 403) is a bug or a policy: it is
logged with the object's key and retried with a growing back-off. A write that the lease's fence stopped is tried
again; while the lease is lost, ``pause`` holds the workers. A status that only tells something and finds no place
holds no worker: its object is reconciled again after a back-off that grows, so that thousands of them do not spend the
time of a late server on trying, and says then what is true then. An event brings it back at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

from busbar.kube.errors import ApiError, Conflict, ConnectionFailed, NotFound, ServerError
from busbar.kube.informer import Key
from busbar.operator.decisions import Decision
from busbar.operator.errors import Fenced, LaneFull
from busbar.operator.metrics import Metrics
from busbar.operator.queue.key_queue import KeyQueue

log = logging.getLogger(__name__)

FENCED_AGAIN_S = 0.5
"""When a reconcile whose write was stopped is tried again; later where the lease takes longer to come back."""
NO_PLACE_AGAIN_S = 1.0
"""The first back-off of one that found no place for what it only tells: a try costs as much as one that writes. With each
try it doubles, so what is told late is at most twice as late as it would have to be."""


class Item(NamedTuple):
    """One object to reconcile."""

    kind: str
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class Outcome(StrEnum):
    """How a reconcile ended, as the metric calls it."""

    OK = "ok"
    FENCED = "fenced"
    """The lease is not held."""
    LATER = "later"
    """There was no place for what is only told."""
    CONFLICT = "conflict"
    """The object changed or is gone."""
    ERROR = "error"
    """A write was refused."""
    UNKNOWN = "unknown"
    """A write was not answered, or with a failure of the server: it may have been done."""
    BUG = "bug"


def _about(item: Item, again_s: float) -> dict[str, object]:
    """Fields of a log line about a reconcile that is tried again."""
    return {"object": str(item), "again_s": round(again_s, 1)}


Handler = Callable[[Key, tuple[Decision, ...]], Awaitable[float | None]]
"""Reconciles one object; returns after how many seconds it must be reconciled again at the latest."""


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
        self._running = asyncio.Event()
        self._running.set()

    def handles(self, kind: str, handler: Handler) -> None:
        self._handlers[kind] = handler

    def add(self, kind: str, key: Key, *, urgent: bool = False) -> None:
        """Queues an object for a reconcile; ``urgent``: before all that are not."""
        if kind in self._handlers:
            self.queue.add(Item(kind, key), urgent=urgent)

    async def run(self) -> None:
        """Runs the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            item = await self.queue.get()
            try:
                await self.running()  # after the wait for a key, so that none begins while they are paused
                await self.process(item)
            finally:
                self.queue.done(item)

    def pause(self) -> None:
        """The workers begin nothing new until ``resume``."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def running(self) -> None:
        """Waits until the workers are not paused."""
        await self._running.wait()

    async def process(self, item: Item, decisions: tuple[Decision, ...] = ()) -> Outcome:
        """Reconciles one object now; errors are handled as the module's head says."""
        lock = self._locks.setdefault(item, asyncio.Lock())
        async with lock:
            outcome = await self._reconcile(item, decisions)
            self._metrics.reconciles.labels(item.kind, outcome).inc()
        if not lock.locked() and not getattr(lock, "_waiters", None):
            self._locks.pop(item, None)
        return outcome

    async def _reconcile(self, item: Item, decisions: tuple[Decision, ...]) -> Outcome:
        try:
            again = await self._handlers[item.kind](item.key, decisions)
            self.queue.succeeded(item)
            if again is not None:
                self.queue.later(item, again)
            return Outcome.OK
        except Fenced:
            self.queue.later(item, FENCED_AGAIN_S)
            return Outcome.FENCED
        except LaneFull:
            self.queue.failed(item, least_s=NO_PLACE_AGAIN_S)
            return Outcome.LATER
        except (Conflict, NotFound) as error:
            # Somebody else wrote it or deleted it; the watch will report that soon.
            log.debug("%s: %s", item, error)
            self.queue.failed(item)
            return Outcome.CONFLICT
        except (ApiError, ConnectionFailed) as error:
            delay = self.queue.failed(item)
            log.warning("reconcile failed", extra=_about(item, delay) | {"error": str(error)})
            return Outcome.UNKNOWN if isinstance(error, ConnectionFailed | ServerError) else Outcome.ERROR
        except Exception:
            delay = self.queue.failed(item)
            log.exception("reconcile failed", extra=_about(item, delay))
            return Outcome.BUG
