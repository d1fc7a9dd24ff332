"""The replicas of a simulated service: they start, serve, drain, sleep and leave, and requests are routed over them.

A new replica is ready after the start time (or the wake time, while replicas sleep). A surplus one takes no more requests;
those that it has not begun with go to others, its streams move there with their keys and values (`ServingSettings.moves`) or end
where they are, and then it leaves. What fails is in `serving_failures.py`, and what becomes of it in `serving_losses.py`.

The gateway splits each bucket over the columns by the shares for what is ready, recomputed when that changes
(`autoscale.shares`, which the real gateway runs, too), and takes the replica with the least work in the column; where prompts
queue there, the shortest queue of any type that serves the bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from ..autoscale.mix import Column, routing_shares, spread
from ..autoscale.shares import PATIENCE, Turns
from ..autoscale.step_model import Slo, StepModel
from .serving_failures import Failures
from .serving_member import Member, Told
from .serving_replica import Replica, Request


class Places(Protocol):
    """Where replicas run, if not anywhere at once: a cluster that others use, too (`shared_cluster.py`), or nodes that fail
    (`serving_failures.py`)."""

    def ask(self, pool: str, now_s: float) -> str:
        """One more replica is wanted; returns its name."""

    def give_back(self, name: str, now_s: float) -> None:
        """A replica has left, or is not wanted any more."""

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Replicas that have been placed since the last call, each with the time from which its place is free."""

    def failed(self, now_s: float) -> Collection[str]:
        """Placed replicas whose nodes are away."""

    def stock(self) -> Mapping[str, int]:
        """Accelerators by pool on the nodes that are there."""

    def others_answer(self) -> bool:
        """Whether the operator hears from workloads of others."""

    @property
    def node_failures(self) -> int:
        """Until now."""


@dataclass(frozen=True, slots=True)
class Moves:
    """How a replica that drains hands over its streams: one after the other, while they go on."""

    kv_bytes: float
    """Keys and values of one token."""
    gb_per_s: float = 1.25
    """10^9 bytes per second of the link between replicas (10 Gbit/s)."""


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
    """At most so many surplus replicas sleep, each where it is and as long as that pays (`autoscale.warmth`), and wake before another
    one of their type starts: as `scaling.warm` of a ModelService does it. Nothing sleeps at first. They cost what they cost awake,
    and nobody takes their places."""
    moves: Moves | None = None
    """None: streams end on the replica that drains."""
    failures: Failures = field(default_factory=Failures)


