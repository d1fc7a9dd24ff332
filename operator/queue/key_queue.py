"""A de-duplicating queue of keys: many events about one object become one reconcile.

* A key that is added while it waits is queued once; one that is added while it is processed runs again afterwards.
* A key that is added as urgent goes before all that are not, in the order in which the urgent ones came.
* ``later`` adds a key after a delay; the earliest of several delays wins.
* ``failed`` adds it after a back-off that doubles with each failure in a row; ``succeeded`` forgets them.
* A key wakes one of the workers that wait, and no others.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, deque
from typing import Generic, TypeVar

K = TypeVar("K")


class KeyQueue(Generic[K]):
    """See the module's head. One event loop, any number of workers."""

    def __init__(self, backoff_s: tuple[float, float] = (0.05, 60.0)) -> None:
        self._urgent: OrderedDict[K, None] = OrderedDict()
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._active: set[K] = set()
        self._again: dict[K, bool] = {}
        """Added while they are processed, and whether as urgent."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._backoff_s = backoff_s

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ready)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being processed (timers aside)."""
        return not len(self) and not self._active

    def add(self, key: K, *, urgent: bool = False) -> None:
        if key in self._active:
            self._again[key] = urgent or self._again.get(key, False)
            return
        known = key in self._urgent or key in self._ready
        if urgent:
            self._ready.pop(key, None)
            self._urgent.setdefault(key)
        elif not known:
            self._ready[key] = None
        if not known:
            self._wake_one()

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # else its worker was cancelled
                waiter.set_result(None)
                return

    def later(self, key: K, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + delay_s:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(max(0.0, delay_s), self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def get(self) -> K:
        """The next key; the caller must call ``done`` with it."""
        while not len(self):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():  # it was woken in the same moment: another one must look
                    self._wake_one()
                raise
        key, _ = (self._urgent or self._ready).popitem(last=False)
        self._active.add(key)
        return key

    def done(self, key: K) -> None:
        self._active.discard(key)
        urgent = self._again.pop(key, None)
        if urgent is not None:
            self.add(key, urgent=urgent)

    def failed(self, key: K, *, least_s: float = 0.0) -> float:
        """Schedules the key again; returns after how many seconds.

        Args:
            least_s: the back-off after the first failure in a row is no less.
        """
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        base, longest = self._backoff_s
        delay = min(max(base, least_s) * float(1 << min(count, 20)), longest) * random.uniform(0.5, 1.0)
        self.later(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        self._failures.pop(key, None)

    def close(self) -> None:
        """Cancels the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
