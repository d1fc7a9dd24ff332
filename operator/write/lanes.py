"""How many writes are in flight, and whose turn is next.

Three lanes: statuses that give or free a place go first, because a place is unused until they are written; then what
else starts and stops jobs (their pods, their phases); then what is only told (that they start or run, reasons, forecasts,
counts, events). So a late server holds up jobs that have their places, and no place that is free. The number of writes
in flight follows the server: it grows by one for each round of answers in time, and is halved when an answer is late,
missing or 429, 503 or 504, once for all writes that were under way then (additive increase, multiplicative decrease, as
TCP). What is told has half of the places at most, so an admission finds one soon.

A caller waits for its place before its request is built and sent: time limits of the client begin afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import IntEnum

from busbar.kube.errors import ApiError, ConnectionFailed

LATE_S = 1.0
"""An answer that takes longer says that the server has more than it can do."""
FEWEST = 4
"""Writes in flight however late the server is: two of them of what is told."""
_BUSY = frozenset({429, 503, 504})


class Lane(IntEnum):
    """In the order in which they go."""

    PLACE = 0
    ACT = 1
    TELL = 2


class Lanes:
    """See the module's head. One event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = max(float(FEWEST), most / 2)
        self._most, self._clock = float(most), clock
        self._in_flight = dict.fromkeys(Lane, 0)
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in Lane}
        self._cut_at = float("-inf")

    def has_room(self, lane: Lane) -> bool:
        """Whether a write of this lane would begin at once."""
        if any(self._waiting[before] for before in Lane if before <= lane):
            return False
        return self._fits(lane)

    def _fits(self, lane: Lane) -> bool:
        if lane is Lane.TELL and self._in_flight[Lane.TELL] >= int(self.limit) // 2:
            return False
        return sum(self._in_flight.values()) < int(self.limit)

    @asynccontextmanager
    async def place(self, lane: Lane) -> AsyncIterator[None]:
        """One write's place; how long it is held and how it ends sets the number of places."""
        await self._enter(lane)
        began, busy = self._clock(), False
        try:
            yield
        except ConnectionFailed:
            busy = True
            raise
        except ApiError as error:
            busy = error.status in _BUSY
            raise
        finally:
            self._in_flight[lane] -= 1
            self._adapt(began, busy)
            self._admit()

    async def _enter(self, lane: Lane) -> None:
        if self.has_room(lane):
            self._in_flight[lane] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given a place in the same moment
                self._in_flight[lane] -= 1
            else:
                self._waiting[lane].remove(turn)
            self._admit()
            raise

    def _admit(self) -> None:
        for lane in Lane:
            waiting = self._waiting[lane]
            while waiting and self._fits(lane):
                self._in_flight[lane] += 1
                waiting.popleft().set_result(None)
            if waiting:
                return

    def _adapt(self, began: float, busy: bool) -> None:
        now = self._clock()
        if busy or now - began > LATE_S:
            if began >= self._cut_at:  # the others that were under way are late for the same reason
                self.limit = max(float(FEWEST), self.limit / 2)
                self._cut_at = now
        else:
            self.limit = min(self._most, self.limit + 1 / self.limit)