@dataclass(slots=True)
class Cluster:
    """All replicas, and the gateway's view of them."""

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
    dozing: list[tuple[Column, str]] = field(default_factory=list)
    """Replicas that sleep where they are, with their places (`ServingSettings.warm`), the longest first."""
    may_sleep: int = 0
    """So many of them now."""
    places: Places | None = None
    """None: there is room for all."""
    unplaced: dict[str, Column] = field(default_factory=dict)
    """Replicas that wait for a place."""
    wanted: dict[str, int] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    changed: bool = False
    """The gateway must compute its shares anew."""
    _added: int = 0
    _rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = Random(f"{self.settings.failures.seed}/replicas")

    def add(self, column: Column, ready_s: float, woken: bool = False, place: str = "") -> None:
        """One more replica."""
        self._added += 1
        replica = Replica.of(self.models[column.key], self.slo, ready_s)
        began_s = ready_s - self.settings.start_s
        member = Member(str(self._added), column, ready_s, replica, woken, began_s, place=place)
        self.starts(member, ready_s)
        self.members.append(member)

    def starts(self, member: Member, ready_s: float) -> None:
        """Its process begins (again) and is ready then."""
        failures = self.settings.failures
        member.ready_s, member.failed_s = ready_s, None
        member.replica = Replica.of(self.models[member.column.key], self.slo, ready_s)
        member.ends_s, member.hangs_s = (
            math.inf if mean_s is None else ready_s + self._rng.expovariate(1 / mean_s)
            for mean_s in (failures.replica_mtbf_s, failures.hang_mtbf_s)
        )

    def admit(self, now_s: float, start_s: float) -> None:
        """The replicas that have a place now start."""
        for name, free_s in self.places.advance(now_s) if self.places is not None else ():
            self.add(self.unplaced.pop(name), max(now_s, free_s) + start_s, place=name)

    def counts(self, now_s: float) -> tuple[dict[str, int], dict[str, int]]:
        """Ready and starting replicas by column, without those that drain or are replaced."""
        ready = dict.fromkeys((c.key for c in self.columns), 0)
        starting = dict(ready)
        for member in self.members:
            if _stays(member):
                (ready if self.is_ready(member, now_s) else starting)[member.column.key] += 1
        for column in self.unplaced.values():
            starting[column.key] += 1
        return ready, starting

    def is_ready(self, member: Member, now_s: float) -> bool:
        """Whether it counts as one that serves; what hangs does not to its readiness probe."""
        hangs = member.failed_s is not None and member.away_s is None
        return member.ready_s <= now_s and not member.replaced and (not hangs or self._is_open(member, now_s))

    def _is_open(self, member: Member, now_s: float) -> bool:
        """Whether the gateway sends requests there."""
        failed_s = member.failed_s
        seen = failed_s is None or now_s - failed_s < member.open_s
        return member.ready_s <= now_s and member.draining_s is None and seen

    def resize(self, target: Mapping[str, int], now_s: float) -> None:
        """Start what is missing; stop what is too much, starting ones first, then the least work."""
        self.wanted = dict(target)
        self._relimit(target, now_s)
        for column in self.columns:
            own = [m for m in self.members if m.column.key == column.key and _stays(m)]
            waiting = [name for name, of in self.unplaced.items() if of.key == column.key]
            missing = target.get(column.key, 0) - len(own) - len(waiting)
            for name in waiting[len(waiting) + missing :] if missing < 0 else ():
                self._withdraw(name, now_s)
                missing += 1
            for _ in range(missing):
                self._start(column, now_s)
            own.sort(
                key=lambda m: (m.ready_s <= now_s, -m.ready_s if m.ready_s > now_s else m.replica.work_s)
            )
            for member in own[: max(-missing, 0)]:
                member.draining_s = now_s

    def _relimit(self, target: Mapping[str, int], now_s: float) -> None:
        """Where the target differs by power caps alone, boards get other limits and their replicas run on."""
        staying = [m for m in self.members if _stays(m)]
        live = Counter(m.column.key for m in staying)
        missing = {c.key: target.get(c.key, 0) - live[c.key] for c in self.columns}
        for member in staying:
            wanted = (c for c in self.columns if c.pool == member.column.pool and missing[c.key] > 0)
            other = next(wanted, None) if missing[member.column.key] < 0 else None
            if other is not None:
                missing[member.column.key] += 1
                missing[other.key] -= 1
                member.column, self.changed = other, True
                member.replica.change(self.models[other.key], now_s)

    def _start(self, column: Column, now_s: float) -> None:
        """One more: one that sleeps there wakes, else another one starts."""
        here = next((row for row in self.dozing if row[0].key == column.key), None)
        if here is not None:
            self.dozing.remove(here)
            self.add(column, now_s + self.settings.wake_s, place=here[1])
        elif self.places is not None:
            self.unplaced[self.places.ask(column.pool, now_s)] = column
        else:
            woken = self.asleep > 0
            self.asleep -= woken
            wait_s = self.settings.wake_s if woken else self.settings.start_s
            self.add(column, now_s + wait_s, woken)

    def _withdraw(self, name: str, now_s: float) -> None:
        assert self.places is not None
        del self.unplaced[name]
        self.places.give_back(name, now_s)

    def leave(self, now_s: float) -> None:
        """Replicas that drain hand over what they can; those without requests go."""
        draining = [m for m in self.members if m.draining_s is not None]
        for member in draining:
            if member.failed_s is None and member.ready_s <= now_s:
                self._hand_over(member, now_s)
        gone = [m for m in draining if m.ready_s > now_s or not m.replica.in_flight]
        for member in gone:
            self.asleep += member.woken
            works = member.ready_s <= now_s and member.failed_s is None
            if works and len(self.dozing) < self.may_sleep:
                self.dozing.append((member.column, member.place))
            elif self.places is not None:
                self.places.give_back(member.place, now_s)
        if gone:
            self.members = [m for m in self.members if m not in gone]
        while len(self.dozing) > self.may_sleep:
            _, place = self.dozing.pop(0)
            if self.places is not None:
                self.places.give_back(place, now_s)

    def _hand_over(self, member: Member, now_s: float) -> None:
        """Moves the streams that the link has carried since the drain began, to peers that have room for them."""
        moves = self.settings.moves
        if moves is None or member.draining_s is None or not self.ready:
            return
        for request in member.replica.withdraw():
            self.route(request, now_s)
        sent = moves.gb_per_s * 1e9 * (now_s - member.draining_s)
        for _, _, request in sorted(member.replica.running, key=lambda row: row[1]):
            size = moves.kv_bytes * (request.prompt_tokens + request.output_tokens)
            peer = self._peer(request, now_s)
            if member.moved_bytes + size > sent or peer is None:
                return
            member.moved_bytes += size
            member.replica.hand_over(request)
            peer.replica.adopt(request, now_s)
            self.told.moved += self.counts_in(request)

    def _peer(self, request: Request, now_s: float) -> Member | None:
        """The replica with the least work that serves the bucket and has room for the stream."""
        able = [
            m
            for members in self.ready.values()
            for m in members
            if m.failed_s is None
            and m.draining_s is None
            and m.column.rates[request.bucket] > 0
            and m.replica.holds(request)
        ]
        return _least(able) if able else None

    def counts_in(self, request: Request) -> bool:
        return request.arrival_s >= self.settings.warm_up_s

    def reopen(self, now_s: float) -> None:
        """The gateway sends nothing any more to what it knows is lost."""
        self.changed = True
        self.ready = {
            key: open_
            for key, members in self.ready.items()
            if (open_ := [m for m in members if self._is_open(m, now_s)])
        }

    def stock(self, now_s: float) -> dict[str, int] | None:
        """Accelerators by pool that are there; what is not given up yet counts. None: nothing is known to limit."""
        if self.places is None:
            return None
        stock = dict(self.places.stock())
        live: Counter[str] = Counter()
        for member in self.members:
            live[member.column.pool] += member.column.accelerators * _stays(member)
        for name, column in list(self.unplaced.items()):
            if live[column.pool] + column.accelerators > stock.get(column.pool, 0):
                self._withdraw(name, now_s)  # its nodes are away: another pool may be asked
            else:
                live[column.pool] += column.accelerators
        return {pool: max(count, live[pool]) for pool, count in stock.items()}

    # -- routing -------------------------------------------------------------------------------------

    def reroute(self, rates: Sequence[float], now_s: float) -> None:
        """Compute the shares anew."""
        self.changed = False
        self.ready = {}
        for column in self.columns:
            open_ = [m for m in self.members if m.column.key == column.key and self._is_open(m, now_s)]
            if open_:
                self.ready[column.key] = open_
        counts = {key: len(members) for key, members in self.ready.items()}
        self.shares = routing_shares(self.columns, spread(self.columns, rates, counts))

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
        chosen = _least(self.ready[column])
        chosen.replica.take(request, now_s)
        if chosen.failed_s is not None:
            chosen.unanswered_since.append(now_s)

    def _wait_s(self, column: str) -> float:
        """Seconds until a request that goes there now is begun with."""
        return _least(self.ready[column]).replica.wait_s


def _stays(member: Member) -> bool:
    """Whether it counts among the replicas that are wanted."""
    return member.draining_s is None and not member.replaced


def _least(members: Sequence[Member]) -> Member:
    return members[0] if len(members) == 1 else min(members, key=lambda m: m.replica.work_s)
