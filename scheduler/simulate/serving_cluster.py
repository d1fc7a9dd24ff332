"""The replicas of a simulated service: they start, serve, drain, sleep and leave, and requests are routed over them.

A new replica is ready after the start time (or the wake time, while replicas sleep); a surplus one takes no more requests
and leaves when its last has ended. The gateway splits each bucket over the columns by the shares for what is ready,
recomputed when that changes (`autoscale.shares`, which the real gateway runs, too), and takes the replica with the least
work in the column; where prompts queue there, the shortest queue of any type that serves the bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..autoscale.mix import Column, routing_shares, spread
from ..autoscale.shares import PATIENCE, Turns
from ..autoscale.step_model import Slo, StepModel
from .serving_replica import Replica, Request


class Places(Protocol):
    """Where replicas run, if not anywhere at once: a cluster that others use, too (`shared_cluster.py`)."""

    def ask(self, pool: str, now_s: float) -> str:
        """One more replica is wanted; returns its name."""

    def give_back(self, name: str, now_s: float) -> None:
        """A replica has left, or is not wanted any more."""

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Replicas that have been placed since the last call, each with the time from which its place is free."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What a simulation assumes."""

    start_s: float = 60.0
    sleeping: int = 0
    """Replicas with weights in host memory, of any type: they wake instead of starting. They cost nothing, which
    means that their accelerators are lent to others in the meantime."""
    wake_s: float = 5.0
    warm_up_s: float = 300.0
    warm: int = 0
    """At most so many surplus replicas sleep, each where it is, and wake before another one of their type starts: as
    `scaling.warm` of a ModelService does it. Nothing sleeps at first. They cost what they cost awake, and nobody takes
    their places."""


@dataclass(slots=True)
class Member:
    column: Column
    ready_s: float
    replica: Replica
    woken: bool
    draining: bool = False
    place: str = ""
    """Its name at `Places`."""


@dataclass(slots=True)
class Cluster:
    columns: Sequence[Column]
    models: Mapping[str, StepModel]
    slo: Slo
    settings: ServingSettings
    members: list[Member] = field(default_factory=list)
    ready: dict[str, list[Member]] = field(default_factory=dict)
    shares: tuple[Mapping[str, float], ...] = ()
    turns: Turns = field(default_factory=Turns)
    held: list[Request] = field(default_factory=list)
    asleep: int = 0
    dozing: Counter[str] = field(default_factory=Counter)
    """Replicas that sleep where they are, by column (`ServingSettings.warm`)."""
    places: Places | None = None
    """None: there is room for all."""
    unplaced: dict[str, Column] = field(default_factory=dict)
    """Replicas that wait for a place."""

    def add(self, column: Column, now_s: float, ready_s: float, woken: bool = False, place: str = "") -> None:
        replica = Replica.of(self.models[column.key], self.slo, ready_s)
        self.members.append(Member(column, ready_s, replica, woken, place=place))

    def admit(self, now_s: float, start_s: float) -> None:
        """The replicas that have a place now start."""
        for name, free_s in self.places.advance(now_s) if self.places is not None else ():
            self.add(self.unplaced.pop(name), now_s, max(now_s, free_s) + start_s, place=name)

    def counts(self, now_s: float) -> tuple[dict[str, int], dict[str, int]]:
        """Ready and starting replicas by column, without those that drain."""
        ready = dict.fromkeys((c.key for c in self.columns), 0)
        starting = dict(ready)
        for member in self.members:
            if not member.draining:
                (ready if member.ready_s <= now_s else starting)[member.column.key] += 1
        for column in self.unplaced.values():
            starting[column.key] += 1
        return ready, starting

    def resize(self, target: Mapping[str, int], now_s: float) -> None:
        """Start what is missing; stop what is too much, starting ones first, then the least work."""
        for column in self.columns:
            own = [m for m in self.members if m.column.key == column.key and not m.draining]
            waiting = [name for name, of in self.unplaced.items() if of.key == column.key]
            missing = target.get(column.key, 0) - len(own) - len(waiting)
            for name in waiting[len(waiting) + missing :] if missing < 0 else ():
                self._withdraw(name, now_s)
                missing += 1
            for _ in range(missing):
                if self.places is not None:
                    self.unplaced[self.places.ask(column.pool, now_s)] = column
                    continue
                here = self.dozing[column.key] > 0
                self.dozing[column.key] -= here
                woken = not here and self.asleep > 0
                self.asleep -= woken
                wait_s = self.settings.wake_s if here or woken else self.settings.start_s
                self.add(column, now_s, now_s + wait_s, woken)
            own.sort(
                key=lambda m: (m.ready_s <= now_s, -m.ready_s if m.ready_s > now_s else m.replica.work_s)
            )
            for member in own[: max(-missing, 0)]:
                member.draining = True

    def _withdraw(self, name: str, now_s: float) -> None:
        assert self.places is not None
        del self.unplaced[name]
        self.places.give_back(name, now_s)

    def leave(self, now_s: float) -> None:
        """Drained replicas go; their last requests are counted."""
        gone = [m for m in self.members if m.draining and (m.ready_s > now_s or not m.replica.in_flight)]
        for member in gone:
            if self.places is not None:
                self.places.give_back(member.place, now_s)
            self.asleep += member.woken
            if member.ready_s <= now_s and self.dozing.total() < self.settings.warm:
                self.dozing[member.column.key] += 1
        self.members = [m for m in self.members if m not in gone]

    def reroute(self, rates: Sequence[float], now_s: float) -> None:
        ready, _ = self.counts(now_s)
        self.shares = routing_shares(self.columns, spread(self.columns, rates, ready))
        self.ready = {
            key: [m for m in self.members if m.column.key == key and not m.draining and m.ready_s <= now_s]
            for key, count in ready.items()
            if count
        }

    def route(self, request: Request, now_s: float) -> None:
        """To the column whose turn it is, as the gateway does it, and there to the replica with the least work."""
        if not self.ready:
            self.held.append(request)
            return
        column = self.turns.next(
            request.bucket, self.shares[request.bucket], self.ready, self._wait_s, PATIENCE * self.slo.ttft_s
        )
        if column is None:
            # Nothing ready serves this bucket within the SLO, or it is new: the fastest prompt processing.
            column = min(self.ready, key=lambda key: (self.models[key].d_s, key))
        _least(self.ready[column]).replica.take(request, now_s)

    def _wait_s(self, column: str) -> float:
        """Seconds of prompts before a request that goes there now."""
        return _least(self.ready[column]).replica.prompt_s


def _least(members: Sequence[Member]) -> Member:
    return members[0] if len(members) == 1 else min(members, key=lambda m: m.replica.work_s)
