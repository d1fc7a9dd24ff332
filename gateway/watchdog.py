"""Silence: what a request waits for, how long it may take, and whether the replica still lives meanwhile.

A request says when it has heard something (`Watch.heard`: one number stored, no timer). One task looks at all
of them a few times a second. One that has been silent for longer than its limit is ended. One that has been
silent for `probe_after_s` makes us ask its replica's /health, once for all that wait for the same replica: a
replica whose engine hangs says so, or does not answer at all, and two such answers in a row end the requests
that wait for it, so that another replica is asked long before their own limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from busbar.scheduler.autoscale.contacts import ASK_AGAIN, STRIKES

Probe = Callable[[str], Awaitable[bool]]
"""Base URL of a replica → whether it is well."""


@dataclass(frozen=True)
class Silence:
    """Why a wait was ended."""

    reason: str
    hung: bool
    """The replica failed its health check; not merely slow."""


class Watch:
    """One request that waits for one replica, or, without a `url`, for its client."""

    def __init__(self, url: str, limit_s: float, clock: Callable[[], float]) -> None:
        self.url = url
        self.limit_s = limit_s
        self.silence: Silence | None = None
        """Set when the wait was ended here."""
        self.cut: Callable[[], None] = lambda: None
        """Ends what is waited for."""
        self.heard_at: float | None = None
        """When something came last; None: nothing has yet."""
        self._clock = clock
        self.since: float | None = clock()
        """Since when nothing has come; None: it is not the replica that we wait for now."""

    def heard(self) -> None:
        """Something came; wait anew."""
        self.since = self.heard_at = self._clock()

    def pause(self) -> None:
        """It is not the replica that we wait for now."""
        self.since = None

    def silent_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since

    def end(self, silence: Silence) -> None:
        """No more waiting."""
        if self.silence is None:
            self.silence = silence
            self.cut()


@dataclass
class _Health:
    """What we know of one replica that is silent."""

    strikes: int = 0
    asked_at: float = 0.0
    asking: asyncio.Task[None] | None = None


class Watchdog:
    """Looks after all waits of one gateway."""

    def __init__(
        self,
        probe: Probe,
        *,
        probe_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._probe_after_s = probe_after_s
        self._clock = clock
        self._watches: set[Watch] = set()
        self._health: dict[str, _Health] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def watches(self) -> Collection[Watch]:
        """All waits."""
        return self._watches

    @contextmanager
    def watch(self, url: str, limit_s: float) -> Iterator[Watch]:
        watch = Watch(url, limit_s, self._clock)
        self._watches.add(watch)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def stop(self) -> None:
        tasks = [health.asking for health in self._health.values() if health.asking]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        try:
            while self._watches:
                shortest = min([self._probe_after_s, *(watch.limit_s for watch in self._watches)])
                await asyncio.sleep(min(0.5, max(0.01, shortest / 4)))
                self.sweep()
        finally:
            self._looking = None

    def sweep(self) -> None:
        """End what has been silent for too long, and ask after the replicas of what is silent."""
        now = self._clock()
        silent: set[str] = set()
        for watch in list(self._watches):
            waited = watch.silent_s(now)
            if waited >= watch.limit_s:
                watch.end(Silence(f"it was silent for {watch.limit_s:.0f} s", hung=False))
            elif watch.url and waited >= self._probe_after_s:
                silent.add(watch.url)
        for url in [url for url, known in self._health.items() if url not in silent and not known.asking]:
            del self._health[url]
        for url in silent:
            health = self._health.setdefault(url, _Health())
            if health.asking is None and (
                not health.asked_at or now - health.asked_at >= ASK_AGAIN * self._probe_after_s
            ):
                health.asking = asyncio.create_task(self._ask(url, health))

    async def _ask(self, url: str, health: _Health) -> None:
        try:
            well = await self._probe(url)
        finally:
            health.asked_at, health.asking = self._clock(), None
        health.strikes = 0 if well else health.strikes + 1
        if health.strikes >= STRIKES:
            now = self._clock()
            for watch in list(self._watches):
                if watch.url == url and watch.silent_s(now) >= self._probe_after_s:
                    watch.end(Silence("it hangs: its health check fails", hung=True))
