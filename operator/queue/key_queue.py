"""A de-duplicating queue of keys: many events about one object become one reconcile.

* A key that is added while it waits is queued once; one that is added while it is processed runs again afterwards.
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
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._backoff_s = backoff_s

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being processed (timers aside)."""
        return not self._ready and not self._active

    def add(self, key: K) -> None:
        if key in self._active:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = None
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
        while not self._ready:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():  # it was woken in the same moment: another one must look
                    self._wake_one()
                raise
        key, _ = self._ready.popitem(last=False)
        self._active.add(key)
        return key

    def done(self, key: K) -> None:
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def failed(self, key: K) -> float:
        """Schedules the key again; returns after how many seconds."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        base, longest = self._backoff_s
        delay = min(base * float(1 << min(count, 20)), longest) * random.uniform(0.5, 1.0)
        self.later(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        self._failures.pop(key, None)

    def close(self) -> None:
        """Cancels the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
