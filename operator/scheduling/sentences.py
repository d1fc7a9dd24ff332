"""What jobs are told: why they wait, when they will start, and where; of a deadline, whether it is promised. No round
waits for it.

    rounds ──► put (the latest wins) ──► new reasons first ──► other sentences, forecasts ──► each object's reconcile

A reason whose code is not in the object's status goes as soon as the rate allows it, and so does a reserved place that
is won or lost. Anything else about the same object waits until ``every_s`` have passed since the last time it was told
something, and then goes in one write with what came meanwhile. At most ``per_s`` objects are told something in a second.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from busbar.operator.decisions import Deadline, Decision, Forecast, Reserved, Wait
from busbar.operator.queue.controller import Controller, Item

WRITERS = 4
"""Objects that are told something at a time; the lanes may allow fewer."""


@dataclass
class _Told:
    """What an object is to be told, and when it was told something."""

    waits: dict[int, Wait] = field(default_factory=dict)  # by index of the replica
    forecast: Forecast | None = None
    reserved: Reserved | None = None
    deadline: Deadline | None = None
    at: float = float("-inf")

    def decisions(self) -> tuple[Decision, ...]:
        news = (self.forecast, self.reserved, self.deadline)
        return (*self.waits.values(), *(each for each in news if each is not None))


class Sentences:
    """See the module's head. Run ``run()`` as a task."""

    def __init__(
        self,
        controller: Controller,
        *,
        per_s: float,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller, self._per_s, self._every_s, self._clock = controller, per_s, every_s, clock
        self._told: dict[Item, _Told] = {}
        self._new: dict[Item, None] = {}  # told at once, in order: see ``put``
        self._later: list[tuple[float, Item]] = []  # a heap by the moment from which it may be told
        self._wake = asyncio.Event()
        self._next_at = float("-inf")

    def __len__(self) -> int:
        """How many objects are to be told something."""
        return sum(bool(told.decisions()) for told in self._told.values())

    def put(self, item: Item, decisions: Iterable[Decision], *, is_new: bool) -> None:
        """Replaces what the object was to be told; ``is_new``: its status has another code, or a place is won or lost."""
        told = self._told.setdefault(item, _Told())
        queued = bool(told.decisions())
        for decision in decisions:
            if isinstance(decision, Wait):
                told.waits[decision.index] = decision
            elif isinstance(decision, Forecast):
                told.forecast = decision
            elif isinstance(decision, Reserved):
                told.reserved = decision
            elif isinstance(decision, Deadline):
                told.deadline = decision
        if is_new:
            self._new.setdefault(item)
        elif not queued:
            heapq.heappush(self._later, (told.at + self._every_s, item))
        self._wake.set()

    def drop(self, item: Item) -> None:
        """The object no longer waits, or is about to start: it is told nothing, and may be told something at any time."""
        self._told.pop(item, None)
        self._new.pop(item, None)

    def keep(self, items: set[Item]) -> None:
        """Forgets all other objects."""
        for item in self._told.keys() - items:
            self.drop(item)

    async def run(self) -> None:
        """Tells objects until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(self._tell())

    async def _tell(self) -> None:
        while True:
            await self._controller.running()
            left_s = self._next_at - self._clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            item = self._take()
            if item is None:
                self._wake.clear()
                await self._woken()
                continue
            told = self._told[item]
            decisions = told.decisions()
            told.waits, told.forecast, told.reserved, told.deadline = {}, None, None, None
            told.at = self._clock()
            self._next_at = told.at + 1 / self._per_s
            await self._controller.process(item, decisions)

    def _take(self) -> Item | None:
        """The object that is told something next."""
        for item in self._new:
            del self._new[item]
            return item
        while self._later and self._later[0][0] <= self._clock():
            _, item = heapq.heappop(self._later)
            told = self._told.get(item)
            if told is not None and told.decisions() and told.at + self._every_s <= self._clock():
                return item
        return None

    async def _woken(self) -> None:
        left_s = max(0.0, self._later[0][0] - self._clock()) if self._later else None
        try:
            # Not wait_for: in Python 3.11 it can lose a cancellation that arrives together with the event.
            async with asyncio.timeout(left_s):
                await self._wake.wait()
        except TimeoutError:
            return
